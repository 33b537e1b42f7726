//! Conditions: one per type, with the time of its last transition.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use rbg_api::Condition;

/// Whether the condition's status is `True`.
#[must_use]
pub fn has(conditions: &[Condition], kind: &str) -> bool {
    conditions.iter().any(|condition| condition.kind == kind && condition.status == "True")
}

/// Time of the condition's last transition.
#[must_use]
pub fn since(conditions: &[Condition], kind: &str) -> Option<Timestamp> {
    let condition = conditions.iter().find(|condition| condition.kind == kind)?;
    condition.last_transition_time.as_ref().map(|time| time.0)
}

/// Sets a condition. Its transition time changes only with its status.
pub fn set_condition(
    conditions: &mut Vec<Condition>,
    kind: &str,
    is_true: bool,
    (reason, message): (&str, &str),
    now: Timestamp,
) {
    let status = if is_true { "True" } else { "False" };
    let mut wanted = Condition {
        kind: kind.to_owned(),
        status: status.to_owned(),
        last_transition_time: Some(Time(now)),
        reason: reason.to_owned(),
        message: message.to_owned(),
        observed_generation: None,
    };
    match conditions.iter_mut().find(|condition| condition.kind == kind) {
        Some(condition) => {
            if condition.status == wanted.status {
                wanted.last_transition_time = condition.last_transition_time.clone();
            }
            *condition = wanted;
        }
        None => conditions.push(wanted),
    }
}
