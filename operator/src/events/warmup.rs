//! Events of a RoleBasedGroupWarmup. It ends, and may then be deleted, so its events remain as the record.

use serde_json::Value;

use super::EventRecord;

/// Events for a new status, compared with the previous one.
pub(super) fn event_records(before: &Value, after: &Value) -> Vec<EventRecord> {
    let mut records = Vec::new();
    let conflict = message(after, "VolumeConflict");
    if conflict.is_some() && conflict != message(before, "VolumeConflict") {
        records.extend(conflict.map(|(_, note)| EventRecord::warning("VolumeConflict", note)));
    }
    let phase = |object: &'_ Value| object["status"]["phase"].as_str().unwrap_or_default().to_owned();
    let (old, new) = (phase(before), phase(after));
    let ended = |condition: &str| message(after, condition).unwrap_or_default();
    records.extend(match new.as_str() {
        _ if old == new => None,
        "Running" if old == "Paused" => {
            Some(EventRecord::normal("Resumed", "pod creation has resumed".to_owned()))
        }
        "Running" => Some(EventRecord::normal("WarmupStarted", "the first pods were created".to_owned())),
        "Paused" => Some(EventRecord::normal("Paused", "pod creation is paused".to_owned())),
        "Completed" => Some(EventRecord::normal("WarmupCompleted", ended("Complete").1)),
        "Failed" => Some(ended("Failed")).map(|(reason, note)| EventRecord::warning(&reason, note)),
        _ => None,
    });
    records
}

/// Reason and message of a condition whose status is true.
fn message(object: &Value, kind: &str) -> Option<(String, String)> {
    let mut conditions = object["status"]["conditions"].as_array()?.iter();
    let condition =
        conditions.find(|condition| condition["type"] == kind && condition["status"] == "True")?;
    let text = |member: &str| condition[member].as_str().unwrap_or_default().to_owned();
    Some((text("reason"), text("message")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_phase_emits_an_event_when_it_starts() {
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
            let records = event_records(&status(before, none()), &after);
            assert_eq!(records.iter().map(|record| record.reason.as_str()).collect::<Vec<_>>(), expected);
        }
    }
}
