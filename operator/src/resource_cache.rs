//! Cache of the cluster's objects, from watches and from responses to our own writes, and the queue of objects whose plans depend
//! on what has changed.
//!
//! The response to a write is cached at once, so that the next plan for the object does not repeat it; a later watch event
//! counts only if it is newer. Objects are stored as JSON text: a parsed tree takes ten times the memory.
//!
//! Plans read a [`ResourceSnapshot`]: references to the objects that a plan for one object depends on, at one moment.

mod faults;
mod index;
mod observed_cluster;
mod observed_resource;
mod ports;
mod queue;
mod snapshot;
mod watch;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use moongate_render::NodeLabels;

use crate::ResourceKind;
use crate::upgrade_hook::{HookCall, HookResult};

pub use observed_cluster::ObservedChange;
pub(crate) use observed_cluster::ObservedCluster;
pub use observed_resource::ObservedResource;
use observed_resource::{key, version};
pub use ports::{PortChoice, PortTable};
pub use snapshot::ResourceSnapshot;
pub(crate) use watch::KindWatcher;

/// Deleted UIDs to remember, so that late events about them are dropped.
const MAX_DELETED: usize = 10_000;

/// Identity of an object in the cluster.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceKey {
    pub kind: ResourceKind,
    /// Its namespace; empty for cluster-scoped kinds.
    pub namespace: String,
    pub name: String,
}

/// Cache of all objects that the operator reads.
#[derive(Debug, Default)]
pub struct ResourceCache {
    objects: BTreeMap<ResourceKey, CachedResource>,
    index: index::ResourceIndex,
    deleted_uids: HashSet<String>,
    deleted_order: VecDeque<String>,
    /// Number of lists started, to determine the objects that a list did not contain.
    era: u64,
    /// Kinds that have been listed completely.
    listed: BTreeSet<ResourceKind>,
    /// Kinds that the API server does not serve.
    absent: BTreeSet<ResourceKind>,
    ports: Arc<PortTable>,
    /// Topology labels of all nodes.
    node_labels: NodeLabels,
    /// Last hook responses of pods, by UID.
    hook_results: HashMap<String, (HookCall, HookResult)>,
}

#[derive(Debug)]
struct CachedResource {
    live: Arc<ObservedResource>,
    list_generation: u64,
}

impl ResourceCache {
    /// Creates a cache that allocates ports from this range; `None` turns allocation off.
    #[must_use]
    pub fn with_ports(range: Option<Range<u16>>) -> Self {
        Self { ports: Arc::new(PortTable::new(range)), ..Self::default() }
    }

    /// Reserves the ports that a plan chose, until they are observed in the objects. Returns whether that succeeded: if another
    /// plan has taken one of them meanwhile, none is reserved.
    #[must_use]
    pub fn reserve_ports(&mut self, choices: &[PortChoice], now: Timestamp) -> bool {
        choices.is_empty() || Arc::make_mut(&mut self.ports).reserve_all(choices, now)
    }

    /// Adds or updates an object. Returns the keys to reconcile; none if the cached object is newer.
    pub fn upsert(&mut self, kind: ResourceKind, object: DynamicObject) -> Vec<ResourceKey> {
        let Some(key) = key(kind, &object.metadata) else { return Vec::new() };
        if object.metadata.uid.as_ref().is_none_or(|uid| self.deleted_uids.contains(uid)) {
            return Vec::new();
        }
        let era = self.era;
        // Watches report our own writes again, with the version that the response had.
        if let Some(cached) = self.objects.get_mut(&key) {
            cached.list_generation = era;
            if cached.live.version() >= version(&object.metadata) {
                return Vec::new();
            }
        }
        let Some(live) = ObservedResource::new(key, object) else { return Vec::new() };
        let mut is_same = false;
        if let Some(cached) = self.objects.get(&live.key) {
            is_same = cached.live.text == live.text;
            self.index.remove(&cached.live);
            PortTable::replace(&mut self.ports, &cached.live.ports, &live.ports);
        } else {
            PortTable::replace(&mut self.ports, &[], &live.ports);
        }
        let mut affected = if is_same { Vec::new() } else { self.affected_by(&live) };
        if kind == ResourceKind::Node
            && !is_same
            && let Some(labels) = live.read::<Node>().and_then(|node| node.metadata.labels)
            && self.node_labels.observe(&labels)
        {
            affected.extend(self.all(ResourceKind::Group));
        }
        self.index.insert(&live);
        self.objects.insert(live.key.clone(), CachedResource { live: Arc::new(live), list_generation: era });
        affected
    }

