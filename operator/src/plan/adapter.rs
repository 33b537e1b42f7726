//! Plans a scaling adapter: copies replicas between adapter and role, and publishes the selector of the role's pods.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use rbg_api::keys;
use rbg_api::v1alpha2::{
    RoleBasedGroup, RoleBasedGroupScalingAdapter, RoleBasedGroupScalingAdapterStatus, RoleSpec,
};
use serde_json::{Value, json};

use super::{ReconcilePlan, WriteAction};
use crate::ResourceKind;

#[derive(Clone, Copy)]
pub struct AdapterInput<'a> {
    pub adapter: &'a RoleBasedGroupScalingAdapter,
    /// The group named in `scaleTargetRef`, if it exists.
    pub group: Option<&'a RoleBasedGroup>,
    /// The workload of the role named in `scaleTargetRef`, if it exists.
    pub workload: Option<&'a Value>,
    pub now: Timestamp,
}

/// An adapter without replicas takes the role's count; an adapter with replicas sets the role's count.
#[must_use]
pub fn adapter(input: AdapterInput<'_>) -> ReconcilePlan {
    let mut plan = ReconcilePlan::default();
    let adapter = input.adapter;
    if adapter.metadata.deletion_timestamp.is_some() {
        return plan;
    }
    let mut status = adapter.status.clone().unwrap_or_default();
    match input.group.and_then(|group| Some((group, bound_role(adapter, group)?))) {
        Some((group, role)) => bind(input, group, role, &mut status, &mut plan),
        None => {
            status.phase = Some("NotBound".to_owned());
            (status.replicas, status.ready_replicas) = (Some(0), Some(0));
        }
    }
    plan.status(ResourceKind::Adapter, name(adapter), adapter.status.as_ref(), &status);
    plan
}

/// Replicas that an autoscaler has set through the role's adapter.
pub(super) fn replicas(adapters: &[RoleBasedGroupScalingAdapter], role: &RoleSpec) -> Option<i32> {
    let adapter = adapters.iter().find(|adapter| is_of(adapter, role))?;
    adapter.spec.replicas.map(|replicas| replicas.max(0))
}

/// Whether the role's adapter is enabled and `adapter` targets this role.
pub(super) fn is_of(adapter: &RoleBasedGroupScalingAdapter, role: &RoleSpec) -> bool {
    let is_on = role.scaling_adapter.as_ref().is_some_and(|adapter| adapter.enable);
    is_on && adapter.spec.scale_target_ref.role == role.name
}

pub(super) fn name(adapter: &RoleBasedGroupScalingAdapter) -> &str {
    adapter.metadata.name.as_deref().unwrap_or_default()
}

/// The target role, if the group owns the adapter and is not being deleted.
fn bound_role<'a>(adapter: &RoleBasedGroupScalingAdapter, group: &'a RoleBasedGroup) -> Option<&'a RoleSpec> {
    let mut owners = adapter.metadata.owner_references.iter().flatten();
    let is_owned = owners.any(|owner| Some(&owner.uid) == group.metadata.uid.as_ref());
    let is_deleting = group.metadata.deletion_timestamp.is_some();
    group.spec.roles.iter().find(|role| is_owned && !is_deleting && is_of(adapter, role))
}

fn bind(
    input: AdapterInput<'_>,
    group: &RoleBasedGroup,
    role: &RoleSpec,
    status: &mut RoleBasedGroupScalingAdapterStatus,
    plan: &mut ReconcilePlan,
) {
    match input.adapter.spec.replicas.map(|replicas| replicas.max(0)) {
        None => {
            let body = json!({ "spec": { "replicas": role.replicas } });
            let name = name(input.adapter).to_owned();
            let action = WriteAction::Patch { kind: ResourceKind::Adapter, name, status: false, body };
            plan.push(action, "the adapter takes over the role's replicas");
        }
        Some(replicas) if replicas != role.replicas => {
            plan.push(scaled(group, &role.name, replicas), format!("{} is scaled to {replicas}", role.name));
            status.last_scale_time = Some(Time(input.now));
        }
        Some(_) => {}
    }
    status.phase = Some("Bound".to_owned());
    let counts = group.status.iter().flat_map(|status| &status.role_statuses);
    let counts = counts.into_iter().find(|counts| counts.name == role.name);
    status.replicas = Some(counts.map_or(0, |counts| counts.replicas));
    status.ready_replicas = Some(counts.map_or(0, |counts| counts.ready_replicas));
    if let Some(selector) = input.workload.and_then(|workload| selector(workload, role)) {
        status.selector = Some(selector);
    }
}

/// Replaces the whole group, so that the resource version detects a concurrent change.
fn scaled(group: &RoleBasedGroup, role: &str, replicas: i32) -> WriteAction {
    let mut group = group.clone();
    for spec in group.spec.roles.iter_mut().filter(|spec| spec.name == role) {
        spec.replicas = replicas;
    }
    WriteAction::Replace {
        kind: ResourceKind::Group,
        name: group.metadata.name.clone().unwrap_or_default(),
        object: serde_json::to_value(&group).unwrap_or_default(),
    }
}

/// Selector of the role's pods. For leader-worker roles it selects only the leader: an autoscaler divides by the number of
/// instances.
fn selector(workload: &Value, role: &RoleSpec) -> Option<String> {
    if workload["kind"] == ResourceKind::LeaderWorkerSet.name() {
        return workload["status"]["hpaPodSelector"].as_str().map(str::to_owned);
    }
    let labels = workload["spec"]["selector"]["matchLabels"].as_object()?;
    let leader = role.leader_worker_pattern.as_ref().filter(|_| workload["kind"] == ResourceKind::Set.name());
    let leader = leader.map(|_| (keys::COMPONENT_INDEX, "0"));
    let pairs = labels.iter().filter_map(|(key, value)| Some((key.as_str(), value.as_str()?))).chain(leader);
    let pairs: Vec<String> = pairs.map(|(key, value)| format!("{key}={value}")).collect();
    Some(pairs.join(","))
}
