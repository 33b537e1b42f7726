//! Nodes that pods ran on before: new pods are placed there, where weights and caches are still on disk.
//!
//! They are stored in an annotation: each instance keeps the nodes of its pods, and the set those of all its instances, for
//! recreated
//! instances.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use moongate_render::Manifest;
use moongate_render::pod::NodePlacement;
use rbg_api::keys;
use rbg_api::template::member_object;
use rbg_api::v1alpha2::{InstanceComponent, RoleInstance};
use serde_json::json;

use super::instance::InstanceInput;
use super::set::InstanceSetInput;
use super::{ReconcilePlan, WriteAction};
use crate::ResourceKind;
use crate::status::pod_label;

/// JSON: nodes by pod name, or by component name where any node of the component will do.
const NODES: &str = "moongate.io/nodes";
/// Maximum number of pods or components to store: annotations of an object are limited to 256 KiB.
const MAX_NODES: usize = 2000;

type NodesByPod = BTreeMap<String, BTreeSet<String>>;

fn annotation<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

fn read(metadata: &ObjectMeta) -> NodesByPod {
    annotation(metadata, NODES).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

fn mode(metadata: &ObjectMeta) -> Option<&str> {
    annotation(metadata, keys::INPLACE_SCHEDULING).filter(|mode| matches!(*mode, "Preferred" | "Required"))
}

/// Pods of unordered instances get new names each time, so their nodes are stored by component.
fn is_by_component(metadata: &ObjectMeta, unordered: bool) -> bool {
    match annotation(metadata, keys::INPLACE_SCHEDULING_GRANULARITY) {
        Some("Component") => true,
        Some("Pod") => false,
        _ => unordered,
    }
}

fn is_unordered(instance: &RoleInstance) -> bool {
    super::unordered::is_unordered(instance)
}

/// Node constraints for a pod of the instance.
pub(super) fn placement(instance: &RoleInstance, component: &InstanceComponent, pod: &str) -> NodePlacement {
    let metadata = &instance.metadata;
    let Some(mode) = mode(metadata) else { return NodePlacement::default() };
    let by_component = is_by_component(metadata, is_unordered(instance));
    let key = if by_component { component.name.as_str() } else { pod };
    let avoid = annotation(metadata, keys::INPLACE_SCHEDULING_AVOID).unwrap_or_default();
    let avoid = avoid.split(',').map(str::trim).filter(|label| !label.is_empty()).map(str::to_owned);
    NodePlacement {
        nodes: read(metadata).remove(key).into_iter().flatten().collect(),
        required: mode == "Required",
        avoided_labels: avoid.collect(),
        domain: None,
    }
}

/// Stores the nodes of an instance's pods.
pub(super) fn record_instance_nodes(input: InstanceInput<'_>, plan: &mut ReconcilePlan) {
    let live = input.instance;
    if mode(&live.metadata).is_none() {
        return;
    }
    let by_component = is_by_component(&live.metadata, is_unordered(live));
    let mut nodes = read(&live.metadata);
    for pod in input.pods {
        let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else { continue };
        if by_component {
            let component = pod_label(pod, keys::COMPONENT_NAME).unwrap_or_default();
            nodes.entry(component.to_owned()).or_default().insert(node);
        } else {
            nodes.insert(pod.metadata.name.clone().unwrap_or_default(), [node].into());
        }
    }
    write(ResourceKind::Instance, &live.metadata, nodes, plan);
}

/// Stores the nodes of a set's instances.
pub(super) fn record_set_nodes(input: InstanceSetInput<'_>, plan: &mut ReconcilePlan) {
    let metadata = &input.set.metadata;
    if mode(metadata).is_none() {
        return;
    }
    let mut nodes = read(metadata);
    for instance in input.instances {
        let by_component = is_by_component(metadata, is_unordered(instance));
        for (key, new) in read(&instance.metadata) {
            let stored = nodes.entry(key).or_default();
            if !by_component {
                stored.clear();
            }
            stored.extend(new);
        }
    }
    write(ResourceKind::Set, metadata, nodes, plan);
}

fn write(kind: ResourceKind, metadata: &ObjectMeta, mut nodes: NodesByPod, plan: &mut ReconcilePlan) {
    while nodes.len() > MAX_NODES {
        nodes.pop_last();
    }
    if nodes == read(metadata) {
        return;
    }
    let text = serde_json::to_string(&nodes).unwrap_or_default();
    let body = json!({ "metadata": { "uid": metadata.uid, "annotations": { NODES: text } } });
    let name = metadata.name.clone().unwrap_or_default();
    plan.push(WriteAction::Patch { kind, name, status: false, body }, "pods were scheduled to nodes");
}

/// Copies the stored nodes of the set to a new instance.
pub(super) fn inherit_nodes(input: InstanceSetInput<'_>, manifest: &mut Manifest) {
    let metadata = &input.set.metadata;
    let unordered = manifest.label(keys::ROLE_INSTANCE_ID).is_some();
    if mode(metadata).is_none() {
        return;
    }
    let mut nodes = read(metadata);
    if !is_by_component(metadata, unordered) {
        let (name, prefix) = (manifest.name(), format!("{}-", manifest.name()));
        nodes.retain(|pod, _| pod == name || pod.starts_with(&prefix));
    }
    if let Ok(text) = serde_json::to_string(&nodes)
        && !nodes.is_empty()
    {
        let annotations = member_object(member_object(&mut manifest.0, "metadata"), "annotations");
        annotations.insert(NODES.to_owned(), text.into());
    }
}
