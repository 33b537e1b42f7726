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

use crate::Kind;
use crate::plan::{Answer, Ask};

/// Deleted objects of which a late event may still tell.
const MAX_GONE: usize = 10_000;

/// What an object is called.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Its kind.
    pub kind: Kind,
    /// Its namespace; empty if it is in none.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// An object.
#[derive(Debug)]
pub struct Live {
    /// What it is called.
    pub key: Key,
    /// Its UID.
    pub uid: String,
    /// The object whose part it is.
    controller: Option<(Key, String)>,
    /// The group that it belongs to, by label.
    pub(crate) group: Option<String>,
    /// Ports that it has chosen for pods.
    ports: Vec<u16>,
    version: u64,
    text: Box<str>,
}

/// All objects.
#[derive(Debug, Default)]
pub struct Observed {
    objects: BTreeMap<Key, Held>,
    index: index::Index,
    gone: HashSet<String>,
    gone_order: VecDeque<String>,
    /// Counts lists, to tell what a list has confirmed.
    era: u64,
    /// Kinds of which a complete list has been seen.
    listed: BTreeSet<Kind>,
    /// Kinds that the API server does not serve.
    absent: BTreeSet<Kind>,
    promises: ports::Promises,
    /// What pods have answered last, by UID.
    answers: HashMap<String, (Ask, Answer)>,
}

#[derive(Debug)]
struct Held {
    live: Arc<Live>,
    era: u64,
}

