//! Renders a role's workload.

use rbg_api::{conversion, keys};
use serde_json::json;

use crate::error::RenderError;
use crate::manifest::{Manifest, ManifestMetadata, StringMap};
use crate::role::{ResolvedRole, RolePattern, RoleTarget};
use crate::workload_kind::{PreservedFields, WorkloadKind};
use crate::workload_spec;

/// Renders the workload. `preserved` contains the fields of an existing workload that must not change.
///
/// # Errors
/// See [`RenderError`].
pub fn render_workload(
    role: &ResolvedRole<'_>,
    target: &RoleTarget,
    preserved: &PreservedFields,
) -> Result<Manifest, RenderError> {
    let spec = match role.kind {
        WorkloadKind::RoleInstanceSet => workload_spec::role_instance_set(role, target)?,
        WorkloadKind::StatefulSet => workload_spec::stateful_set(role, target, preserved)?,
        WorkloadKind::Deployment => workload_spec::deployment(role, target, preserved)?,
        WorkloadKind::LeaderWorkerSet => workload_spec::leader_worker_set(role, target, preserved)?,
    };
    let owner = role.group.owner(true);
    let metadata = ManifestMetadata {
        name: &role.names.workload,
        namespace: role.group.namespace,
        labels: labels(role, preserved)?,
        annotations: annotations(role, target, preserved)?,
        owner: Some(&owner),
    };
    Ok(Manifest::new(role.kind.api_version(), role.kind.kind(), metadata, json!({ "spec": spec })))
}

fn labels(role: &ResolvedRole<'_>, preserved: &PreservedFields) -> Result<StringMap, RenderError> {
    let mut labels = role.spec.labels.clone();
    labels.extend(preserved.selector.clone().unwrap_or_else(|| role.selector()));
    labels.insert(role.revision_label(), role.revision());
    // Kueue admits workloads of other kinds by a label.
    if role.kind != WorkloadKind::RoleInstanceSet
        && role.group.queue_key() == keys::KUEUE_QUEUE
        && let Some(queue) = role.group.queue()?
    {
        labels.insert(keys::KUEUE_QUEUE.to_owned(), queue.to_owned());
    }
    if role.kind == WorkloadKind::RoleInstanceSet {
        let role_type = match role.pattern {
            RolePattern::Standalone(_) => "PodTemplate",
            RolePattern::LeaderWorker(_) => "LeaderWorkerSet",
            RolePattern::Custom(_) => "Components",
        };
        labels.insert(keys::ROLE_TYPE.to_owned(), role_type.to_owned());
        if role.spec.annotations.get(keys::INPLACE_SCHEDULING).is_some_and(|value| !value.is_empty()) {
            labels.insert(keys::RBG_OWNER_UID.to_owned(), role.group.owner(true).uid);
        }
    }
    Ok(labels)
}

fn annotations(
    role: &ResolvedRole<'_>,
    target: &RoleTarget,
    preserved: &PreservedFields,
) -> Result<StringMap, RenderError> {
    let mut annotations = role.spec.annotations.clone();
    annotations.insert(keys::ROLE_SIZE.to_owned(), target.replicas.to_string());
    if let Some(topology) = role.topology(preserved)? {
        annotations.insert(keys::TOPOLOGY.to_owned(), topology.text());
    }
    if let Some(queue) = role.group.queue()? {
        annotations.insert(role.group.queue_key().to_owned(), queue.to_owned());
    }
    if role.kind == WorkloadKind::RoleInstanceSet {
        let pattern = role.instance_pattern().unwrap_or("Stateful").to_owned();
        annotations.insert(keys::ROLE_INSTANCE_PATTERN.to_owned(), pattern);
        if let Some(seconds) = grace_period_seconds(role) {
            annotations.insert(keys::GRACE_PERIOD_SECONDS.to_owned(), seconds.to_string());
        }
        if role.group.is_in_gang(&role.spec.name) {
            annotations.entry(keys::INSTANCE_GANG_SCHEDULING.to_owned()).or_insert_with(|| "true".to_owned());
        }
        if role.group.is_legacy() {
            annotations.insert(conversion::ORIGIN.to_owned(), "v1alpha1".to_owned());
        }
    }
    Ok(annotations)
}

fn grace_period_seconds(role: &ResolvedRole<'_>) -> Option<i32> {
    role.rolling_update()?.in_place_update_strategy.as_ref()?.grace_period_seconds
}
