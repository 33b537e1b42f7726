//! What updates wait for: told of an instance, and from there on of what it is part of.

use k8s_openapi::jiff::Timestamp;
use rbg_api::Condition;

use super::set_condition;

/// Its reason when somebody was not waited for any longer.
pub(crate) const TIMED_OUT: &str = "TimedOut";
/// The same when an update went on without an image.
pub(crate) const NOT_PULLED: &str = "NotPulled";
/// The reason while an image cannot be pulled.
pub(crate) const CANNOT_PULL: &str = "CannotPull";

/// A condition about waiting, and its reasons. Nothing has it before there is something to wait for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WaitCondition<'a> {
    pub(crate) condition: &'a str,
    /// While there is something to wait for.
    pub(crate) pending_reason: &'a str,
    /// When all came that was waited for.
    pub(crate) done_reason: &'a str,
    /// When something was not waited for any longer.
    pub(crate) timeout_reason: &'a str,
}

/// For pods that are asked before and after a restart in place.
pub(crate) const FOR_HOOKS: WaitCondition<'_> = WaitCondition {
    condition: "WaitingForHooks",
    pending_reason: "NotYet",
    done_reason: "NobodyWaits",
    timeout_reason: TIMED_OUT,
};
/// For images that are pulled before a restart in place.
pub(crate) const FOR_IMAGES: WaitCondition<'_> = WaitCondition {
    condition: "PullingImages",
    pending_reason: "NotYet",
    done_reason: "Pulled",
    timeout_reason: NOT_PULLED,
};
/// Names that a text has at most.
const MAX_NAMES: usize = 5;

/// Says what is waited for, or else what was not waited for any longer.
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

/// Says of the whole what its parts say.
pub(crate) fn aggregate_waiting<'a>(
    conditions: &mut Vec<Condition>,
    parts: impl Iterator<Item = &'a [Condition]> + Clone,
    now: Timestamp,
) {
    for mut wait in [FOR_HOOKS, FOR_IMAGES] {
        let (mut waiting, mut unfinished) = (Vec::new(), Vec::new());
        for condition in parts.clone().flatten().filter(|condition| condition.kind == wait.condition) {
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
}
