//! One watch per kind for all controllers.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use kube::Error;
use kube::api::{Api, DynamicObject};
use kube::runtime::watcher::{Event, watcher};
use kube::runtime::{WatchStreamExt, watcher::Config};
use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::Kind;
use crate::observed::Key;

/// Between two looks at whether a kind is served by now.
const ABSENT: Duration = Duration::from_secs(30);
/// The same after an API server that did not say.
const UNKNOWN: Duration = Duration::from_secs(1);

/// Follows the objects of a kind until stopped.
pub(super) async fn follow(shared: Arc<Shared>, kind: Kind, stop: CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = watch(&shared, kind) => {}
    }
}

/// Returns when the API server serves the kind. Work goes on without it.
async fn wait_until_served(shared: &Shared, kind: Kind) {
    let resource = kind.resource();
    loop {
        let pause = match shared.client.list_api_group_resources(&resource.api_version).await {
            Ok(list) if list.resources.iter().any(|served| served.name == resource.plural) => break,
            Ok(_) => ABSENT,
            Err(Error::Api(status)) if status.code == 404 => ABSENT,
            Err(error) => {
                tell(kind, &error);
                UNKNOWN
            }
        };
        if pause == ABSENT {
            shared.observed.lock().set_absent(kind, true);
            mark_listed(shared, kind);
        }
        tokio::time::sleep(pause).await;
    }
    // Groups that were refused for want of it.
    let waiting = {
        let mut observed = shared.observed.lock();
        observed.set_absent(kind, false);
        observed.all(Kind::Group)
    };
    for key in waiting {
        shared.queue.push(key);
    }
}

async fn watch(shared: &Shared, kind: Kind) {
    if kind.is_optional() {
        wait_until_served(shared, kind).await;
    }
    let api: Api<DynamicObject> = match &shared.namespace {
        Some(namespace) if kind != Kind::Profile => {
            Api::namespaced_with(shared.client.clone(), namespace, &kind.resource())
        }
        _ => Api::all_with(shared.client.clone(), &kind.resource()),
    };
    let mut config = Config::default();
    if let Some(label) = kind.label() {
        config = config.labels(label);
    }
    let mut events = pin!(watcher(api, config).default_backoff());
    let mut era = 0;
    loop {
        match events.try_next().await {
            Ok(Some(event)) => take(shared, kind, event, &mut era),
            Ok(None) => return,
            Err(error) => {
                shared.metrics.watch_failed(kind);
                tell(kind, &error);
            }
        }
    }
}

fn take(shared: &Shared, kind: Kind, event: Event<DynamicObject>, era: &mut u64) {
    let concerns = {
        let mut observed = shared.observed.lock();
        match event {
            Event::Init => {
                *era = observed.begin_list();
                Vec::new()
            }
            Event::InitApply(object) | Event::Apply(object) => observed.take(kind, object),
            Event::InitDone => observed.end_list(kind, *era),
            Event::Delete(object) => {
                let metadata = object.metadata;
                let namespace = metadata.namespace.unwrap_or_default();
                let key = metadata.name.map(|name| Key { kind, namespace, name });
                key.map(|key| observed.lose(&key, metadata.uid.as_deref().unwrap_or_default()))
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
fn mark_listed(shared: &Shared, kind: Kind) {
    shared.listed.send_modify(|listed| {
        listed.insert(kind);
    });
    if shared.listed.borrow().len() == Kind::ALL.len() {
        shared.metrics.all_are_listed();
    }
}

fn kind_is_listed(shared: &Shared, kind: Kind, era: u64) -> bool {
    era > 0 && !shared.listed.borrow().contains(&kind) && shared.observed.lock().has_ended(kind)
}

fn tell(kind: Kind, error: &dyn std::error::Error) {
    let kind = kind.name();
    tracing::warn!(kind, %error, "a watch failed and is begun anew; check the API server and the operator's role");
}
