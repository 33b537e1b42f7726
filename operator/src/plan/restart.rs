//! Recreates all pods of an instance when one of them crashed, with exponential back-off.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use moongate_runtime::BackoffPolicy;
use rbg_api::keys;
use rbg_api::v1alpha2::{RestartPolicy, RestartPolicyConfig, RoleInstance, RoleInstanceStatus};

use super::instance::{InstanceInput, delete, name};
use super::{ReconcilePlan, in_place, revisions};
use crate::ResourceKind;
use crate::status::{has, set_condition};
use crate::time::add_duration;

const RESTARTING: &str = "Restarting";
const READY: &str = "RoleInstanceReady";
/// An instance that has run for this long starts again with the base delay.
const MIN_STABLE_PERIOD: Duration = Duration::from_secs(600);

/// What to do after a pod of an instance crashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RestartDecision {
    /// No pod crashed, or the policy does not restart the others.
    NoRestart,
    /// Delete all pods of the instance now.
    RestartNow,
    /// Delete all pods after the delay. Until then the failed pods stay, for debugging.
    RestartLater,
}

pub(super) fn is_failed(pod: &Pod) -> bool {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Failed")
}

pub(super) fn plan(
    input: InstanceInput<'_>,
    pods: &[&Pod],
    revision: &revisions::RevisionRef,
    plan: &mut ReconcilePlan,
) -> RestartDecision {
    let live = input.instance;
    let config = config(live);
    let Some(mut status) = live.status.clone().filter(|_| is_on(&config)) else {
        return RestartDecision::NoRestart;
    };
    let last = status.last_restart_time.as_ref().map(|time| time.0);
    // The replica that wrote this may have stopped before it had deleted all pods.
    if has(&status.conditions, RESTARTING) {
        let is_old = |pod: &&&Pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0) < last;
        let old: Vec<&&Pod> = pods.iter().filter(is_old).collect();
        if !old.is_empty() {
            for pod in old {
                plan.push(delete(pod), "the instance is being recreated");
            }
            return RestartDecision::RestartNow;
        }
    }
    let stable_period = MIN_STABLE_PERIOD.max(seconds(config.max_delay_seconds).saturating_mul(2));
    let is_recent = last.is_some_and(|last| add_duration(last, stable_period) > input.now);
    let is_settled = status.observed_generation == live.metadata.generation
        && status.current_revision.as_deref() == Some(revision.name.as_str());
    let was_stable = has(&status.conditions, READY) || is_recent;
    if !(is_settled && was_stable && pods.iter().any(|pod| has_crashed(pod, revision))) {
        return RestartDecision::NoRestart;
    }
    let count = if is_recent { status.restart_count.unwrap_or(0) } else { 0 };
    let due = last.filter(|_| count > 0).map(|last| add_duration(last, delay(&config, count)));
    if let Some(due) = due.filter(|due| *due > input.now) {
        plan.schedule_requeue(due);
        return RestartDecision::RestartLater;
    }
    status.restart_count = Some(count.saturating_add(1));
    status.last_restart_time = Some(Time(input.now));
    let text = ("RestartPolicyTriggered", "a pod crashed: all pods of the instance are recreated");
    set_condition(&mut status.conditions, RESTARTING, true, text, input.now);
    set_condition(
        &mut status.conditions,
        READY,
        false,
        ("PodsNotReady", "the instance is being recreated"),
        input.now,
    );
    // The status is written first: it stores the restart count for the back-off.
    plan.status(ResourceKind::Instance, name(live), live.status.as_ref(), &status);
    for pod in pods {
        plan.push(delete(pod), "a pod of the instance crashed");
    }
    RestartDecision::RestartNow
}

/// Completes a restart when the instance is ready again.
pub(super) fn settle(status: &mut RoleInstanceStatus, now: Timestamp) {
    if has(&status.conditions, RESTARTING) && has(&status.conditions, READY) {
        set_condition(&mut status.conditions, RESTARTING, false, ("Restarted", ""), now);
    }
}

fn config(live: &RoleInstance) -> RestartPolicyConfig {
    let (config, deprecated) = (&live.spec.restart_policy_config, &live.spec.restart_policy);
    RestartPolicyConfig::resolve(config.as_ref(), deprecated.as_deref(), RestartPolicy::None)
}

fn is_on(config: &RestartPolicyConfig) -> bool {
    config.kind.as_deref().and_then(RestartPolicy::parse) == Some(RestartPolicy::Recreate)
}

fn seconds(number: Option<i32>) -> Duration {
    Duration::from_secs(number.unwrap_or(0).max(0).unsigned_abs().into())
}

fn delay(config: &RestartPolicyConfig, count: i32) -> Duration {
    let delays =
        BackoffPolicy { initial: seconds(config.base_delay_seconds), max: seconds(config.max_delay_seconds) };
    delays.pause(u32::try_from(count).unwrap_or(0))
}

/// Whether faults of this pod do not concern others.
pub(super) fn is_ignored(pod: &Pod) -> bool {
    let annotations = pod.metadata.annotations.as_ref();
    let trigger = annotations.and_then(|annotations| annotations.get(keys::RESTART_TRIGGER_POLICY));
    trigger.is_some_and(|trigger| trigger == "Ignore")
}

fn has_crashed(pod: &Pod, revision: &revisions::RevisionRef) -> bool {
    if is_ignored(pod) {
        return false;
    }
    let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
    let is_crash = |status: &k8s_openapi::api::core::v1::ContainerStatus| {
        status.restart_count > in_place::expected_restarts(pod, &status.name)
    };
    is_failed(pod) || !in_place::is_updating(pod, revision) && statuses.into_iter().flatten().any(is_crash)
}
