//! Renders the pods of a RoleInstance.

use rbg_api::template::{member_list, member_object};
use rbg_api::v1alpha2::{InstanceComponent, RoleInstance};
use rbg_api::{PodTemplate, conversion, keys};
use serde_json::{Map, Value, json};

use crate::manifest::{Manifest, ManifestMetadata, OwnerRef, StringMap};
use crate::pod_name::{label, pod_name, position, role_type};
use crate::{DomainPlacement, RenderError, affinity, environment, legacy, ports, queue};

/// Readiness gates of every pod: it is not being updated, and all pods of its instance are ready.
const GATES: [&str; 2] = ["InPlaceUpdateReady", "InstancePodReady"];

/// Node constraints of a pod, from the nodes of its predecessors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodePlacement {
    /// Names of the predecessors' nodes.
    pub nodes: Vec<String>,
    /// Whether the pod may run on these nodes only.
    pub required: bool,
    pub avoided_labels: Vec<String>,
    /// Domains of a replacement after a fault.
    pub domain: Option<DomainPlacement>,
}

/// Renders a pod of an instance. `hash` is that of the instance's revision.
///
/// # Errors
/// See [`RenderError`].
pub fn pod(
    instance: &RoleInstance,
    component: &InstanceComponent,
    id: i32,
    hash: &str,
    placement: &NodePlacement,
) -> Result<Manifest, RenderError> {
    let instance_name = instance.metadata.name.as_deref().ok_or(RenderError::NoMetadata("name"))?;
    let namespace = instance.metadata.namespace.as_deref().ok_or(RenderError::NoMetadata("namespace"))?;
    let name = pod_name(instance, &component.name, id);
    let mut template = component.template.clone();
    let injection = ports::pod_injection(instance, component, id, namespace)?;
    template.remove_annotation(keys::COMPONENT_DISCOVERY);
    environment::add_to_all_containers(&mut template, &injection.variables);
    template.set_annotations(&injection.annotations);
    template.set_labels(&labels(instance, component, id, hash));
    if is_legacy(instance) {
        template.set_labels(&legacy_labels(instance));
        legacy::add_environment(&mut template);
    }
    if let Some(service) = component.service_name.as_ref().filter(|service| !service.is_empty()) {
        template.spec_mut().insert("hostname".to_owned(), name.clone().into());
        template.spec_mut().insert("subdomain".to_owned(), service.clone().into());
    }
    let gates = template.list_mut("readinessGates");
    for gate in GATES.map(|gate| json!({ "conditionType": gate })) {
        if !gates.contains(&gate) {
            gates.push(gate);
        }
    }
    affinity::add_pod_affinity(&mut template, instance, component, id)?;
    queue::add_to_pod(instance, &mut template);
    if template.annotation(keys::GROUP_EXCLUSIVE_TOPOLOGY).is_none() {
        apply_node_placement(&mut template, placement);
    }
    let owner = OwnerRef {
        api_version: conversion::ApiVersion::V1alpha2.api_version().to_owned(),
        kind: "RoleInstance".to_owned(),
        name: instance_name.to_owned(),
        uid: instance.metadata.uid.clone().unwrap_or_default(),
        controller: true,
    };
    let metadata = ManifestMetadata {
        name: &name,
        namespace,
        labels: metadata_map(&template, "labels"),
        annotations: metadata_map(&template, "annotations"),
        owner: Some(&owner),
    };
    let spec = template.0.remove("spec").unwrap_or_default();
    Ok(Manifest::new("v1", "Pod", metadata, json!({ "spec": spec })))
}

/// Labels of a pod besides those of its template. An in-place update sets them again, since the template has no ordinals.
#[must_use]
pub fn labels(instance: &RoleInstance, component: &InstanceComponent, id: i32, hash: &str) -> StringMap {
    let instance_name = instance.metadata.name.as_deref().unwrap_or_default();
    let mut labels = StringMap::from([
        (keys::CONTROLLER_REVISION_HASH.to_owned(), hash.to_owned()),
        (keys::ROLE_INSTANCE_NAME.to_owned(), instance_name.to_owned()),
        (keys::COMPONENT_NAME.to_owned(), component.name.clone()),
        (keys::COMPONENT_ID.to_owned(), id.to_string()),
    ]);
    if role_type(instance) == "LeaderWorkerSet" {
        labels.insert(keys::COMPONENT_INDEX.to_owned(), position(&component.name, id).to_string());
    }
    // Not in the template, whose change would be an update of existing instances.
    if let Some(group) = component.template.label(keys::POD_GROUP) {
        labels.insert(keys::COSCHEDULING_POD_GROUP.to_owned(), group.to_owned());
    }
    for key in [keys::ROLE_INSTANCE_INDEX, keys::POD_NAME] {
        if let Some(value) = label(instance, key) {
            labels.insert(key.to_owned(), value.to_owned());
        }
    }
    labels
}

fn is_legacy(instance: &RoleInstance) -> bool {
    instance
        .metadata
        .annotations
        .as_ref()
        .is_some_and(|annotations| annotations.contains_key(conversion::ORIGIN))
}

fn legacy_labels(instance: &RoleInstance) -> StringMap {
    let label_of = |key| label(instance, key).unwrap_or_default();
    legacy::labels(label_of(keys::GROUP_NAME), label_of(keys::ROLE_NAME), label_of(keys::GROUP_UID))
}

fn metadata_map(template: &PodTemplate, member: &str) -> StringMap {
    let map = template.0.get("metadata").and_then(|metadata| metadata.get(member)).and_then(Value::as_object);
    map.into_iter()
        .flatten()
        .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
        .collect()
}

fn apply_node_placement(template: &mut PodTemplate, placement: &NodePlacement) {
    let hosts = json!({ "key": keys::HOSTNAME, "operator": "In", "values": placement.nodes });
    let is_required = !placement.nodes.is_empty() && placement.required;
    let avoided =
        placement.avoided_labels.iter().map(|key| json!({ "key": key, "operator": "DoesNotExist" }));
    // In upstream's order.
    let mut required_expressions: Vec<Value> =
        is_required.then(|| hosts.clone()).into_iter().chain(avoided).collect();
    if let Some(domain) = &placement.domain {
        required_expressions.push(domain.expression());
        domain.add_pod_affinity(template);
    }
    let is_preferred = !placement.nodes.is_empty() && !placement.required;
    if required_expressions.is_empty() && !is_preferred {
        return;
    }
    let affinity = member_object(member_object(template.spec_mut(), "affinity"), "nodeAffinity");
    if is_preferred {
        let preferred = member_list(affinity, "preferredDuringSchedulingIgnoredDuringExecution");
        preferred.push(json!({ "weight": 100, "preference": { "matchExpressions": [hosts] } }));
    }
    if !required_expressions.is_empty() {
        let required = member_object(affinity, "requiredDuringSchedulingIgnoredDuringExecution");
        let terms = member_list(required, "nodeSelectorTerms");
        if terms.is_empty() {
            terms.push(Value::Object(Map::new()));
        }
        // Terms are alternatives, so each must contain all required expressions.
        for term in terms.iter_mut().filter_map(Value::as_object_mut) {
            member_list(term, "matchExpressions").extend(required_expressions.iter().cloned());
        }
    }
}
