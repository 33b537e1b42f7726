//! What is known of the cluster: objects as watches told of them and as our own writes were answered.
//!
//! A write's answer is taken in at once, so that the next look at the same object does not repeat it. What a watch tells
//! later counts only if it is newer. Objects are kept as text: a tree of JSON takes ten times the memory.

mod index;
mod ports;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use kube::api::{DynamicObject, ObjectMeta};
use rbg_api::keys;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::ResourceKind;
use crate::plan::{HookCall, HookResult};

/// Deleted objects of which a late event may still tell.
const MAX_DELETED: usize = 10_000;

/// What an object is called.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceKey {
    /// Its kind.
    pub kind: ResourceKind,
    /// Its namespace; empty if it is in none.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// An object.
#[derive(Debug)]
pub struct ObservedResource {
    /// What it is called.
    pub key: ResourceKey,
    /// Its UID.
    pub uid: String,
    /// The object whose part it is.
    controller: Option<(ResourceKey, String)>,
    /// The group that it belongs to, by label.
    pub(crate) group: Option<String>,
    /// Ports that it has chosen for pods.
    ports: Vec<u16>,
    version: u64,
    text: Box<str>,
}

/// All objects.
#[derive(Debug, Default)]
pub struct ResourceCache {
    objects: BTreeMap<ResourceKey, CachedResource>,
    index: index::ResourceIndex,
    deleted_uids: HashSet<String>,
    deleted_order: VecDeque<String>,
    /// Counts lists, to tell what a list has confirmed.
    era: u64,
    /// Kinds of which a complete list has been seen.
    listed: BTreeSet<ResourceKind>,
    /// Kinds that the API server does not serve.
    absent: BTreeSet<ResourceKind>,
    port_reservations: ports::PortReservations,
    /// What pods have answered last, by UID.
    hook_results: HashMap<String, (HookCall, HookResult)>,
}

#[derive(Debug)]
struct CachedResource {
    live: Arc<ObservedResource>,
    list_generation: u64,
}

