//! The action that the group's plan requests from an instance, carried out by the instance's plan.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use moongate_render::DomainPlacement;
use moongate_render::pod::NodePlacement;
use rbg_api::v1alpha2::RoleInstance;
use rbg_api::{Condition, keys};

use super::observe::{is_up, node_of};
use super::records::{ActionRequest, InstanceRecords};
use super::rules::FaultAction;
use crate::plan::instance::{InstanceInput, delete};
use crate::plan::{ReconcilePlan, WriteAction, in_place, revisions};
use crate::status::{FAULT_RECOVERY, has, set_condition};
use crate::time::add_duration;

/// Interval between checks whether an update that delays a restart has ended.
const UPDATE_POLL: Duration = Duration::from_secs(5);

/// How far an action is in this plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::plan) enum RecoveryProgress {
    /// Nothing is left to do, except for waiting.
    Idle,
    /// Pods are out of service until they have drained.
    Draining,
    /// This plan deletes or restarts pods, so the rest is left to the next one.
    Acting,
}

fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

/// Carries out the action on the instance, if it has not ended.
pub(in crate::plan) fn recover(
    input: InstanceInput<'_>,
    revision: &revisions::RevisionRef,
    plan: &mut ReconcilePlan,
) -> RecoveryProgress {
    let records = InstanceRecords::of(input.instance);
    let Some(request) = records.in_progress() else { return RecoveryProgress::Idle };
    let concerned: Vec<&Pod> = input.pods.iter().filter(|pod| request.pods.contains(uid(pod))).collect();
    let before = plan.steps.len();
    for pod in concerned.iter().filter(|pod| is_lost(request, pod)) {
        let name = pod.metadata.name.clone().unwrap_or_default();
        plan.push(WriteAction::ForceDelete { name, uid: uid(pod).to_owned() }, request.reason.clone());
    }
    let mut rest = concerned;
    rest.retain(|pod| pod.metadata.deletion_timestamp.is_none() && !is_lost(request, pod));
    match request.action {
        FaultAction::Replace => {
            rest.iter().for_each(|pod| plan.push(delete(pod), request.reason.clone()));
        }
        FaultAction::Drain if !rest.is_empty() => {
            in_place::recreate(input, &rest, |name| format!("{name}: {}", request.reason), plan);
            let is_deleted = |step: &super::super::PlanStep| {
                matches!(step.action, WriteAction::Delete { .. } | WriteAction::ForceDelete { .. })
            };
            if !plan.steps[before..].iter().any(is_deleted) {
                return RecoveryProgress::Draining;
            }
        }
        FaultAction::Drain => {}
        FaultAction::Restart => restart(input, &rest, request, revision, plan),
    }
    if plan.steps.len() > before { RecoveryProgress::Acting } else { RecoveryProgress::Idle }
}

fn is_lost(request: &ActionRequest, pod: &Pod) -> bool {
    !request.lost_node.is_empty() && node_of(pod) == Some(request.lost_node.as_str())
}

fn restart(
    input: InstanceInput<'_>,
    pods: &[&Pod],
    request: &ActionRequest,
    revision: &revisions::RevisionRef,
    plan: &mut ReconcilePlan,
) {
    let key = request.key();
    for pod in pods.iter().filter(|pod| marker(pod) != Some(key.as_str())) {
        if in_place::is_updating(pod, revision) {
            // The update restarts the pod in any case; its images must not change meanwhile.
            plan.schedule_requeue(add_duration(input.now, UPDATE_POLL));
        } else if !in_place::restart(input, pod, revision, (keys::FAULT_RESTART, &key, &request.reason), plan)
        {
            let reason = format!("{}; its image has no digest for a restart in place", request.reason);
            plan.push(delete(pod), reason);
        }
    }
}

fn marker(pod: &Pod) -> Option<&str> {
    pod.metadata.annotations.as_ref()?.get(keys::FAULT_RESTART).map(String::as_str)
}

/// Whether the action has been carried out on all pods that it concerns. They may not be ready yet.
pub(super) fn is_complete(
    input: InstanceInput<'_>,
    request: &ActionRequest,
    revision: &revisions::RevisionRef,
) -> bool {
    let is_done = |pod: &Pod| {
        request.action == FaultAction::Restart
            && marker(pod) == Some(request.key().as_str())
            && !in_place::is_updating(pod, revision)
            && in_place::has_restarted(pod)
    };
    input.pods.iter().filter(|pod| request.pods.contains(uid(pod))).all(is_done)
}

/// Restricts new pods of a replacement to its domain.
pub(in crate::plan) fn placement(instance: &RoleInstance, placement: &mut NodePlacement) {
    let records = InstanceRecords::of(instance);
    let Some(request) = records.in_progress() else { return };
    placement.nodes.retain(|node| *node != request.lost_node);
    if request.is_joint {
        // The nodes of the predecessors may be outside of the domain, or full.
        placement.required = false;
    }
    placement.domain = request.placement.clone().map(|domain| DomainPlacement {
        label: domain.label,
        domains: domain.domains,
        are_excluded: domain.are_excluded,
        replacement: request.key(),
    });
}

/// Sets the instance's condition, if there has been an action.
pub(in crate::plan) fn set_recovery_condition(input: InstanceInput<'_>, conditions: &mut Vec<Condition>) {
    let records = InstanceRecords::of(input.instance);
    match records.in_progress() {
        Some(request) => {
            set_condition(conditions, FAULT_RECOVERY, true, ("ActionRequested", &request.reason), input.now);
        }
        None if has(conditions, FAULT_RECOVERY) && is_up(input) => {
            set_condition(conditions, FAULT_RECOVERY, false, ("Recovered", ""), input.now);
        }
        None => {}
    }
}
