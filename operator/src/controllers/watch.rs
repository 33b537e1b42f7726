//! Watches: one per kind, shared by all controllers.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::BoxStream;
use futures_util::{StreamExt, TryStreamExt};
use kube::Error;
use kube::api::{Api, DynamicObject};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{Error as WatchError, Event, watcher};
use kube::runtime::{WatchStreamExt, watcher::Config};
use tokio_util::sync::CancellationToken;

use super::ControllerContext;
use crate::ResourceKind;
use crate::resource_cache::ResourceKey;

/// Interval between checks whether a kind is served by now.
const ABSENT_RECHECK: Duration = Duration::from_secs(30);
/// Interval after an error of the API server.
const UNKNOWN_RECHECK: Duration = Duration::from_secs(1);

/// Objects per page of a list. While a page is decoded, it takes ten times the memory of its cached objects.
const PAGE: u32 = 50;

/// Watches the objects of a kind until stopped.
pub(super) async fn watch_kind(shared: Arc<ControllerContext>, kind: ResourceKind, stop: CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = watch(&shared, kind) => {}
    }
}

/// Waits until the API server serves the kind. Other kinds are processed meanwhile.
async fn wait_until_served(shared: &ControllerContext, kind: ResourceKind) {
    let resource = kind.resource();
    loop {
        let pause = match shared.client.list_api_group_resources(&resource.api_version).await {
            Ok(list) if list.resources.iter().any(|served| served.name == resource.plural) => break,
            Ok(_) => ABSENT_RECHECK,
            Err(Error::Api(status)) if status.code == 404 => ABSENT_RECHECK,
            Err(error) => {
                log_watch_error(kind, &error);
                UNKNOWN_RECHECK
            }
        };
        if pause == ABSENT_RECHECK {
            shared.observed.lock().set_absent(kind, true);
            mark_listed(shared, kind);
        }
        tokio::time::sleep(pause).await;
    }
    // Groups that were invalid because the kind was not served.
    let waiting = {
        let mut observed = shared.observed.lock();
        observed.set_absent(kind, false);
        observed.all(ResourceKind::Group)
    };
    for key in waiting {
        shared.queue.push(key);
    }
}

async fn watch(shared: &ControllerContext, kind: ResourceKind) {
    if kind.is_optional() {
        wait_until_served(shared, kind).await;
    }
    let mut events = pin!(events(shared, kind).default_backoff());
    let mut era = 0;
    loop {
        match events.try_next().await {
            Ok(Some(event)) => handle_event(shared, kind, event, &mut era),
            Ok(None) => return,
            Err(error) => {
                shared.metrics.watch_failed(kind);
                log_watch_error(kind, &error);
                // Without permission for nodes, the operator runs without them; without permission for profiles, only groups that use one
                // fail.
                if kind == ResourceKind::Node || kind.is_of_cluster() && is_refusal(&error) {
                    mark_listed(shared, kind);
                }
            }
        }
    }
}

fn is_refusal(error: &WatchError) -> bool {
    matches!(error, WatchError::InitialListFailed(Error::Api(status)) if status.code == 403)
}

type WatchEventStream = BoxStream<'static, Result<Event<DynamicObject>, WatchError>>;

fn events(shared: &ControllerContext, kind: ResourceKind) -> WatchEventStream {
    let (client, resource) = (shared.client.clone(), kind.resource());
    let mut config = Config::default().page_size(PAGE);
    if let Some(selector) = kind.selector() {
        config = config.labels(selector);
    }
    match &shared.namespace {
        // Nodes are watched by metadata only: their statuses change all the time, and only labels are used.
        _ if kind == ResourceKind::Node => {
            let api = Api::<PartialObjectMeta<DynamicObject>>::all_with(client, &resource);
            watcher(api, config).map_ok(into_dynamic_event).boxed()
        }
        Some(namespace) if !kind.is_of_cluster() => {
            watcher(Api::namespaced_with(client, namespace, &resource), config).boxed()
        }
        _ => watcher(Api::all_with(client, &resource), config).boxed(),
    }
}

fn into_dynamic_event(event: Event<PartialObjectMeta<DynamicObject>>) -> Event<DynamicObject> {
    let to_dynamic = |part: PartialObjectMeta<DynamicObject>| DynamicObject {
        types: None,
        metadata: part.metadata,
        data: serde_json::Value::default(),
    };
    match event {
        Event::Init => Event::Init,
        Event::InitApply(part) => Event::InitApply(to_dynamic(part)),
        Event::InitDone => Event::InitDone,
        Event::Apply(part) => Event::Apply(to_dynamic(part)),
        Event::Delete(part) => Event::Delete(to_dynamic(part)),
    }
}

fn handle_event(shared: &ControllerContext, kind: ResourceKind, event: Event<DynamicObject>, era: &mut u64) {
    let affected = {
        let mut observed = shared.observed.lock();
        match event {
            Event::Init => {
                *era = observed.begin_list();
                Vec::new()
            }
            Event::InitApply(object) | Event::Apply(object) => observed.upsert(kind, object),
            Event::InitDone => observed.end_list(kind, *era),
            Event::Delete(object) => {
                let metadata = object.metadata;
                let namespace = metadata.namespace.unwrap_or_default();
                let key = metadata.name.map(|name| ResourceKey { kind, namespace, name });
                key.map(|key| observed.remove(&key, metadata.uid.as_deref().unwrap_or_default()))
                    .unwrap_or_default()
            }
        }
    };
    // Workers wait until all kinds have been listed once: a missing object may only not have been observed yet.
    for key in affected {
        shared.queue.push(key);
    }
    if kind_is_listed(shared, kind, *era) {
        mark_listed(shared, kind);
    }
}

/// Marks a kind as completely listed.
fn mark_listed(shared: &ControllerContext, kind: ResourceKind) {
    shared.listed.send_modify(|listed| {
        listed.insert(kind);
    });
    if shared.listed.borrow().len() == ResourceKind::ALL.len() {
        shared.metrics.set_synced();
    }
}

fn kind_is_listed(shared: &ControllerContext, kind: ResourceKind, era: u64) -> bool {
    era > 0 && !shared.listed.borrow().contains(&kind) && shared.observed.lock().is_synced(kind)
}

fn log_watch_error(kind: ResourceKind, error: &dyn std::error::Error) {
    let kind = kind.name();
    tracing::warn!(kind, %error, "watch failed; restarting. Check the API server and the operator's role");
}
