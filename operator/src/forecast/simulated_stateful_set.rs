//! The StatefulSet controller. It replaces pods from the highest ordinal down to the partition, one at a time.

use rbg_api::keys;
use serde_json::{Value, json};

/// Next action for a StatefulSet.
#[derive(Debug, PartialEq)]
pub(super) enum StatefulSetAction {
    CreatePod(Value),
    DeletePod(String),
    /// The StatefulSet with another status.
    UpdateStatus(Value),
}

/// Next action for a StatefulSet with these pods; `None` if nothing is left to do.
pub(super) fn next_action(set: &Value, pods: &[&Value]) -> Option<StatefulSetAction> {
    let number = |value: &Value, default: u64| value.as_u64().unwrap_or(default);
    let replicas = number(&set["spec"]["replicas"], 1);
    let partition = number(&set["spec"]["updateStrategy"]["rollingUpdate"]["partition"], 0);
    let revision = |member: &str| set["status"][member].as_str();
    let Some(update) = revision("updateRevision") else {
        let mut next = set.clone();
        let first = format!("{}-1", name(set));
        next["status"]["updateRevision"] = first.as_str().into();
        next["status"]["currentRevision"] = first.into();
        return Some(StatefulSetAction::UpdateStatus(next));
    };
    let current = revision("currentRevision").unwrap_or(update);
    let mut numbered: Vec<(u64, &Value)> =
        pods.iter().filter_map(|pod| Some((ordinal(pod)?, *pod))).collect();
    numbered.sort_by_key(|(ordinal, _)| *ordinal);
    let is_updated = |pod: &Value| pod["metadata"]["labels"][keys::CONTROLLER_REVISION_HASH] == update;
    let missing = (0..replicas).find(|ordinal| numbered.iter().all(|(other, _)| other != ordinal));
    if let Some(ordinal) = missing {
        let revision = if ordinal < partition { current } else { update };
        return Some(StatefulSetAction::CreatePod(pod(set, ordinal, revision)));
    }
    let is_surplus = |ordinal: u64| ordinal >= replicas;
    let mut from_highest = numbered.iter().rev();
    let unwanted =
        from_highest.find(|(ordinal, pod)| is_surplus(*ordinal) || *ordinal >= partition && !is_updated(pod));
    if let Some((_, pod)) = unwanted {
        return Some(StatefulSetAction::DeletePod(name(pod).to_owned()));
    }
    let count = |is_counted: &dyn Fn(&Value) -> bool| pods.iter().filter(|pod| is_counted(pod)).count();
    let updated = count(&is_updated);
    let mut next = set.clone();
    let status = &mut next["status"];
    status["observedGeneration"] = set["metadata"]["generation"].clone();
    status["replicas"] = pods.len().into();
    status["readyReplicas"] = count(&|pod| super::has(pod, "Ready")).into();
    status["updatedReplicas"] = updated.into();
    if updated == pods.len() {
        status["currentRevision"] = update.into();
    }
    (next != *set).then_some(StatefulSetAction::UpdateStatus(next))
}

/// A pod of the StatefulSet that is ready at once.
fn pod(set: &Value, ordinal: u64, revision: &str) -> Value {
    let mut pod = set["spec"]["template"].clone();
    let metadata = &mut pod["metadata"];
    metadata["name"] = format!("{}-{ordinal}", name(set)).into();
    metadata["namespace"] = set["metadata"]["namespace"].clone();
    metadata["labels"][keys::CONTROLLER_REVISION_HASH] = revision.into();
    metadata["ownerReferences"] = json!([{ "apiVersion": set["apiVersion"], "kind": set["kind"],
        "name": name(set), "uid": set["metadata"]["uid"], "controller": true }]);
    pod["status"] = json!({ "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] });
    pod
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

fn ordinal(pod: &Value) -> Option<u64> {
    name(pod).rsplit_once('-')?.1.parse().ok()
}
