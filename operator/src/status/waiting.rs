//! Whose hooks are waited for: an instance's pods, and from there on what they are part of.

use k8s_openapi::jiff::Timestamp;
use rbg_api::Condition;

use super::set_condition;

/// The condition. Nothing has it before hooks are used.
const WAITING: &str = "WaitingForHooks";
/// Its reason when somebody was not waited for any longer.
pub(crate) const TIMED_OUT: &str = "TimedOut";
/// Names that a text has at most.
const MOST: usize = 5;

/// Says who is waited for, or else who was not waited for any longer.
pub(crate) fn set_waiting(
    conditions: &mut Vec<Condition>,
    waiting: &[String],
    unfinished: &[String],
    now: Timestamp,
) {
    let is_new = !conditions.iter().any(|condition| condition.kind == WAITING);
    let (is_true, reason, texts) = match (waiting, unfinished) {
        ([], []) if is_new => return,
        ([], []) => (false, "NobodyWaits", waiting),
        ([], _) => (false, TIMED_OUT, unfinished),
        _ => (true, "NotYet", waiting),
    };
    let mut text = texts.iter().take(MOST).map(String::as_str).collect::<Vec<_>>().join("; ");
    if texts.len() > MOST {
        text.push_str(&format!("; and {} more", texts.len() - MOST));
    }
    set_condition(conditions, WAITING, is_true, (reason, &text), now);
}

/// Says of the whole what its parts say.
pub(crate) fn gather_waiting<'a>(
    conditions: &mut Vec<Condition>,
    parts: impl Iterator<Item = &'a [Condition]>,
    now: Timestamp,
) {
    let (mut waiting, mut unfinished) = (Vec::new(), Vec::new());
    for condition in parts.flatten().filter(|condition| condition.kind == WAITING) {
        if condition.status == "True" {
            waiting.push(condition.message.clone());
        } else if condition.reason == TIMED_OUT {
            unfinished.push(condition.message.clone());
        }
    }
    set_waiting(conditions, &waiting, &unfinished, now);
}
