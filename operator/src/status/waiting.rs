//! Conditions for what updates wait for, aggregated from instances to sets and groups.

use k8s_openapi::jiff::Timestamp;
use rbg_api::Condition;

use super::set_condition;

/// Condition reason after a hook timed out.
pub(crate) const TIMED_OUT: &str = "TimedOut";
/// Condition reason after an image was not pulled in time.
pub(crate) const NOT_PULLED: &str = "PullTimedOut";
/// Condition reason while an image cannot be pulled.
pub(crate) const CANNOT_PULL: &str = "PullFailed";

/// A condition for waiting, with its reasons. It is absent until there is something to wait for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WaitCondition<'a> {
    pub(crate) condition: &'a str,
    pub(crate) pending_reason: &'a str,
    /// Reason after everything has completed.
    pub(crate) done_reason: &'a str,
    pub(crate) timeout_reason: &'a str,
}

/// Condition for hooks before and after an in-place restart.
pub(crate) const FOR_HOOKS: WaitCondition<'_> = WaitCondition {
    condition: "WaitingForHooks",
    pending_reason: "HooksPending",
    done_reason: "HooksCompleted",
    timeout_reason: TIMED_OUT,
};
/// Condition for images pulled before an in-place restart.
pub(crate) const FOR_IMAGES: WaitCondition<'_> = WaitCondition {
    condition: "PullingImages",
    pending_reason: "ImagesPending",
    done_reason: "Pulled",
    timeout_reason: NOT_PULLED,
};
/// Condition for instances that drain because their set shrinks.
const FOR_SCALE_IN: WaitCondition<'_> = WaitCondition {
    condition: "ScalingIn",
    pending_reason: "InstancesDraining",
    done_reason: "InstancesRemoved",
    timeout_reason: TIMED_OUT,
};
/// Maximum number of names in a message.
const MAX_NAMES: usize = 5;

/// Sets the condition to what is waited for, or otherwise to what timed out.
pub(crate) fn set_waiting(
    conditions: &mut Vec<Condition>,
    wait: WaitCondition<'_>,
    waiting: &[String],
    unfinished: &[String],
    now: Timestamp,
) {
    let is_new = !conditions.iter().any(|condition| condition.kind == wait.condition);
    let (is_true, reason, texts) = match (waiting, unfinished) {
        ([], []) if is_new => return,
        ([], []) => (false, wait.done_reason, waiting),
        ([], _) => (false, wait.timeout_reason, unfinished),
        _ => (true, wait.pending_reason, waiting),
    };
    let mut text = texts.iter().take(MAX_NAMES).map(String::as_str).collect::<Vec<_>>().join("; ");
    if texts.len() > MAX_NAMES {
        text.push_str(&format!("; and {} more", texts.len() - MAX_NAMES));
    }
    set_condition(conditions, wait.condition, is_true, (reason, &text), now);
}

/// Aggregates the conditions of the parts into those of the whole.
pub(crate) fn aggregate_waiting<'a>(
    conditions: &mut Vec<Condition>,
    parts: impl Iterator<Item = &'a [Condition]> + Clone,
    now: Timestamp,
) {
    for wait in [FOR_HOOKS, FOR_IMAGES] {
        aggregate(conditions, wait, parts.clone(), now);
    }
}

fn aggregate<'a>(
    conditions: &mut Vec<Condition>,
    mut wait: WaitCondition<'_>,
    parts: impl Iterator<Item = &'a [Condition]>,
    now: Timestamp,
) {
    let (mut waiting, mut unfinished) = (Vec::new(), Vec::new());
    for condition in parts.flatten().filter(|condition| condition.kind == wait.condition) {
        if condition.status == "True" {
            waiting.push(condition.message.clone());
            if condition.reason == CANNOT_PULL {
                wait.pending_reason = CANNOT_PULL;
            }
        } else if condition.reason == wait.timeout_reason {
            unfinished.push(condition.message.clone());
        }
    }
    set_waiting(conditions, wait, &waiting, &unfinished, now);
}

/// Sets the condition of a set whose instances with these names drain because they are removed.
pub(crate) fn set_scaling_in(conditions: &mut Vec<Condition>, leaving: &[String], now: Timestamp) {
    let mut names = leaving.iter().take(MAX_NAMES).map(String::as_str).collect::<Vec<_>>().join(", ");
    if leaving.len() > MAX_NAMES {
        names.push_str(", …");
    }
    let noun = if leaving.len() == 1 { "instance" } else { "instances" };
    let text = (!leaving.is_empty()).then(|| format!("draining {} {noun}: {names}", leaving.len()));
    set_waiting(conditions, FOR_SCALE_IN, text.as_slice(), &[], now);
}

/// Aggregates the conditions of sets that shrink into that of their group.
pub(crate) fn aggregate_scaling_in<'a>(
    conditions: &mut Vec<Condition>,
    sets: impl Iterator<Item = &'a [Condition]>,
    now: Timestamp,
) {
    aggregate(conditions, FOR_SCALE_IN, sets, now);
}
