//! One cached object: what the cache and its index read from it, and its JSON text.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::api::{DynamicObject, ObjectMeta};
use moongate_render::RoleNames;
use rbg_api::keys;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{ResourceKey, ports};
use crate::ResourceKind;
use crate::plan::FIELD_MANAGER;

/// Kinds of which a group has at most one object, with the group's name.
const OF_A_GROUP: [ResourceKind; 4] =
    [ResourceKind::ConfigMap, ResourceKind::Policy, ResourceKind::PodGroup, ResourceKind::VolcanoPodGroup];

#[derive(Debug)]
pub struct ObservedResource {
    pub key: ResourceKey,
    pub uid: String,
    /// The controlling owner, with its UID.
    pub(super) controller: Option<(ResourceKey, String)>,
    /// The group in its group-name label.
    pub(crate) group: Option<String>,
    /// Ports that it has allocated for pods.
    pub(super) ports: Vec<u16>,
    /// Objects that plans for it, or for its owners, read by their names.
    pub(super) references: Box<[ResourceKey]>,
    version: u64,
    pub(super) text: Box<str>,
}

impl ObservedResource {
    /// `None` if the object is not relevant for the operator.
    pub(super) fn new(key: ResourceKey, mut object: DynamicObject) -> Option<Self> {
        let kind = key.kind;
        let metadata = &mut object.metadata;
        retain_managed_fields(kind, metadata);
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
        let references = references(&key, &object.data);
        trim(kind, &mut object);
        let text = serde_json::to_string(&object).ok()?.into_boxed_str();
        Some(Self { key, uid, controller, group, ports, references, version, text })
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
    pub(super) fn affected_keys(&self) -> Vec<ResourceKey> {
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

pub(super) fn key(kind: ResourceKind, metadata: &ObjectMeta) -> Option<ResourceKey> {
    let namespace = metadata.namespace.clone().unwrap_or_default();
    Some(ResourceKey { kind, namespace, name: metadata.name.clone()? })
}

pub(super) fn version(metadata: &ObjectMeta) -> u64 {
    metadata.resource_version.as_ref().and_then(|version| version.parse().ok()).unwrap_or(0)
}

/// Names in an object's spec of other objects that a plan needs, and of those that it would create.
fn references(key: &ResourceKey, data: &Value) -> Box<[ResourceKey]> {
    let named =
        |kind, name: &str| ResourceKey { kind, namespace: key.namespace.clone(), name: name.to_owned() };
    let of_cluster = |kind, name: &str| ResourceKey { kind, namespace: String::new(), name: name.to_owned() };
    let spec = &data["spec"];
    match key.kind {
        ResourceKind::Pod | ResourceKind::ForeignPod => {
            spec["nodeName"].as_str().map(|node| of_cluster(ResourceKind::Node, node)).into_iter().collect()
        }
        ResourceKind::Set
        | ResourceKind::StatefulSet
        | ResourceKind::Deployment
        | ResourceKind::LeaderWorkerSet => [named(ResourceKind::Adapter, &key.name)].into(),
        ResourceKind::Adapter => {
            let group = spec["scaleTargetRef"]["name"].as_str();
            group.map(|group| named(ResourceKind::Group, group)).into_iter().collect()
        }
        ResourceKind::Warmup => {
            let group = spec["targetRoleBasedGroup"]["name"].as_str();
            group.map(|group| named(ResourceKind::Group, group)).into_iter().collect()
        }
        ResourceKind::Group => {
            let mut all = OF_A_GROUP.map(|kind| named(kind, &key.name)).to_vec();
            for role in spec["roles"].as_array().into_iter().flatten() {
                let names = RoleNames::new(&key.name, role["name"].as_str().unwrap_or_default());
                all.push(named(ResourceKind::Service, &names.service));
                all.push(named(ResourceKind::Adapter, &names.workload));
                let runtimes = role["engineRuntimes"].as_array().into_iter().flatten();
                let profiles = runtimes.filter_map(|runtime| runtime["profileName"].as_str());
                all.extend(profiles.map(|profile| of_cluster(ResourceKind::Profile, profile)));
            }
            all.into()
        }
        _ => Box::default(),
    }
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
            object.data = json!({ "status": { "conditions": readiness(&object.data) } });
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

/// Removes managed fields that plans do not use: those of other managers, and all of kinds whose plans compare no managed fields.
fn retain_managed_fields(kind: ResourceKind, metadata: &mut ObjectMeta) {
    let is_own = |entry: &ManagedFieldsEntry| entry.manager.as_deref() == Some(FIELD_MANAGER);
    match kind {
        // Other managers show whether the group is still written as v1alpha1.
        ResourceKind::Group => {}
        ResourceKind::Adapter
        | ResourceKind::Policy
        | ResourceKind::Set
        | ResourceKind::ConfigMap
        | ResourceKind::Service
        | ResourceKind::StatefulSet
        | ResourceKind::Deployment
        | ResourceKind::LeaderWorkerSet
        | ResourceKind::PodGroup
        | ResourceKind::VolcanoPodGroup => {
            let entries = metadata.managed_fields.get_or_insert_default();
            entries.retain(|entry| is_own(entry) && entry.operation.as_deref() == Some("Apply"));
        }
        // Instances are replaced as a whole; only their labels come from several managers.
        ResourceKind::Instance => {
            let entries = metadata.managed_fields.get_or_insert_default();
            entries.retain(|entry| is_own(entry) && entry.subresource.is_none());
            for fields in entries.iter_mut().filter_map(|entry| entry.fields_v1.as_mut()) {
                retain_members(&mut fields.0, &["f:metadata"]);
                fields
                    .0
                    .get_mut("f:metadata")
                    .into_iter()
                    .for_each(|fields| retain_members(fields, &["f:labels"]));
            }
        }
        _ => metadata.managed_fields = None,
    }
}

/// The `Ready` condition of a node, without its heartbeat.
fn readiness(node: &Value) -> Vec<Value> {
    let conditions = node["status"]["conditions"].as_array().into_iter().flatten();
    let ready = conditions.filter(|condition| condition["type"] == "Ready").map(|condition| {
        let mut condition = condition.clone();
        retain_members(&mut condition, &["lastTransitionTime", "status", "type"]);
        condition
    });
    ready.collect()
}

fn retain_members(object: &mut Value, members: &[&str]) {
    if let Value::Object(object) = object {
        object.retain(|member, _| members.contains(&member.as_str()));
    }
}
