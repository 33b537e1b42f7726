//! Headless Services and scaling adapters of roles.

use rbg_api::keys;
use serde_json::json;

use crate::manifest::{Manifest, ManifestMetadata, StringMap};
use crate::role::{RoleRenderer, RoleTarget};
use crate::workload::WorkloadKind;

pub(crate) fn headless(role: &RoleRenderer<'_>, target: &RoleTarget, workload_uid: &str) -> Option<Manifest> {
    if !matches!(role.kind, WorkloadKind::RoleInstanceSet | WorkloadKind::StatefulSet) {
        return None;
    }
    let mut selector = StringMap::from([
        (keys::GROUP_NAME.to_owned(), role.group.name.to_owned()),
        (keys::ROLE_NAME.to_owned(), role.spec.name.clone()),
    ]);
    if role.serves_leaders_only() {
        selector.insert(keys::COMPONENT_NAME.to_owned(), "leader".to_owned());
    }
    let owner = role.workload_owner(workload_uid);
    let metadata = ManifestMetadata {
        name: &role.names.service,
        namespace: role.group.namespace,
        labels: role.selector(),
        annotations: role.annotations(target),
        owner: Some(&owner),
    };
    // Pods resolve each other's names before they are ready.
    let spec = json!({
        "type": "ClusterIP",
        "clusterIP": "None",
        "publishNotReadyAddresses": true,
        "selector": selector,
    });
    Some(Manifest::new("v1", "Service", metadata, json!({ "spec": spec })))
}

pub(crate) fn scaling_adapter(role: &RoleRenderer<'_>) -> Option<Manifest> {
    let adapter = role.spec.scaling_adapter.as_ref().filter(|adapter| adapter.enable)?;
    let owner = role.group.owner(false);
    let mut labels = adapter.labels.clone();
    labels.insert(keys::GROUP_NAME.to_owned(), role.group.name.to_owned());
    labels.insert(keys::ROLE_NAME.to_owned(), role.spec.name.clone());
    let metadata = ManifestMetadata {
        name: &role.names.workload,
        namespace: role.group.namespace,
        labels,
        annotations: StringMap::new(),
        owner: Some(&owner),
    };
    // Without replicas: the autoscaler sets them.
    let spec = json!({ "scaleTargetRef": { "name": role.group.name, "role": role.spec.name } });
    let version = "workloads.x-k8s.io/v1alpha2";
    Some(Manifest::new(version, "RoleBasedGroupScalingAdapter", metadata, json!({ "spec": spec })))
}