    /// Removes an object. Returns the keys to reconcile.
    pub fn remove(&mut self, key: &ResourceKey, uid: &str) -> Vec<ResourceKey> {
        self.hook_results.remove(uid);
        if self.deleted_uids.insert(uid.to_owned()) {
            self.deleted_order.push_back(uid.to_owned());
            if self.deleted_order.len() > MAX_DELETED
                && let Some(oldest) = self.deleted_order.pop_front()
            {
                self.deleted_uids.remove(&oldest);
            }
        }
        if self.objects.get(key).is_none_or(|cached| cached.live.uid != uid) {
            return Vec::new();
        }
        let Some(cached) = self.objects.remove(key) else { return Vec::new() };
        PortTable::release_object(&mut self.ports, key);
        PortTable::replace(&mut self.ports, &cached.live.ports, &[]);
        self.index.remove(&cached.live);
        self.affected_by(&cached.live)
    }

    /// Keys to reconcile when the object changes. Adapters publish their group's status; warmups follow the pods of their
    /// group.
    fn affected_by(&self, live: &ObservedResource) -> Vec<ResourceKey> {
        let mut affected = live.affected_keys();
        if live.key.kind == ResourceKind::Group {
            let parts = self.index.children(&live.uid);
            affected.extend(parts.filter(|key| key.kind == ResourceKind::Adapter).cloned());
        }
        let referencing_kind = match live.key.kind {
            ResourceKind::Profile => Some(ResourceKind::Group),
            ResourceKind::Group => Some(ResourceKind::Warmup),
            _ => None,
        };
        if let Some(kind) = referencing_kind {
            let others = self.of_kind(kind).filter(|other| {
                let may_reference =
                    live.key.namespace.is_empty() || live.key.namespace == other.key.namespace;
                may_reference && other.text.contains(&live.key.name)
            });
            affected.extend(others.map(|other| other.key.clone()));
        }
        if live.key.kind == ResourceKind::Node {
            affected.extend(self.of_kind(ResourceKind::Warmup).map(|warmup| warmup.key.clone()));
        }
        self.add_affected_by_fault(live, &mut affected);
        affected
    }

    /// Starts a complete list; returns its number.
    pub fn begin_list(&mut self) -> u64 {
        self.era += 1;
        self.era
    }

    /// Ends a complete list: removes objects that neither the list nor a later event contained.
    pub fn end_list(&mut self, kind: ResourceKind, era: u64) -> Vec<ResourceKey> {
        self.listed.insert(kind);
        let unconfirmed = self.cached(kind).filter(|cached| cached.list_generation < era);
        let lost: Vec<Arc<ObservedResource>> = unconfirmed.map(|cached| Arc::clone(&cached.live)).collect();
        lost.iter().flat_map(|live| self.remove(&live.key, &live.uid)).collect()
    }

    /// Whether the kind has been listed completely.
    #[must_use]
    pub fn is_synced(&self, kind: ResourceKind) -> bool {
        self.listed.contains(&kind)
    }

    /// Sets whether the API server does not serve a kind.
    pub fn set_absent(&mut self, kind: ResourceKind, is_absent: bool) {
        if is_absent {
            self.absent.insert(kind);
        } else {
            self.absent.remove(&kind);
        }
    }

    /// Whether the API server does not serve the kind.
    #[must_use]
    pub fn is_absent(&self, kind: ResourceKind) -> bool {
        self.absent.contains(&kind)
    }

    /// Stores a hook response. Returns whether it differs from the previous one.
    pub fn record_hook_result(&mut self, call: HookCall, result: HookResult) -> bool {
        if self.deleted_uids.contains(&call.pod) {
            return false;
        }
        let entry = (call, result);
        let is_new = self.hook_results.get(&entry.0.pod) != Some(&entry);
        self.hook_results.insert(entry.0.pod.clone(), entry);
        is_new
    }

    /// Keys of all objects of a kind.
    #[must_use]
    pub fn all(&self, kind: ResourceKind) -> Vec<ResourceKey> {
        self.of_kind(kind).map(|live| live.key.clone()).collect()
    }

    /// Iterates over all objects of a kind.
    pub fn of_kind(&self, kind: ResourceKind) -> impl Iterator<Item = &Arc<ObservedResource>> {
        self.cached(kind).map(|cached| &cached.live)
    }

    fn cached(&self, kind: ResourceKind) -> impl Iterator<Item = &CachedResource> {
        let first = ResourceKey { kind, namespace: String::new(), name: String::new() };
        let of_kind = self.objects.range(first..).take_while(move |(key, _)| key.kind == kind);
        of_kind.map(|(_, cached)| cached)
    }

    /// Looks up an object by its key.
    #[must_use]
    pub fn get(&self, key: &ResourceKey) -> Option<Arc<ObservedResource>> {
        self.objects.get(key).map(|cached| Arc::clone(&cached.live))
    }

    /// Number of objects of each kind.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<ResourceKind, usize> {
        let mut counts = BTreeMap::new();
        for key in self.objects.keys() {
            *counts.entry(key.kind).or_default() += 1;
        }
        counts
    }
}

#[cfg(test)]
mod tests;
