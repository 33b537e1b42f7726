//! Condition `Stalled`: why the operator cannot carry out the plan of an object, or of an object that it owns. Absent until it is
//! first needed.

use k8s_openapi::jiff::Timestamp;
use rbg_api::Condition;
use serde_json::{Value, json};

use super::set_condition;

const STALLED: &str = "Stalled";

/// Condition reason for a spec that cannot be planned.
pub(crate) const INVALID_SPEC: &str = "InvalidSpec";
/// Condition reason for a spec that requests more objects than the operator allows.
pub(crate) const LIMIT_EXCEEDED: &str = "LimitExceeded";
/// Condition reason for a policy whose gang the group or the scheduler cannot form. The name is upstream's.
pub(crate) const INCOMPATIBLE_GANG: &str = "IncompatibleGangConfig";
/// Condition reason for a write that the API server refuses.
pub(crate) const WRITE_REFUSED: &str = "WriteRefused";

/// Maximum length of a message in bytes: the API server's message may contain a whole object.
const MAX_MESSAGE: usize = 1024;
/// Maximum number of parts in a message.
const MAX_PARTS: usize = 3;

/// Sets the condition to true.
pub(crate) fn set_stalled(conditions: &mut Vec<Condition>, (reason, message): (&str, &str), now: Timestamp) {
    let message = &message[..message.floor_char_boundary(MAX_MESSAGE)];
    set_condition(conditions, STALLED, true, (reason, message), now);
}

/// Sets the condition to that of the parts. Computed only after the object's own plan succeeded.
pub(crate) fn aggregate_stalled<'a>(
    conditions: &mut Vec<Condition>,
    parts: impl Iterator<Item = &'a [Condition]>,
    now: Timestamp,
) {
    let stalled: Vec<&Condition> =
        parts.flatten().filter(|one| one.kind == STALLED && one.status == "True").collect();
    if let Some(first) = stalled.first() {
        // Parts that stall for the same reason often have the same message.
        let mut messages: Vec<&str> = stalled.iter().map(|one| one.message.as_str()).collect();
        messages.sort_unstable();
        messages.dedup();
        let mut text = messages.iter().take(MAX_PARTS).copied().collect::<Vec<_>>().join("; ");
        if messages.len() > MAX_PARTS {
            text.push_str(&format!("; and {} more", messages.len() - MAX_PARTS));
        }
        set_stalled(conditions, (&first.reason, &text), now);
    } else if conditions.iter().any(|one| one.kind == STALLED) {
        set_condition(conditions, STALLED, false, ("PlanCarriedOut", ""), now);
    }
}

/// Merge patch that sets the condition in the status of `object`. `None` if it has that reason and message already.
pub(crate) fn stalled_patch(object: &Value, text: (&str, &str), now: Timestamp) -> Option<Value> {
    let before: Vec<Condition> =
        serde_json::from_value(object["status"]["conditions"].clone()).unwrap_or_default();
    let mut after = before.clone();
    set_stalled(&mut after, text, now);
    (after != before).then(|| json!({ "status": { "conditions": after } }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn stalled(message: &str) -> Vec<Condition> {
        let mut conditions = Vec::new();
        set_stalled(&mut conditions, (INVALID_SPEC, message), at(1));
        conditions
    }

    #[test]
    fn a_stalled_part_stalls_the_whole_until_it_recovers() {
        let mut whole = Vec::new();
        let aggregate = |whole: &mut Vec<Condition>, parts: &[Vec<Condition>]| {
            aggregate_stalled(whole, parts.iter().map(Vec::as_slice), at(2));
        };
        aggregate(&mut whole, &[Vec::new()]);
        assert_eq!(whole, [], "absent until it is needed");
        aggregate(&mut whole, &[stalled("b"), stalled("a"), stalled("a")]);
        let condition = &whole[0];
        assert_eq!(
            (condition.kind.as_str(), condition.status.as_str(), condition.reason.as_str()),
            ("Stalled", "True", "InvalidSpec")
        );
        assert_eq!(condition.message, "a; b");
        aggregate(&mut whole, &["a", "b", "c", "d", "e"].map(stalled));
        assert_eq!(whole[0].message, "a; b; c; and 2 more");
        let mut recovered = stalled("a");
        aggregate(&mut recovered, &[]);
        aggregate(&mut whole, &[recovered]);
        assert_eq!(whole[0].status, "False");
    }

    #[test]
    fn an_unchanged_condition_needs_no_patch() {
        let text = (LIMIT_EXCEEDED, "too many");
        let patch = stalled_patch(&json!({}), text, at(1)).unwrap();
        assert_eq!(stalled_patch(&patch, text, at(2)), None);
        let other = stalled_patch(&patch, (LIMIT_EXCEEDED, "other"), at(2)).unwrap();
        assert_eq!(other["status"]["conditions"][0]["message"], "other");
        let long = "ä".repeat(MAX_MESSAGE);
        let patch = stalled_patch(&json!({}), (INVALID_SPEC, &long), at(1)).unwrap();
        assert_eq!(patch["status"]["conditions"][0]["message"].as_str().unwrap().len(), MAX_MESSAGE);
    }
}