impl ObservedResource {
    /// `None` if it is none of ours.
    fn new(key: ResourceKey, mut object: DynamicObject) -> Option<Self> {
        let kind = key.kind;
        let metadata = &mut object.metadata;
        if kind != ResourceKind::Group {
            metadata.managed_fields = None;
        }
        let uid = metadata.uid.clone()?;
        let version = version(metadata);
        let owners = metadata.owner_references.as_deref().unwrap_or_default();
        // Nobody controls an adapter, but it is part of a group all the same.
        let is_whole = |kind_of: &str| kind == ResourceKind::Adapter && kind_of == ResourceKind::Group.name();
        let mut wholes =
            owners.iter().filter(|owner| owner.controller == Some(true) || is_whole(&owner.kind));
        let controller = wholes.next().and_then(|owner| {
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

    /// The version of the cluster at which it was so.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The object, a pod without its version. `None` if it is none of that type, which a schema that others installed may allow.
    #[must_use]
    pub fn read<T: DeserializeOwned>(&self) -> Option<T> {
        match serde_json::from_str(&self.text) {
            Ok(object) => Some(object),
            Err(error) => {
                tracing::warn!(kind = self.key.kind.name(), name = self.key.name, %error, "unreadable object left out");
                None
            }
        }
    }

    /// Whose plan it changes: its own, its owner's, and its group's.
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

/// What plans look at of a pod's specification and status.
const RETAINED_POD_MEMBERS: [(&str, &[&str]); 2] = [
    ("spec", &["containers", "imagePullSecrets", "nodeName", "readinessGates"]),
    ("status", &["conditions", "containerStatuses", "message", "phase", "podIP", "reason"]),
];
/// And of each of its containers.
const RETAINED_CONTAINER_MEMBERS: [&str; 2] = ["image", "name"];

/// Clusters have many revisions, ConfigMaps and PodGroups that others keep.
fn is_ours(kind: ResourceKind, controller: Option<&(ResourceKey, String)>) -> bool {
    match kind {
        ResourceKind::Revision
        | ResourceKind::ConfigMap
        | ResourceKind::PodGroup
        | ResourceKind::VolcanoPodGroup => controller.is_some_and(|(owner, _)| owner.kind.is_custom()),
        _ => true,
    }
}

/// Only what plans look at is kept of objects of which there may be many: what else changes about them concerns nobody.
fn trim(kind: ResourceKind, object: &mut DynamicObject) {
    let metadata = &object.metadata;
    let (name, uid, labels) = (metadata.name.clone(), metadata.uid.clone(), metadata.labels.clone());
    match kind {
        ResourceKind::Node => {
            object.metadata = ObjectMeta { name, uid, labels, ..ObjectMeta::default() };
            object.data = json!({});
        }
        ResourceKind::ForeignPod => {
            let ends = metadata.deletion_timestamp.clone();
            let namespace = metadata.namespace.clone();
            object.metadata = ObjectMeta {
                name,
                namespace,
                uid,
                labels,
                deletion_timestamp: ends,
                ..ObjectMeta::default()
            };
            let node = object.data["spec"]["nodeName"].take();
            let conditions = object.data["status"]["conditions"].take();
            object.data = json!({ "spec": { "nodeName": node }, "status": { "conditions": conditions } });
        }
        ResourceKind::Pod | ResourceKind::WarmupPod => {
            // It changes with all that is not looked at.
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
    /// Takes an object in. Answers whose plans that changes: nobody's if something newer is known.
    pub fn upsert(&mut self, kind: ResourceKind, object: DynamicObject) -> Vec<ResourceKey> {
        let Some(key) = key(kind, &object.metadata) else { return Vec::new() };
        if object.metadata.uid.as_ref().is_none_or(|uid| self.deleted_uids.contains(uid)) {
            return Vec::new();
        }
        let era = self.era;
        // Watches tell of each write of ours what its answer has told.
        if let Some(held) = self.objects.get_mut(&key) {
            held.list_generation = era;
            if held.live.version >= version(&object.metadata) {
                return Vec::new();
            }
        }
        let Some(live) = ObservedResource::new(key, object) else { return Vec::new() };
        let mut is_same = false;
        if let Some(held) = self.objects.get(&live.key) {
            is_same = held.live.text == live.text;
            self.index.remove(&held.live);
        }
        let concerns = if is_same { Vec::new() } else { self.affected_by(&live) };
        self.index.insert(&live);
        self.objects.insert(live.key.clone(), CachedResource { live: Arc::new(live), list_generation: era });
        concerns
    }

    /// An object is gone. Answers whose plans that changes.
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
        if self.objects.get(key).is_none_or(|held| held.live.uid != uid) {
            return Vec::new();
        }
        let Some(held) = self.objects.remove(key) else { return Vec::new() };
        self.port_reservations.release_object(key);
        self.index.remove(&held.live);
        self.affected_by(&held.live)
    }

    /// Whose plan the object changes. A group's adapters tell what its status tells; its warmups go where its pods are.
    fn affected_by(&self, live: &ObservedResource) -> Vec<ResourceKey> {
        let mut concerns = live.affected_keys();
        if live.key.kind == ResourceKind::Group {
            let parts = self.index.children(&live.uid);
            concerns.extend(parts.filter(|key| key.kind == ResourceKind::Adapter).cloned());
        }
        let naming = match live.key.kind {
            ResourceKind::Profile => Some(ResourceKind::Group),
            ResourceKind::Group => Some(ResourceKind::Warmup),
            _ => None,
        };
        if let Some(kind) = naming {
            let others = self.of_kind(kind).filter(|other| {
                let may_name = live.key.namespace.is_empty() || live.key.namespace == other.key.namespace;
                may_name && other.text.contains(&live.key.name)
            });
            concerns.extend(others.map(|other| other.key.clone()));
        }
        if live.key.kind == ResourceKind::Node {
            concerns.extend(self.of_kind(ResourceKind::Warmup).map(|warmup| warmup.key.clone()));
        }
        concerns
    }

    /// A complete list begins.
    pub fn begin_list(&mut self) -> u64 {
        self.era += 1;
        self.era
    }

    /// A complete list has ended: what it did not confirm, and nobody told of since it began, is gone.
    pub fn end_list(&mut self, kind: ResourceKind, era: u64) -> Vec<ResourceKey> {
        self.listed.insert(kind);
        let unconfirmed = self.cached(kind).filter(|held| held.list_generation < era);
        let lost: Vec<Arc<ObservedResource>> = unconfirmed.map(|held| Arc::clone(&held.live)).collect();
        lost.iter().flat_map(|live| self.remove(&live.key, &live.uid)).collect()
    }

    /// Whether a complete list of the kind has been seen.
    #[must_use]
    pub fn is_synced(&self, kind: ResourceKind) -> bool {
        self.listed.contains(&kind)
    }

    /// Says whether the API server serves a kind.
    pub fn set_absent(&mut self, kind: ResourceKind, is_absent: bool) {
        if is_absent {
            self.absent.insert(kind);
        } else {
            self.absent.remove(&kind);
        }
    }

    /// Whether the API server is known not to serve the kind.
    #[must_use]
    pub fn is_absent(&self, kind: ResourceKind) -> bool {
        self.absent.contains(&kind)
    }

    /// What a pod has answered to that question.
    #[must_use]
    pub fn hook_result(&self, ask: &HookCall) -> Option<HookResult> {
        let (asked, answer) = self.hook_results.get(&ask.pod)?;
        (asked == ask).then(|| answer.clone())
    }

    /// Takes an answer in. Says whether it is another one than before.
    pub fn record_hook_result(&mut self, ask: HookCall, answer: HookResult) -> bool {
        if self.deleted_uids.contains(&ask.pod) {
            return false;
        }
        let now = (ask, answer);
        let is_new = self.hook_results.get(&now.0.pod) != Some(&now);
        self.hook_results.insert(now.0.pod.clone(), now);
        is_new
    }

    /// Names of all objects of a kind.
    #[must_use]
    pub fn all(&self, kind: ResourceKind) -> Vec<ResourceKey> {
        self.of_kind(kind).map(|live| live.key.clone()).collect()
    }

    /// All objects of a kind.
    pub fn of_kind(&self, kind: ResourceKind) -> impl Iterator<Item = &Arc<ObservedResource>> {
        self.cached(kind).map(|held| &held.live)
    }

    fn cached(&self, kind: ResourceKind) -> impl Iterator<Item = &CachedResource> {
        let first = ResourceKey { kind, namespace: String::new(), name: String::new() };
        let own = self.objects.range(first..).take_while(move |(key, _)| key.kind == kind);
        own.map(|(_, held)| held)
    }

    /// An object by name.
    #[must_use]
    pub fn get(&self, key: &ResourceKey) -> Option<Arc<ObservedResource>> {
        self.objects.get(key).map(|held| Arc::clone(&held.live))
    }

    /// Objects of a kind that belong to the owner of that UID.
    #[must_use]
    pub fn children(&self, owner: &str, kind: ResourceKind) -> Vec<Arc<ObservedResource>> {
        let keys = self.index.children(owner).filter(|key| key.kind == kind);
        keys.filter_map(|key| self.get(key)).collect()
    }

    /// Pods of a group, whoever made them.
    #[must_use]
    pub fn pods_of_group(&self, namespace: &str, group: &str) -> Vec<Arc<ObservedResource>> {
        self.index.pods(namespace, group).filter_map(|key| self.get(key)).collect()
    }

    /// How many objects there are of each kind.
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
