//! One watch per kind for all controllers.

use std::pin::pin;
use std::sync::Arc;

use futures_util::TryStreamExt;
use kube::api::{Api, DynamicObject};
use kube::runtime::watcher::{self, Event, watcher};
use kube::runtime::{WatchStreamExt, watcher::Config};
use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::Kind;
use crate::observed::Key;

/// Follows the objects of a kind until stopped.
pub(super) async fn follow(shared: Arc<Shared>, kind: Kind, stop: CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = watch(&shared, kind) => {}
    }
}

async fn watch(shared: &Shared, kind: Kind) {
    let api: Api<DynamicObject> = match &shared.namespace {
        Some(namespace) => Api::namespaced_with(shared.client.clone(), namespace, &kind.resource()),
        None => Api::all_with(shared.client.clone(), &kind.resource()),
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
                let (namespace, name) = (metadata.namespace, metadata.name);
                let key = namespace.zip(name).map(|(namespace, name)| Key { kind, namespace, name });
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
        shared.listed.send_modify(|listed| {
            listed.insert(kind);
        });
        if shared.listed.borrow().len() == Kind::ALL.len() {
            shared.metrics.all_are_listed();
        }
    }
}

fn kind_is_listed(shared: &Shared, kind: Kind, era: u64) -> bool {
    era > 0 && !shared.listed.borrow().contains(&kind) && shared.observed.lock().has_ended(kind)
}

fn tell(kind: Kind, error: &watcher::Error) {
    let kind = kind.name();
    tracing::warn!(kind, %error, "a watch failed and is begun anew; check the API server and the operator's role");
}
