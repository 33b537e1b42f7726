//! Cache of the cluster's objects, from watches and from responses to our own writes.
//!
//! The response to a write is cached at once, so that the next plan for the object does not repeat it; a later watch event
//! counts only if it is newer. Objects are stored as JSON text: a parsed tree takes ten times the memory.

mod index;
mod ports;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use kube::api::{DynamicObject, ObjectMeta};
use rbg_api::keys;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::ResourceKind;
use crate::upgrade_hook::{HookCall, HookResult};

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

#[derive(Debug)]
pub struct ObservedResource {
    pub key: ResourceKey,
    pub uid: String,
    /// The controlling owner, with its UID.
    controller: Option<(ResourceKey, String)>,
    /// The group in its group-name label.
    pub(crate) group: Option<String>,
    /// Ports that it has allocated for pods.
    ports: Vec<u16>,
    version: u64,
    text: Box<str>,
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
    port_reservations: ports::PortReservations,
    /// Last hook responses of pods, by UID.
    hook_results: HashMap<String, (HookCall, HookResult)>,
}

#[derive(Debug)]
struct CachedResource {
    live: Arc<ObservedResource>,
    list_generation: u64,
}

impl ObservedResource {
    /// `None` if the object is not relevant for the operator.
    fn new(key: ResourceKey, mut object: DynamicObject) -> Option<Self> {
        let kind = key.kind;
        let metadata = &mut object.metadata;
        if kind != ResourceKind::Group {
            metadata.managed_fields = None;
        }
        let uid = metadata.uid.clone()?;
        let version = version(metadata);
        let owners = metadata.owner_references.as_deref().unwrap_or_default();
        // An adapter has no controlling owner, but belongs to its group.
        let is_owning_group =
            |kind_of: &str| kind == ResourceKind::Adapter && kind_of == ResourceKind::Group.name();
        let mut owning =
            owners.iter().filter(|owner| owner.controller == Some(true) || is_owning_group(&owner.kind));
        let controller = owning.next().and_then(|owner| {
            let kind = ResourceKind::parse(&owner.kind)?;
            Some((
                ResourceKey { kind, namespace: key.namespace.clone(), name: owner.name.clone() },
                owner.uid.clone(),
            ))
        });
        if !is_ours(kind, controller.as_ref()) {
            return None;
        }
        let group = metadata.labels.as_ref().and_then(|labels| labels.get(keys::GROUP_NAME)).cloned();
        if object.types.is_none() {
            object.types = Some(kube::api::TypeMeta {
                api_version: kind.api_version().into(),
                kind: kind.name().into(),
            });
        }
        let ports = ports::allocated_ports(kind, &object.metadata);
        trim(kind, &mut object);
        let text = serde_json::to_string(&object).ok()?.into_boxed_str();
        Some(Self { key, uid, controller, group, ports, version, text })
    }

    /// Resource version of the cached state.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Deserializes the object; a pod has no resource version. `None` if that fails, which a foreign CRD schema may allow.
    #[must_use]
    pub fn read<T: DeserializeOwned>(&self) -> Option<T> {
        match serde_json::from_str(&self.text) {
            Ok(object) => Some(object),
            Err(error) => {
                tracing::warn!(kind = self.key.kind.name(), name = self.key.name, %error, "skipped object that does not deserialize");
                None
            }
        }
    }

    /// Objects to reconcile when this one changes: itself, its owner, and its group.
    fn affected_keys(&self) -> Vec<ResourceKey> {
        let mut all = Vec::new();
        if self.key.kind.is_custom() {
            all.push(self.key.clone());
        }
        all.extend(
            self.controller.iter().map(|(owner, _)| owner.clone()).filter(|owner| owner.kind.is_custom()),
        );
        if self.key.kind == ResourceKind::Policy {
            all.push(ResourceKey { kind: ResourceKind::Group, ..self.key.clone() });
        }
        if matches!(self.key.kind, ResourceKind::Service | ResourceKind::ForeignPod)
            && let Some(name) = self.group.clone()
        {
            all.push(ResourceKey { kind: ResourceKind::Group, namespace: self.key.namespace.clone(), name });
        }
        all
    }
}

fn key(kind: ResourceKind, metadata: &ObjectMeta) -> Option<ResourceKey> {
    let namespace = metadata.namespace.clone().unwrap_or_default();
    Some(ResourceKey { kind, namespace, name: metadata.name.clone()? })
}

