//! Snapshot of the objects that a plan for one object depends on.
//!
//! Taking one copies references only, so that the cache is locked for a short time: objects are deserialized from the snapshot.
//! The cost depends on the number of these objects, not on the number of others.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use moongate_render::TopologyKey;

use super::{ObservedResource, PortTable, ResourceCache, ResourceKey};
use crate::ResourceKind;
use crate::upgrade_hook::{HookCall, HookResult};

/// An object with all objects that a plan for it reads, as they were at one moment.
#[derive(Debug)]
pub struct ResourceSnapshot {
    subject: Arc<ObservedResource>,
    /// Objects that are read by their names.
    named: BTreeMap<ResourceKey, Arc<ObservedResource>>,
    /// Objects by the UID of the object that controls them.
    children: HashMap<String, Vec<Arc<ObservedResource>>>,
    /// Pods of the group, including those of other controllers.
    group_pods: Vec<Arc<ObservedResource>>,
    absent: BTreeSet<ResourceKind>,
    are_nodes_listed: bool,
    /// Last hook responses of pods, by UID.
    hook_results: HashMap<String, (HookCall, HookResult)>,
    ports: Arc<PortTable>,
    node_levels: Arc<[TopologyKey]>,
}

impl ResourceSnapshot {
    /// The object that the plan is for.
    #[must_use]
    pub fn subject(&self) -> &Arc<ObservedResource> {
        &self.subject
    }

    /// An object that plans read by its name.
    #[must_use]
    pub fn get(&self, key: &ResourceKey) -> Option<&Arc<ObservedResource>> {
        self.named.get(key)
    }

    /// Objects of a kind that are read by their names.
    pub fn of_kind(&self, kind: ResourceKind) -> impl Iterator<Item = &Arc<ObservedResource>> {
        self.named.values().filter(move |live| live.key.kind == kind)
    }

    /// Objects of a kind that belong to the owner with that UID.
    pub fn children(&self, owner: &str, kind: ResourceKind) -> impl Iterator<Item = &Arc<ObservedResource>> {
        self.children.get(owner).into_iter().flatten().filter(move |live| live.key.kind == kind)
    }

    /// Pods of the group, or of a warmup's target group, including those of other controllers.
    #[must_use]
    pub fn group_pods(&self) -> &[Arc<ObservedResource>] {
        &self.group_pods
    }

    /// Whether the API server does not serve the kind.
    #[must_use]
    pub fn is_absent(&self, kind: ResourceKind) -> bool {
        self.absent.contains(&kind)
    }

    /// Whether all nodes have been listed, so that a missing node does not exist.
    #[must_use]
    pub fn are_nodes_listed(&self) -> bool {
        self.are_nodes_listed
    }

    /// The pod's last response to this hook call.
    #[must_use]
    pub fn hook_result(&self, call: &HookCall) -> Option<HookResult> {
        let (last_call, result) = self.hook_results.get(&call.pod)?;
        (last_call == call).then(|| result.clone())
    }

    /// Ports in use in the whole cluster.
    #[must_use]
    pub fn ports(&self) -> &PortTable {
        &self.ports
    }

    /// Topology levels that the cluster's nodes have labels of.
    #[must_use]
    pub fn node_levels(&self) -> &[TopologyKey] {
        &self.node_levels
    }
}

