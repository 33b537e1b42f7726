//! Headless Services and scaling adapters of roles.

use rbg_api::keys;
use serde_json::json;

use crate::manifest::{Manifest, ManifestMetadata, OwnerRef, StringMap};
use crate::role::{ResolvedRole, RoleTarget};
use crate::workload_kind::WorkloadKind;

/// Renders the headless Service that makes pod names resolvable, owned by the workload. `None` for Deployments and
/// LeaderWorkerSets.
#[must_use]
pub fn headless_service(
    role: &ResolvedRole<'_>,
    target: &RoleTarget,
    workload_uid: &str,
) -> Option<Manifest> {
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
    let owner = workload_owner(role, workload_uid);
    let metadata = ManifestMetadata {
        name: &role.names.service,
        namespace: role.group.namespace,
        labels: role.selector(),
        annotations: annotations(role, target),
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

/// Annotations of the role's Service: the role's own, and its size.
fn annotations(role: &ResolvedRole<'_>, target: &RoleTarget) -> StringMap {
    let mut annotations = role.spec.annotations.clone();
    annotations.remove(keys::ROLE_WORKLOAD_TYPE);
    annotations.insert(keys::ROLE_SIZE.to_owned(), target.replicas.to_string());
    annotations
}

/// Owner reference to the role's workload.
fn workload_owner(role: &ResolvedRole<'_>, uid: &str) -> OwnerRef {
    OwnerRef {
        api_version: role.kind.api_version().to_owned(),
        kind: role.kind.kind().to_owned(),
        name: role.names.workload.clone(),
        uid: uid.to_owned(),
        controller: false,
    }
}

/// Renders the adapter through which an autoscaler sets the role's replicas, if it is enabled.
#[must_use]
pub fn scaling_adapter(role: &ResolvedRole<'_>) -> Option<Manifest> {
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
