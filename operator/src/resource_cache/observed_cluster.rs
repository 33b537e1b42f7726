//! The cluster as the operator observes it: changes from watches and from responses to writes fill the cache, and each queues the
//! objects whose plans depend on it. Workers take objects from the queue, and plan from a snapshot.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use kube::runtime::watcher::Event;
use parking_lot::Mutex;
use tokio::sync::watch::Sender;
use tokio::time::Instant;

use super::observed_resource::key;
use super::queue::ReconcileQueue;
use super::{ObservedResource, PortChoice, ResourceCache, ResourceKey, ResourceSnapshot};
use crate::ResourceKind;
use crate::upgrade_hook::{HookCall, HookResult};

/// A change of one object, from an event of a watch or from the response to a write.
#[derive(Debug)]
pub enum ObservedChange {
    /// The object exists, in this state.
    Present(ResourceKind, Box<DynamicObject>),
    /// The object with this UID is deleted.
    Gone(ResourceKey, String),
}

/// The cache with the queue of what is to be reconciled. No other module changes either.
#[derive(Debug)]
pub(crate) struct ObservedCluster {
    cache: Mutex<ResourceCache>,
    queue: ReconcileQueue,
    /// Kinds that have been listed completely once.
    listed: Sender<BTreeSet<ResourceKind>>,
}

impl ObservedCluster {
    /// Creates a cluster that allocates ports from this range; `None` turns allocation off.
    pub(crate) fn new(ports: Option<Range<u16>>) -> Self {
        Self {
            cache: Mutex::new(ResourceCache::with_ports(ports)),
            queue: ReconcileQueue::default(),
            listed: Sender::new(BTreeSet::new()),
        }
    }

    /// Applies a change to the cache, and queues the keys that it returns.
    fn update(&self, change: impl FnOnce(&mut ResourceCache) -> Vec<ResourceKey>) {
        let affected = change(&mut self.cache.lock());
        affected.into_iter().for_each(|key| self.queue.push(key));
    }

    /// Applies an event of a watch. `era` is the number of the watch's latest list.
    pub(super) fn apply_event(&self, kind: ResourceKind, event: Event<DynamicObject>, era: &mut u64) {
        match event {
            Event::Init => *era = self.cache.lock().begin_list(),
            Event::InitApply(object) | Event::Apply(object) => {
                self.apply(ObservedChange::Present(kind, Box::new(object)));
            }
            Event::InitDone => self.update(|cache| cache.end_list(kind, *era)),
            Event::Delete(object) => {
                if let Some(key) = key(kind, &object.metadata) {
                    self.apply(ObservedChange::Gone(key, object.metadata.uid.unwrap_or_default()));
                }
            }
        }
    }

    /// Applies a change that the response to a write or a watch event reports.
    pub(crate) fn apply(&self, change: ObservedChange) {
        self.update(|cache| apply_to(cache, change));
    }

    /// Applies a change, and queues the keys that it affects except for one.
    pub(crate) fn apply_without_requeue(&self, change: ObservedChange, except: &ResourceKey) {
        self.update(|cache| {
            let mut affected = apply_to(cache, change);
            affected.retain(|key| key != except);
            affected
        });
    }

    /// Records a hook's response. A changed one queues the object whose plan called the hook.
    pub(crate) fn record_hook_result(&self, key: ResourceKey, call: HookCall, result: HookResult) {
        self.update(|cache| if cache.record_hook_result(call, result) { vec![key] } else { Vec::new() });
    }

    /// The API server does not serve the kind.
    pub(super) fn set_absent(&self, kind: ResourceKind) {
        self.cache.lock().set_absent(kind, true);
    }

    /// The API server serves the kind by now: queues the groups, which may have been invalid without it.
    pub(super) fn set_served(&self, kind: ResourceKind) {
        self.update(|cache| {
            cache.set_absent(kind, false);
            cache.all(ResourceKind::Group)
        });
    }

    /// Whether the kind is completely listed, and not marked as such yet.
    pub(super) fn is_newly_listed(&self, kind: ResourceKind) -> bool {
        !self.listed.borrow().contains(&kind) && self.cache.lock().is_synced(kind)
    }

    /// Marks a kind as completely listed. Returns whether all kinds are.
    pub(super) fn mark_listed(&self, kind: ResourceKind) -> bool {
        self.listed.send_modify(|listed| {
            listed.insert(kind);
        });
        self.listed.borrow().len() == ResourceKind::ALL.len()
    }

    /// Waits until all kinds have been listed once: before, a missing object may only not have been observed yet. Returns whether
    /// that will ever happen.
    pub(crate) async fn wait_until_listed(&self) -> bool {
        let mut listed = self.listed.subscribe();
        listed.wait_for(|listed| listed.len() == ResourceKind::ALL.len()).await.is_ok()
    }

    /// The next key to reconcile. No other worker gets it before [`Self::done`].
    pub(crate) async fn next(&self) -> ResourceKey {
        self.queue.next().await
    }

    /// Number of keys that are due.
    pub(crate) fn ready_count(&self) -> usize {
        self.queue.ready_count()
    }

    /// Schedules a key, replacing its previous time.
    pub(crate) fn schedule(&self, at: Instant, key: ResourceKey) {
        self.queue.push_at(at, key);
    }

    /// Completes a key. A failed one is retried with exponential back-off.
    pub(crate) fn done(&self, key: &ResourceKey, success: bool) {
        self.queue.done(key, success);
    }

    pub(crate) fn get(&self, key: &ResourceKey) -> Option<Arc<ObservedResource>> {
        self.cache.lock().get(key)
    }

    /// Snapshot for a plan for this object. `None` if it is not cached.
    pub(crate) fn snapshot(&self, key: &ResourceKey, now: Timestamp) -> Option<ResourceSnapshot> {
        self.cache.lock().snapshot(key, now)
    }

    /// Reserves the ports that a plan chose. Returns whether that succeeded.
    #[must_use]
    pub(crate) fn reserve_ports(&self, choices: &[PortChoice], now: Timestamp) -> bool {
        self.cache.lock().reserve_ports(choices, now)
    }
}

fn apply_to(cache: &mut ResourceCache, change: ObservedChange) -> Vec<ResourceKey> {
    match change {
        ObservedChange::Present(kind, object) => cache.upsert(kind, *object),
        ObservedChange::Gone(key, uid) => cache.remove(&key, &uid),
    }
}