impl ResourceCache {
    /// Snapshot for a plan for this object. `None` if it is not cached.
    pub fn snapshot(&mut self, key: &ResourceKey, now: Timestamp) -> Option<ResourceSnapshot> {
        PortTable::expire(&mut self.ports, now);
        let subject = self.get(key)?;
        let mut snapshot = ResourceSnapshot {
            subject: Arc::clone(&subject),
            named: BTreeMap::new(),
            children: HashMap::new(),
            group_pods: Vec::new(),
            absent: self.absent.clone(),
            are_nodes_listed: self.is_synced(ResourceKind::Node),
            hook_results: HashMap::new(),
            ports: Arc::clone(&self.ports),
            node_levels: Arc::clone(self.node_labels.levels()),
        };
        self.add_references(&subject, &mut snapshot);
        match key.kind {
            ResourceKind::GroupSet => {
                self.add_children(&subject.uid, &mut snapshot);
                // New groups must not have the name of another group.
                let first = ResourceKey { kind: ResourceKind::Group, name: String::new(), ..key.clone() };
                let groups = self.objects.range(first..).map(|(_, cached)| &cached.live);
                let groups = groups.take_while(|live| {
                    live.key.kind == ResourceKind::Group && live.key.namespace == key.namespace
                });
                snapshot.named.extend(groups.map(|live| (live.key.clone(), Arc::clone(live))));
            }
            ResourceKind::Group => self.add_group(&subject, &mut snapshot),
            ResourceKind::Set => self.add_set(&subject, &mut snapshot),
            ResourceKind::Adapter => {
                let groups: Vec<_> = snapshot.of_kind(ResourceKind::Group).cloned().collect();
                groups.iter().for_each(|group| self.add_children(&group.uid, &mut snapshot));
            }
            ResourceKind::Instance => self.add_instance(&subject, &mut snapshot),
            ResourceKind::Warmup => {
                self.add_children(&subject.uid, &mut snapshot);
                let nodes = self.of_kind(ResourceKind::Node);
                snapshot.named.extend(nodes.map(|live| (live.key.clone(), Arc::clone(live))));
                let group = snapshot.of_kind(ResourceKind::Group).next().map(|group| group.key.name.clone());
                if let Some(group) = group {
                    snapshot.group_pods = self.pods_of_group(&key.namespace, &group);
                }
            }
            _ => self.add_children(&subject.uid, &mut snapshot),
        }
        Some(snapshot)
    }

    /// A group's workloads with what these control, and its pods with their nodes.
    fn add_group(&self, group: &ObservedResource, snapshot: &mut ResourceSnapshot) {
        self.add_children(&group.uid, snapshot);
        for workload in snapshot.children.get(&group.uid).cloned().unwrap_or_default() {
            self.add_references(&workload, snapshot);
            self.add_children(&workload.uid, snapshot);
        }
        snapshot.group_pods = self.pods_of_group(&group.key.namespace, &group.key.name);
        for pod in snapshot.group_pods.clone() {
            self.add_references(&pod, snapshot);
        }
        // Where instances may be replaced.
        if self.fault_policy(&group.key.namespace, &group.key.name).is_some() {
            let nodes = self.of_kind(ResourceKind::Node);
            snapshot.named.extend(nodes.map(|live| (live.key.clone(), Arc::clone(live))));
        }
    }

    /// A set's instances with their pods, whose costs decide which instances are removed.
    fn add_set(&self, set: &ObservedResource, snapshot: &mut ResourceSnapshot) {
        self.add_children(&set.uid, snapshot);
        for child in snapshot.children.get(&set.uid).cloned().unwrap_or_default() {
            if child.key.kind == ResourceKind::Instance {
                self.add_children(&child.uid, snapshot);
                self.add_hook_results(&child.uid, snapshot);
            }
        }
    }

    /// An instance's pods with their nodes and hook responses.
    fn add_instance(&self, instance: &ObservedResource, snapshot: &mut ResourceSnapshot) {
        self.add_children(&instance.uid, snapshot);
        let policy =
            instance.group.as_ref().and_then(|group| self.fault_policy(&instance.key.namespace, group));
        snapshot.named.extend(policy.map(|policy| (policy.key.clone(), policy)));
        for pod in snapshot.children.get(&instance.uid).cloned().unwrap_or_default() {
            self.add_references(&pod, snapshot);
        }
        self.add_hook_results(&instance.uid, snapshot);
    }

    fn add_hook_results(&self, instance: &str, snapshot: &mut ResourceSnapshot) {
        for pod in snapshot.children.get(instance).into_iter().flatten() {
            if let Some(result) = self.hook_results.get(&pod.uid) {
                snapshot.hook_results.insert(pod.uid.clone(), result.clone());
            }
        }
    }

    fn add_children(&self, owner: &str, snapshot: &mut ResourceSnapshot) {
        let children: Vec<_> = self.index.children(owner).filter_map(|key| self.get(key)).collect();
        snapshot.children.insert(owner.to_owned(), children);
    }

    fn add_references(&self, live: &ObservedResource, snapshot: &mut ResourceSnapshot) {
        for key in &live.references {
            if !snapshot.named.contains_key(key)
                && let Some(live) = self.get(key)
            {
                snapshot.named.insert(key.clone(), live);
            }
        }
    }

    fn pods_of_group(&self, namespace: &str, group: &str) -> Vec<Arc<ObservedResource>> {
        self.index.pods(namespace, group).filter_map(|key| self.get(key)).collect()
    }
}
