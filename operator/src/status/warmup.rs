//! Status of a RoleBasedGroupWarmup.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use rbg_api::v1alpha2::{RoleBasedGroupWarmup, RoleBasedGroupWarmupStatus, WarmupPolicies};

use super::set_condition;
use crate::plan::add_duration;

/// What the plan has found out about a warmup.
#[derive(Debug, Clone, Default)]
pub struct ObservedWarmup {
    /// Nodes to reach.
    pub desired: usize,
    /// Nodes with a pod that has not ended.
    pub active: usize,
    /// Nodes that are done.
    pub succeeded: usize,
    /// Nodes on which it is not tried again.
    pub failed: usize,
    /// Whether there is a pod, or was.
    pub has_begun: bool,
    /// Why it is not known which nodes are to be reached.
    pub unknown: Option<String>,
    /// A volume of two meanings.
    pub conflict: Option<String>,
}

/// Whether nothing is to be done any more.
#[must_use]
pub fn is_warmup_over(status: &RoleBasedGroupWarmupStatus) -> bool {
    matches!(status.phase.as_str(), "Completed" | "Failed")
}

/// When the whole has taken too long.
pub(crate) fn deadline(
    policies: &WarmupPolicies,
    status: &RoleBasedGroupWarmupStatus,
) -> Option<(Timestamp, i64)> {
    let seconds = policies.global_timeout_seconds?;
    let wait = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    Some((add_duration(status.start_time.as_ref()?.0, wait), seconds))
}

/// The status of a warmup that was not over.
#[must_use]
pub fn warmup(
    warmup: &RoleBasedGroupWarmup,
    facts: &ObservedWarmup,
    now: Timestamp,
) -> RoleBasedGroupWarmupStatus {
    let count = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
    let mut status = warmup.status.clone().unwrap_or_default();
    status.desired = count(facts.desired);
    status.active = count(facts.active);
    status.succeeded = count(facts.succeeded);
    status.failed = count(facts.failed);
    if facts.has_begun && status.start_time.is_none() {
        status.start_time = Some(Time(now));
    }
    if let Some(volume) = &facts.conflict {
        let text =
            format!("actions on one node define the volume {volume} differently; the first of them counts");
        set_condition(&mut status.conditions, "VolumeConflict", true, ("VolumesDiffer", &text), now);
    }
    match &facts.unknown {
        Some(why) => set_condition(&mut status.conditions, "Complete", false, ("TargetNotFound", why), now),
        None => status.conditions.retain(|condition| condition.kind != "Complete"),
    }
    match completion(warmup, facts, &status, now) {
        Some(end) => {
            let (phase, kind) = if end.success { ("Completed", "Complete") } else { ("Failed", "Failed") };
            phase.clone_into(&mut status.phase);
            set_condition(&mut status.conditions, kind, true, (end.reason, &end.message), now);
            status.start_time.get_or_insert(Time(now));
            status.completion_time = Some(Time(now));
        }
        None if warmup.spec.paused => "Paused".clone_into(&mut status.phase),
        None if facts.has_begun || status.phase == "Paused" => "Running".clone_into(&mut status.phase),
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
    facts: &ObservedWarmup,
    status: &RoleBasedGroupWarmupStatus,
    now: Timestamp,
) -> Option<WarmupResult> {
    let none = WarmupPolicies::default();
    let policies = warmup.spec.policies.as_ref().unwrap_or(&none);
    let due = deadline(policies, status).filter(|(at, _)| *at <= now && !warmup.spec.paused);
    if let Some((_, seconds)) = due {
        let message = format!(
            "not done after {seconds} s: {} of {} nodes succeeded, {} failed",
            facts.succeeded, facts.desired, facts.failed
        );
        return Some(WarmupResult { success: false, reason: "GlobalTimeoutExceeded", message });
    }
    let tolerated = policies.max_failed_nodes.and_then(|count| usize::try_from(count).ok());
    if let Some(tolerated) = tolerated.filter(|tolerated| facts.failed > *tolerated) {
        let message = format!("{} nodes failed, of which {tolerated} are tolerated", facts.failed);
        return Some(WarmupResult { success: false, reason: "MaxFailedNodesExceeded", message });
    }
    if facts.unknown.is_some() || facts.succeeded + facts.failed < facts.desired {
        return None;
    }
    if facts.desired == 0 {
        if warmup.spec.paused {
            return None;
        }
        let message = "there are no nodes to reach".to_owned();
        return Some(WarmupResult { success: true, reason: "NoNodesMatched", message });
    }
    let message = format!("{} of {} nodes are warmed up", facts.succeeded, facts.desired);
    Some(WarmupResult { success: true, reason: "WarmupCompleted", message })
}
