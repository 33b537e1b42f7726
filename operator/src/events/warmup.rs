//! What happened to a RoleBasedGroupWarmup. It ends, and may be deleted then, so that its events are what is left.

use serde_json::Value;

use super::EventRecord;

/// What a new status is worth telling, beside the one before.
pub(super) fn event_records(before: &Value, after: &Value) -> Vec<EventRecord> {
    let mut news = Vec::new();
    let conflict = message(after, "VolumeConflict");
    if conflict.is_some() && conflict != message(before, "VolumeConflict") {
        news.extend(conflict.map(|(_, note)| EventRecord::warning("VolumeConflict", note)));
    }
    let phase = |object: &'_ Value| object["status"]["phase"].as_str().unwrap_or_default().to_owned();
    let (old, new) = (phase(before), phase(after));
    let ended = |condition: &str| message(after, condition).unwrap_or_default();
    news.extend(match new.as_str() {
        _ if old == new => None,
        "Running" if old == "Paused" => {
            Some(EventRecord::normal("Resumed", "pods are made again".to_owned()))
        }
        "Running" => Some(EventRecord::normal("WarmupStarted", "the first pods are there".to_owned())),
        "Paused" => Some(EventRecord::normal("Paused", "no more pods are made".to_owned())),
        "Completed" => Some(EventRecord::normal("WarmupCompleted", ended("Complete").1)),
        "Failed" => Some(ended("Failed")).map(|(reason, note)| EventRecord::warning(&reason, note)),
        _ => None,
    });
    news
}

/// Reason and message of a condition that is true.
fn message(object: &Value, kind: &str) -> Option<(String, String)> {
    let mut conditions = object["status"]["conditions"].as_array()?.iter();
    let condition = conditions.find(|one| one["type"] == kind && one["status"] == "True")?;
    let text = |member: &str| condition[member].as_str().unwrap_or_default().to_owned();
    Some((text("reason"), text("message")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_phase_is_told_when_it_begins() {
        let status = |phase: &str, conditions: Value| json!({ "status": { "phase": phase, "conditions": conditions } });
        let is = |kind: &str, reason: &str| json!({ "type": kind, "status": "True", "reason": reason, "message": "m" });
        let none = || json!([]);
        let cases = [
            ("", status("Running", none()), vec!["WarmupStarted"]),
            ("Running", status("Running", none()), vec![]),
            ("Running", status("Paused", none()), vec!["Paused"]),
            ("Paused", status("Running", none()), vec!["Resumed"]),
            (
                "",
                status("Running", json!([is("VolumeConflict", "x")])),
                vec!["VolumeConflict", "WarmupStarted"],
            ),
            ("Running", status("Completed", json!([is("Complete", "x")])), vec!["WarmupCompleted"]),
            (
                "Running",
                status("Failed", json!([is("Failed", "GlobalTimeoutExceeded")])),
                vec!["GlobalTimeoutExceeded"],
            ),
        ];
        for (before, after, expected) in cases {
            let told = event_records(&status(before, none()), &after);
            assert_eq!(told.iter().map(|news| news.reason.as_str()).collect::<Vec<_>>(), expected);
        }
    }
}
