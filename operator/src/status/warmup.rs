//! Status of a RoleBasedGroupWarmup.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use rbg_api::v1alpha2::{RoleBasedGroupWarmup, RoleBasedGroupWarmupStatus, WarmupPolicies};

use super::set_condition;
use crate::time::add_duration;

/// Observed state of a warmup.
#[derive(Debug, Clone, Default)]
pub struct ObservedWarmup {
    pub desired: usize,
    /// Number of nodes with a running pod.
    pub active: usize,
    /// Number of nodes that are warmed up.
    pub succeeded: usize,
    /// Number of nodes without further attempts.
    pub failed: usize,
    /// Whether a pod exists, or existed.
    pub has_started: bool,
    /// Why the target nodes cannot be determined.
    pub target_error: Option<String>,
    /// Name of a volume with conflicting definitions.
    pub conflict: Option<String>,
}

/// Whether the warmup has finished.
#[must_use]
pub fn is_warmup_over(status: &RoleBasedGroupWarmupStatus) -> bool {
    matches!(status.phase.as_str(), "Completed" | "Failed")
}

/// Deadline of the whole warmup, with its timeout in seconds.
pub(crate) fn deadline(
    policies: &WarmupPolicies,
    status: &RoleBasedGroupWarmupStatus,
) -> Option<(Timestamp, i64)> {
    let seconds = policies.global_timeout_seconds?;
    let wait = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    Some((add_duration(status.start_time.as_ref()?.0, wait), seconds))
}

/// Computes the status of a warmup that has not finished.
#[must_use]
pub fn warmup(
    warmup: &RoleBasedGroupWarmup,
    observed: &ObservedWarmup,
    now: Timestamp,
) -> RoleBasedGroupWarmupStatus {
    let count = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
    let mut status = warmup.status.clone().unwrap_or_default();
    status.desired = count(observed.desired);
    status.active = count(observed.active);
    status.succeeded = count(observed.succeeded);
    status.failed = count(observed.failed);
    if observed.has_started && status.start_time.is_none() {
        status.start_time = Some(Time(now));
    }
    if let Some(volume) = &observed.conflict {
        let text = format!(
            "actions on one node define the volume {volume} differently; the first definition is used"
        );
        set_condition(&mut status.conditions, "VolumeConflict", true, ("VolumesDiffer", &text), now);
    }
    match &observed.target_error {
        Some(why) => set_condition(&mut status.conditions, "Complete", false, ("TargetNotFound", why), now),
        None => status.conditions.retain(|condition| condition.kind != "Complete"),
    }
    match completion(warmup, observed, &status, now) {
        Some(end) => {
            let (phase, kind) = if end.success { ("Completed", "Complete") } else { ("Failed", "Failed") };
            phase.clone_into(&mut status.phase);
            set_condition(&mut status.conditions, kind, true, (end.reason, &end.message), now);
            status.start_time.get_or_insert(Time(now));
            status.completion_time = Some(Time(now));
        }
        None if warmup.spec.paused => "Paused".clone_into(&mut status.phase),
        None if observed.has_started || status.phase == "Paused" => "Running".clone_into(&mut status.phase),
        None => {}
    }
    for condition in &mut status.conditions {
        condition.observed_generation = warmup.metadata.generation;
    }
    status
}

struct WarmupResult {
    success: bool,
    reason: &'static str,
    message: String,
}

fn completion(
    warmup: &RoleBasedGroupWarmup,
    observed: &ObservedWarmup,
    status: &RoleBasedGroupWarmupStatus,
    now: Timestamp,
) -> Option<WarmupResult> {
    let none = WarmupPolicies::default();
    let policies = warmup.spec.policies.as_ref().unwrap_or(&none);
    let due = deadline(policies, status).filter(|(at, _)| *at <= now && !warmup.spec.paused);
    if let Some((_, seconds)) = due {
        let message = format!(
            "not complete after {seconds} s: {} of {} nodes succeeded, {} failed",
            observed.succeeded, observed.desired, observed.failed
        );
        return Some(WarmupResult { success: false, reason: "GlobalTimeoutExceeded", message });
    }
    let tolerated = policies.max_failed_nodes.and_then(|count| usize::try_from(count).ok());
    if let Some(tolerated) = tolerated.filter(|tolerated| observed.failed > *tolerated) {
        let message = format!("{} nodes failed, at most {tolerated} may fail", observed.failed);
        return Some(WarmupResult { success: false, reason: "MaxFailedNodesExceeded", message });
    }
    if observed.target_error.is_some() || observed.succeeded + observed.failed < observed.desired {
        return None;
    }
    if observed.desired == 0 {
        if warmup.spec.paused {
            return None;
        }
        let message = "no nodes match".to_owned();
        return Some(WarmupResult { success: true, reason: "NoNodesMatched", message });
    }
    let message = format!("{} of {} nodes are warmed up", observed.succeeded, observed.desired);
    Some(WarmupResult { success: true, reason: "WarmupCompleted", message })
}