fn version(metadata: &ObjectMeta) -> u64 {
    metadata.resource_version.as_ref().and_then(|version| version.parse().ok()).unwrap_or(0)
}

/// Fields of a pod's spec and status that plans use.
const RETAINED_POD_MEMBERS: [(&str, &[&str]); 2] = [
    ("spec", &["containers", "imagePullSecrets", "nodeName", "readinessGates"]),
    ("status", &["conditions", "containerStatuses", "message", "phase", "podIP", "reason"]),
];
/// Fields of its containers that plans use.
const RETAINED_CONTAINER_MEMBERS: [&str; 2] = ["image", "name"];

/// Clusters have many revisions, ConfigMaps and PodGroups of other controllers.
fn is_ours(kind: ResourceKind, controller: Option<&(ResourceKey, String)>) -> bool {
    match kind {
        ResourceKind::Revision
        | ResourceKind::ConfigMap
        | ResourceKind::PodGroup
        | ResourceKind::VolcanoPodGroup => controller.is_some_and(|(owner, _)| owner.kind.is_custom()),
        _ => true,
    }
}

/// Removes fields that plans do not use from objects of numerous kinds, so that changes of these fields trigger no
/// reconciliation.
fn trim(kind: ResourceKind, object: &mut DynamicObject) {
    let metadata = &object.metadata;
    let (name, uid, labels) = (metadata.name.clone(), metadata.uid.clone(), metadata.labels.clone());
    match kind {
        ResourceKind::Node => {
            object.metadata = ObjectMeta { name, uid, labels, ..ObjectMeta::default() };
            object.data = json!({});
        }
        ResourceKind::ForeignPod => {
            let deletion_timestamp = metadata.deletion_timestamp.clone();
            let namespace = metadata.namespace.clone();
            object.metadata =
                ObjectMeta { name, namespace, uid, labels, deletion_timestamp, ..ObjectMeta::default() };
            let node = object.data["spec"]["nodeName"].take();
            let conditions = object.data["status"]["conditions"].take();
            object.data = json!({ "spec": { "nodeName": node }, "status": { "conditions": conditions } });
        }
        ResourceKind::Pod | ResourceKind::WarmupPod => {
            // The resource version also changes with the fields that are removed.
            object.metadata.resource_version = None;
            for (part, members) in RETAINED_POD_MEMBERS {
                object.data.get_mut(part).into_iter().for_each(|part| retain_members(part, members));
            }
            let containers = object.data.pointer_mut("/spec/containers").and_then(Value::as_array_mut);
            containers
                .into_iter()
                .flatten()
                .for_each(|container| retain_members(container, &RETAINED_CONTAINER_MEMBERS));
        }
        _ => {}
    }
}

fn retain_members(object: &mut Value, members: &[&str]) {
    if let Value::Object(object) = object {
        object.retain(|member, _| members.contains(&member.as_str()));
    }
}

impl ResourceCache {
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
            if cached.live.version >= version(&object.metadata) {
                return Vec::new();
            }
        }
        let Some(live) = ObservedResource::new(key, object) else { return Vec::new() };
        let mut is_same = false;
        if let Some(cached) = self.objects.get(&live.key) {
            is_same = cached.live.text == live.text;
            self.index.remove(&cached.live);
        }
        let affected = if is_same { Vec::new() } else { self.affected_by(&live) };
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
        self.port_reservations.release_object(key);
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

    /// The pod's last response to this hook call.
    #[must_use]
    pub fn hook_result(&self, call: &HookCall) -> Option<HookResult> {
        let (last_call, result) = self.hook_results.get(&call.pod)?;
        (last_call == call).then(|| result.clone())
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

    /// Objects of a kind that belong to the owner with that UID.
    #[must_use]
    pub fn children(&self, owner: &str, kind: ResourceKind) -> Vec<Arc<ObservedResource>> {
        let keys = self.index.children(owner).filter(|key| key.kind == kind);
        keys.filter_map(|key| self.get(key)).collect()
    }

    /// Pods of a group, including those of other controllers.
    #[must_use]
    pub fn pods_of_group(&self, namespace: &str, group: &str) -> Vec<Arc<ObservedResource>> {
        self.index.pods(namespace, group).filter_map(|key| self.get(key)).collect()
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