impl Live {
    /// `None` if it is none of ours.
    fn new(key: Key, mut object: DynamicObject) -> Option<Self> {
        let kind = key.kind;
        let metadata = &mut object.metadata;
        if kind != Kind::Group {
            metadata.managed_fields = None;
        }
        let uid = metadata.uid.clone()?;
        let version = version(metadata);
        let owners = metadata.owner_references.as_deref().unwrap_or_default();
        // Nobody controls an adapter, but it is part of a group all the same.
        let is_whole = |kind_of: &str| kind == Kind::Adapter && kind_of == Kind::Group.name();
        let mut wholes =
            owners.iter().filter(|owner| owner.controller == Some(true) || is_whole(&owner.kind));
        let controller = wholes.next().and_then(|owner| {
            let kind = Kind::named(&owner.kind)?;
            Some((
                Key { kind, namespace: key.namespace.clone(), name: owner.name.clone() },
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
        let ports = ports::of(kind, &object.metadata);
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
    fn concerns(&self) -> Vec<Key> {
        let mut all = Vec::new();
        if self.key.kind.is_custom() {
            all.push(self.key.clone());
        }
        all.extend(
            self.controller.iter().map(|(owner, _)| owner.clone()).filter(|owner| owner.kind.is_custom()),
        );
        if self.key.kind == Kind::Policy {
            all.push(Key { kind: Kind::Group, ..self.key.clone() });
        }
        if matches!(self.key.kind, Kind::Service | Kind::ForeignPod)
            && let Some(name) = self.group.clone()
        {
            all.push(Key { kind: Kind::Group, namespace: self.key.namespace.clone(), name });
        }
        all
    }
}

fn key(kind: Kind, metadata: &ObjectMeta) -> Option<Key> {
    let namespace = metadata.namespace.clone().unwrap_or_default();
    Some(Key { kind, namespace, name: metadata.name.clone()? })
}

fn version(metadata: &ObjectMeta) -> u64 {
    metadata.resource_version.as_ref().and_then(|version| version.parse().ok()).unwrap_or(0)
}

/// What plans look at of a pod's specification and status.
const OF_PODS: [(&str, &[&str]); 2] = [
    ("spec", &["containers", "imagePullSecrets", "nodeName", "readinessGates"]),
    ("status", &["conditions", "containerStatuses", "message", "phase", "podIP", "reason"]),
];
/// And of each of its containers.
const OF_CONTAINERS: [&str; 2] = ["image", "name"];

/// Clusters have many revisions, ConfigMaps and PodGroups that others keep.
fn is_ours(kind: Kind, controller: Option<&(Key, String)>) -> bool {
    match kind {
        Kind::Revision | Kind::ConfigMap | Kind::PodGroup | Kind::VolcanoPodGroup => {
            controller.is_some_and(|(owner, _)| owner.kind.is_custom())
        }
        _ => true,
    }
}

/// Only what plans look at is kept of objects of which there may be many: what else changes about them concerns nobody.
fn trim(kind: Kind, object: &mut DynamicObject) {
    let metadata = &object.metadata;
    let (name, uid, labels) = (metadata.name.clone(), metadata.uid.clone(), metadata.labels.clone());
    match kind {
        Kind::Node => {
            object.metadata = ObjectMeta { name, uid, labels, ..ObjectMeta::default() };
            object.data = json!({});
        }
        Kind::ForeignPod => {
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
        Kind::Pod | Kind::WarmupPod => {
            // It changes with all that is not looked at.
            object.metadata.resource_version = None;
            for (part, members) in OF_PODS {
                object.data.get_mut(part).into_iter().for_each(|part| keep(part, members));
            }
            let containers = object.data.pointer_mut("/spec/containers").and_then(Value::as_array_mut);
            containers.into_iter().flatten().for_each(|container| keep(container, &OF_CONTAINERS));
        }
        _ => {}
    }
}

fn keep(object: &mut Value, members: &[&str]) {
    if let Value::Object(object) = object {
        object.retain(|member, _| members.contains(&member.as_str()));
    }
}

impl Observed {
    /// Takes an object in. Answers whose plans that changes: nobody's if something newer is known.
    pub fn take(&mut self, kind: Kind, object: DynamicObject) -> Vec<Key> {
        let Some(key) = key(kind, &object.metadata) else { return Vec::new() };
        if object.metadata.uid.as_ref().is_none_or(|uid| self.gone.contains(uid)) {
            return Vec::new();
        }
        let era = self.era;
        // Watches tell of each write of ours what its answer has told.
        if let Some(held) = self.objects.get_mut(&key) {
            held.era = era;
            if held.live.version >= version(&object.metadata) {
                return Vec::new();
            }
        }
        let Some(live) = Live::new(key, object) else { return Vec::new() };
        let mut is_same = false;
        if let Some(held) = self.objects.get(&live.key) {
            is_same = held.live.text == live.text;
            self.index.unlink(&held.live);
        }
        let concerns = if is_same { Vec::new() } else { self.concerned_by(&live) };
        self.index.link(&live);
        self.objects.insert(live.key.clone(), Held { live: Arc::new(live), era });
        concerns
    }

    /// An object is gone. Answers whose plans that changes.
    pub fn lose(&mut self, key: &Key, uid: &str) -> Vec<Key> {
        self.answers.remove(uid);
        if self.gone.insert(uid.to_owned()) {
            self.gone_order.push_back(uid.to_owned());
            if self.gone_order.len() > MAX_GONE
                && let Some(oldest) = self.gone_order.pop_front()
            {
                self.gone.remove(&oldest);
            }
        }
        if self.objects.get(key).is_none_or(|held| held.live.uid != uid) {
            return Vec::new();
        }
        let Some(held) = self.objects.remove(key) else { return Vec::new() };
        self.promises.end(key);
        self.index.unlink(&held.live);
        self.concerned_by(&held.live)
    }

    /// Whose plan the object changes. A group's adapters tell what its status tells; its warmups go where its pods are.
    fn concerned_by(&self, live: &Live) -> Vec<Key> {
        let mut concerns = live.concerns();
        if live.key.kind == Kind::Group {
            let parts = self.index.parts(&live.uid);
            concerns.extend(parts.filter(|key| key.kind == Kind::Adapter).cloned());
        }
        let naming = match live.key.kind {
            Kind::Profile => Some(Kind::Group),
            Kind::Group => Some(Kind::Warmup),
            _ => None,
        };
        if let Some(kind) = naming {
            let others = self.of_kind(kind).filter(|other| {
                let may_name = live.key.namespace.is_empty() || live.key.namespace == other.key.namespace;
                may_name && other.text.contains(&live.key.name)
            });
            concerns.extend(others.map(|other| other.key.clone()));
        }
        if live.key.kind == Kind::Node {
            concerns.extend(self.of_kind(Kind::Warmup).map(|warmup| warmup.key.clone()));
        }
        concerns
    }

    /// A complete list begins.
    pub fn begin_list(&mut self) -> u64 {
        self.era += 1;
        self.era
    }

    /// A complete list has ended: what it did not confirm, and nobody told of since it began, is gone.
    pub fn end_list(&mut self, kind: Kind, era: u64) -> Vec<Key> {
        self.listed.insert(kind);
        let unconfirmed = self.held(kind).filter(|held| held.era < era);
        let lost: Vec<Arc<Live>> = unconfirmed.map(|held| Arc::clone(&held.live)).collect();
        lost.iter().flat_map(|live| self.lose(&live.key, &live.uid)).collect()
    }

    /// Whether a complete list of the kind has been seen.
    #[must_use]
    pub fn has_ended(&self, kind: Kind) -> bool {
        self.listed.contains(&kind)
    }

    /// Says whether the API server serves a kind.
    pub fn set_absent(&mut self, kind: Kind, is_absent: bool) {
        if is_absent {
            self.absent.insert(kind);
        } else {
            self.absent.remove(&kind);
        }
    }

    /// Whether the API server is known not to serve the kind.
    #[must_use]
    pub fn is_absent(&self, kind: Kind) -> bool {
        self.absent.contains(&kind)
    }

    /// What a pod has answered to that question.
    #[must_use]
    pub fn answer(&self, ask: &Ask) -> Option<Answer> {
        let (asked, answer) = self.answers.get(&ask.pod)?;
        (asked == ask).then(|| answer.clone())
    }

    /// Takes an answer in. Says whether it is another one than before.
    pub fn take_answer(&mut self, ask: Ask, answer: Answer) -> bool {
        if self.gone.contains(&ask.pod) {
            return false;
        }
        let now = (ask, answer);
        let is_new = self.answers.get(&now.0.pod) != Some(&now);
        self.answers.insert(now.0.pod.clone(), now);
        is_new
    }

    /// Names of all objects of a kind.
    #[must_use]
    pub fn all(&self, kind: Kind) -> Vec<Key> {
        self.of_kind(kind).map(|live| live.key.clone()).collect()
    }

    /// All objects of a kind.
    pub fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &Arc<Live>> {
        self.held(kind).map(|held| &held.live)
    }

    fn held(&self, kind: Kind) -> impl Iterator<Item = &Held> {
        let first = Key { kind, namespace: String::new(), name: String::new() };
        let own = self.objects.range(first..).take_while(move |(key, _)| key.kind == kind);
        own.map(|(_, held)| held)
    }

    /// An object by name.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<Arc<Live>> {
        self.objects.get(key).map(|held| Arc::clone(&held.live))
    }

    /// Objects of a kind that belong to the owner of that UID.
    #[must_use]
    pub fn children(&self, owner: &str, kind: Kind) -> Vec<Arc<Live>> {
        let keys = self.index.parts(owner).filter(|key| key.kind == kind);
        keys.filter_map(|key| self.get(key)).collect()
    }

    /// Pods of a group, whoever made them.
    #[must_use]
    pub fn pods_of_group(&self, namespace: &str, group: &str) -> Vec<Arc<Live>> {
        self.index.pods(namespace, group).filter_map(|key| self.get(key)).collect()
    }

    /// How many objects there are of each kind.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<Kind, usize> {
        let mut counts = BTreeMap::new();
        for key in self.objects.keys() {
            *counts.entry(key.kind).or_default() += 1;
        }
        counts
    }
}

#[cfg(test)]
mod tests;
