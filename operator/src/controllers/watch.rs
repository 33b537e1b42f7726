//! One watch per kind for all controllers.

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

/// Between two looks at whether a kind is served by now.
const ABSENT_RECHECK: Duration = Duration::from_secs(30);
/// The same after an API server that did not say.
const UNKNOWN_RECHECK: Duration = Duration::from_secs(1);

/// Objects of one page of a list. While a page is read, it takes ten times the memory that is kept of it.
const PAGE: u32 = 50;

/// Follows the objects of a kind until stopped.
pub(super) async fn watch_kind(shared: Arc<ControllerContext>, kind: ResourceKind, stop: CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = watch(&shared, kind) => {}
    }
}

/// Returns when the API server serves the kind. Work goes on without it.
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
    // Groups that were refused for want of it.
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
                // Whoever may not see nodes does without them, and without profiles as long as no group names one.
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
        // Nodes tell of their health all the time, and only their labels are looked at.
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
    let whole = |part: PartialObjectMeta<DynamicObject>| DynamicObject {
        types: None,
        metadata: part.metadata,
        data: serde_json::Value::default(),
    };
    match event {
        Event::Init => Event::Init,
        Event::InitApply(part) => Event::InitApply(whole(part)),
        Event::InitDone => Event::InitDone,
        Event::Apply(part) => Event::Apply(whole(part)),
        Event::Delete(part) => Event::Delete(whole(part)),
    }
}

fn handle_event(shared: &ControllerContext, kind: ResourceKind, event: Event<DynamicObject>, era: &mut u64) {
    let concerns = {
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
    // Before all kinds have been listed once, what is missing may only not have been heard of.
    for key in concerns {
        shared.queue.push(key);
    }
    if kind_is_listed(shared, kind, *era) {
        mark_listed(shared, kind);
    }
}

/// All that there is of the kind is known.
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
    tracing::warn!(kind, %error, "a watch failed and is begun anew; check the API server and the operator's role");
}
