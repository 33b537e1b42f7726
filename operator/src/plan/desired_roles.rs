//! Desired state of each role now: its spec, limited by autoscalers and coordination.

use std::collections::BTreeMap;

use moongate_render::{GroupContext, ResolvedRole, RoleTarget, WorkloadKind};
use rbg_api::v1alpha2::{CoordinatedPolicySpec, RoleSpec};
use rbg_api::{IntOrPercent, RoundingMode, keys};
use serde_json::Value;

use super::adapter;
use super::coordination::{self, ObservedRole, ObservedWorkload, RoleUpdateState, ScaleIn};
use super::group::GroupInput;
use crate::ResourceKind;
use crate::time::add_duration;

/// A role with its workload, if that exists.
pub(super) struct RoleWithWorkload<'a> {
    pub(super) spec: &'a RoleSpec,
    pub(super) role: ResolvedRole<'a>,
    pub(super) live: Option<&'a Value>,
}

/// Desired state of a role.
#[derive(Debug, Clone)]
pub(super) struct DesiredRole {
    /// Number of instances in the end.
    pub(super) desired: i32,
    /// Number of instances that keep their revision in the end.
    pub(super) partitioned: i32,
    /// What the workload's spec contains now.
    pub(super) current: RoleTarget,
    /// The removal in steps to record in the workload.
    pub(super) scale_in: Option<ScaleIn>,
}

/// Targets of all roles, by role name.
pub(super) fn desired_roles(
    input: GroupInput<'_>,
    group: GroupContext<'_>,
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
    let desired_role = |role: &RoleWithWorkload<'_>| {
        let bounds = bounds.get(role.spec.name.as_str())?;
        let desired = facts.iter().find(|facts| facts.name == role.spec.name)?.desired;
        let current = RoleTarget {
            // No pod of a gang has a node before the gang is complete, so it cannot grow in steps.
            replicas: bounds.replicas.max(group.gang_minimum(&role.spec.name, desired)),
            partition: bounds.partition.map(IntOrPercent::Int),
            max_unavailable: bounds.max_unavailable.clone(),
        };
        let (partitioned, scale_in) = (bounds.partitioned, bounds.scale_in);
        Some((role.spec.name.clone(), DesiredRole { desired, partitioned, current, scale_in }))
    };
    let targets: BTreeMap<String, DesiredRole> = roles.iter().filter_map(desired_role).collect();
    // Scheduling of a pod does not trigger reconciliation of its group, so poll.
    if by_schedule && targets.values().any(|target| target.current.replicas < target.desired) {
        plan.schedule_requeue(add_duration(input.now, SCHEDULING));
    }
    targets
}

/// Interval between checks whether pods have been scheduled.
const SCHEDULING: std::time::Duration = std::time::Duration::from_secs(1);

fn observe_role<'a>(
    input: GroupInput<'_>,
    role: &RoleWithWorkload<'a>,
    by_schedule: bool,
) -> ObservedRole<'a> {
    let desired = adapter::replicas(input.adapters, role.spec).unwrap_or(role.spec.replicas);
    let rolling = role.spec.rollout_strategy.as_ref().and_then(|rollout| rollout.rolling_update.as_ref());
    let partition = rolling.and_then(|rolling| rolling.partition.as_ref());
    let partitioned = partition.and_then(|partition| partition.of(desired, RoundingMode::Down)).unwrap_or(0);
    ObservedRole {
        name: &role.spec.name,
        desired,
        partitioned: partitioned.clamp(0, desired.max(0)),
        live: role.live.map(|live| observe_workload(input, role, live, (desired, by_schedule))),
    }
}

fn observe_workload(
    input: GroupInput<'_>,
    role: &RoleWithWorkload<'_>,
    live: &Value,
    (desired, by_schedule): (i32, bool),
) -> ObservedWorkload {
    let number = |value: &Value| value.as_i64().and_then(|number| i32::try_from(number).ok());
    let status = |name: &str| number(&live["status"][name]).unwrap_or(0);
    let requested = number(&live["spec"]["replicas"]).unwrap_or(1);
    let partition = match role.role.kind() {
        WorkloadKind::RoleInstanceSet => &live["spec"]["updateStrategy"]["partition"],
        WorkloadKind::StatefulSet => &live["spec"]["updateStrategy"]["rollingUpdate"]["partition"],
        WorkloadKind::LeaderWorkerSet => {
            &live["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]["partition"]
        }
        WorkloadKind::Deployment => &Value::Null,
    };
    let partition: Option<IntOrPercent> = serde_json::from_value(partition.clone()).ok();
    // Only RoleInstanceSets show which instances are scheduled. For other kinds, count ready instances, which are.
    let uid = live["metadata"]["uid"].as_str().filter(|_| role.role.kind() == WorkloadKind::RoleInstanceSet);
    let scheduled = uid.filter(|_| by_schedule).map(input.scheduled);
    let scale_in = live["metadata"]["annotations"][keys::SCALE_IN].as_str().and_then(ScaleIn::parse);
    // Pods of other kinds are removed by their own controllers, and not waited for.
    let leaving = uid.filter(|_| requested > desired || scale_in.is_some()).map_or(0, input.leaving);
    let unobserved = if is_observed(live) || uid.is_none() { 0 } else { status("replicas") - requested };
    let update = update(role, live, requested);
    ObservedWorkload {
        requested: requested - surge(role, update, (requested, desired)),
        leaving: leaving.max(unobserved),
        scale_in,
        scheduled: scheduled.unwrap_or_else(|| status("readyReplicas")),
        ready: status("readyReplicas"),
        partition: partition.and_then(|partition| partition.of(requested, RoundingMode::Down)).unwrap_or(0),
        update,
    }
}

/// Number of surge pods in the replicas of a StatefulSet that is being updated.
fn surge(role: &RoleWithWorkload<'_>, update: RoleUpdateState, (requested, desired): (i32, i32)) -> i32 {
    if role.role.kind() != WorkloadKind::StatefulSet || update == RoleUpdateState::Done {
        return 0;
    }
    let surge = role.role.rolling_update().and_then(|rolling| rolling.max_surge.as_ref());
    let surge = surge.and_then(|surge| surge.of(desired, RoundingMode::Up)).unwrap_or(0);
    surge.clamp(0, (requested - desired).max(0))
}

/// Whether the workload's status covers its present spec. Early LeaderWorkerSets report no `observedGeneration`.
pub(super) fn is_observed(live: &Value) -> bool {
    let observed = &live["status"]["observedGeneration"];
    let is_silent = observed.is_null() && live["kind"] == ResourceKind::LeaderWorkerSet.name();
    *observed == live["metadata"]["generation"] || is_silent && live["status"].is_object()
}

pub(super) fn update(role: &RoleWithWorkload<'_>, live: &Value, requested: i32) -> RoleUpdateState {
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
    // Instances beyond the replicas are surge: they only bridge the update.
    let surge = (count("replicas") - i64::from(requested)).max(0);
    RoleUpdateState::InProgress(i32::try_from((updated - surge).max(0)).unwrap_or(i32::MAX))
}
