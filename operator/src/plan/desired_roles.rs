//! What each role shall have now: what the spec says, less what autoscalers and coordination change.

use std::collections::BTreeMap;

use moongate_render::{RoleRenderer, RoleTarget, WorkloadKind};
use rbg_api::v1alpha2::{CoordinatedPolicySpec, RoleSpec};
use rbg_api::{IntOrPercent, RoundingMode, keys};
use serde_json::Value;

use super::coordination::{self, ObservedRole, ObservedWorkload, RoleUpdateState};
use super::group::GroupInput;
use super::{adapter, add_duration};
use crate::ResourceKind;

/// A role, and its workload if it has one.
pub(super) struct RoleWithWorkload<'a> {
    pub(super) spec: &'a RoleSpec,
    pub(super) role: RoleRenderer<'a>,
    pub(super) live: Option<&'a Value>,
}

/// What a role shall have.
#[derive(Debug, Clone)]
pub(super) struct DesiredRole {
    /// Instances in the end.
    pub(super) desired: i32,
    /// Instances that keep their revision in the end.
    pub(super) partitioned: i32,
    /// What its workload is told now.
    pub(super) current: RoleTarget,
}

/// Targets of all roles, by name.
pub(super) fn desired_roles(
    input: GroupInput<'_>,
    policy: Option<&CoordinatedPolicySpec>,
    roles: &[RoleWithWorkload<'_>],
    plan: &mut super::ReconcilePlan,
) -> BTreeMap<String, DesiredRole> {
    let mut rules = policy.into_iter().flat_map(|policy| &policy.policies);
    let scaling = |progression: Option<&str>| progression == Some("OrderScheduled");
    let by_schedule = rules
        .any(|rule| rule.strategy.scaling.as_ref().is_some_and(|rule| scaling(rule.progression.as_deref())));
    let facts: Vec<ObservedRole<'_>> =
        roles.iter().map(|role| observe_role(input, role, by_schedule)).collect();
    let bounds = coordination::bounds(policy, &facts);
    let one = |role: &RoleWithWorkload<'_>| {
        let bounds = bounds.get(role.spec.name.as_str())?;
        let desired = facts.iter().find(|facts| facts.name == role.spec.name)?.desired;
        let now = RoleTarget {
            replicas: bounds.replicas,
            partition: bounds.partition.map(IntOrPercent::Int),
            max_unavailable: bounds.max_unavailable.clone(),
        };
        Some((role.spec.name.clone(), DesiredRole { desired, partitioned: bounds.partitioned, current: now }))
    };
    let targets: BTreeMap<String, DesiredRole> = roles.iter().filter_map(one).collect();
    // Nobody tells a group that a pod has got a node.
    if by_schedule && targets.values().any(|target| target.current.replicas < target.desired) {
        plan.schedule_requeue(add_duration(input.now, SCHEDULING));
    }
    targets
}

/// Between two looks at whether pods have got their nodes.
const SCHEDULING: std::time::Duration = std::time::Duration::from_secs(1);

fn observe_role<'a>(
    input: GroupInput<'_>,
    role: &RoleWithWorkload<'a>,
    by_schedule: bool,
) -> ObservedRole<'a> {
    let desired = adapter::replicas(input.adapters, role.spec).unwrap_or(role.spec.replicas);
    let rolling = role.spec.rollout_strategy.as_ref().and_then(|rollout| rollout.rolling_update.as_ref());
    let partition = rolling.and_then(|rolling| rolling.partition.as_ref());
    let held_back = partition.and_then(|partition| partition.of(desired, RoundingMode::Down)).unwrap_or(0);
    ObservedRole {
        name: &role.spec.name,
        desired,
        partitioned: held_back.clamp(0, desired.max(0)),
        live: role.live.map(|live| observe_workload(input, role, live, by_schedule)),
    }
}

fn observe_workload(
    input: GroupInput<'_>,
    role: &RoleWithWorkload<'_>,
    live: &Value,
    by_schedule: bool,
) -> ObservedWorkload {
    let number = |value: &Value| value.as_i64().and_then(|number| i32::try_from(number).ok());
    let status = |name: &str| number(&live["status"][name]).unwrap_or(0);
    let asked = number(&live["spec"]["replicas"]).unwrap_or(1);
    let partition = match role.role.kind() {
        WorkloadKind::RoleInstanceSet => &live["spec"]["updateStrategy"]["partition"],
        WorkloadKind::StatefulSet => &live["spec"]["updateStrategy"]["rollingUpdate"]["partition"],
        WorkloadKind::LeaderWorkerSet => {
            &live["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]["partition"]
        }
        WorkloadKind::Deployment => &Value::Null,
    };
    let partition: Option<IntOrPercent> = serde_json::from_value(partition.clone()).ok();
    // Only our own sets tell which instances have nodes. A ready one has.
    let uid = live["metadata"]["uid"].as_str().filter(|_| role.role.kind() == WorkloadKind::RoleInstanceSet);
    let scheduled = uid.filter(|_| by_schedule).map(input.scheduled);
    ObservedWorkload {
        requested: asked,
        scheduled: scheduled.unwrap_or_else(|| status("readyReplicas")),
        ready: status("readyReplicas"),
        partition: partition.and_then(|partition| partition.of(asked, RoundingMode::Down)).unwrap_or(0),
        update: update(role, live, asked),
    }
}

/// Whether the workload's status speaks of its present spec. Early LeaderWorkerSets do not say of which they do.
pub(super) fn is_observed(live: &Value) -> bool {
    let observed = &live["status"]["observedGeneration"];
    let is_silent = observed.is_null() && live["kind"] == ResourceKind::LeaderWorkerSet.name();
    *observed == live["metadata"]["generation"] || is_silent && live["status"].is_object()
}

pub(super) fn update(role: &RoleWithWorkload<'_>, live: &Value, asked: i32) -> RoleUpdateState {
    let label = format!("{}{}", keys::ROLE_REVISION_PREFIX, role.spec.name);
    if live["metadata"]["labels"][label.as_str()].as_str() != Some(role.role.revision().as_str()) {
        return RoleUpdateState::NotApplied;
    }
    if !is_observed(live) {
        return RoleUpdateState::NotObserved;
    }
    let status = &live["status"];
    let count = |name: &str| status[name].as_i64().unwrap_or(0);
    let is_done = match role.role.kind() {
        WorkloadKind::Deployment | WorkloadKind::LeaderWorkerSet => {
            count("updatedReplicas") >= count("replicas")
        }
        _ => status["currentRevision"] == status["updateRevision"],
    };
    if is_done {
        return RoleUpdateState::Done;
    }
    let ready = status["updatedReadyReplicas"].as_i64();
    let updated = ready.unwrap_or_else(|| count("updatedReplicas").min(count("readyReplicas")));
    // Those beyond the replicas only bridge the update.
    let surge = (count("replicas") - i64::from(asked)).max(0);
    RoleUpdateState::InProgress(i32::try_from((updated - surge).max(0)).unwrap_or(i32::MAX))
}
