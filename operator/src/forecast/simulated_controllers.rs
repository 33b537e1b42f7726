//! Kubernetes' own controllers for pods and workloads, which act one step at a time.

use serde_json::{Value, json};

use super::ContainerOutcome;
use crate::ResourceKind;
use crate::plan::is_same_image;

/// Next state of an object.
pub(super) enum NextResourceState {
    Present(Value),
    Gone,
}

/// Next state of an object of a kind that the operator does not reconcile; `None` if it does not change. `outcome` is the
/// behaviour of containers.
pub(super) fn next_state(
    kind: ResourceKind,
    object: &Value,
    outcome: fn(&str) -> ContainerOutcome,
) -> Option<NextResourceState> {
    match kind {
        ResourceKind::Pod => pod(object, outcome),
        ResourceKind::WarmupPod => warmup_pod(object, outcome),
        ResourceKind::Deployment | ResourceKind::LeaderWorkerSet => {
            workload(object).map(NextResourceState::Present)
        }
        _ => None,
    }
}

/// All replicas become ready at once.
fn workload(object: &Value) -> Option<Value> {
    let replicas = &object["spec"]["replicas"];
    let status = json!({ "observedGeneration": object["metadata"]["generation"], "replicas": replicas,
        "readyReplicas": replicas, "updatedReplicas": replicas });
    (object["status"] != status).then(|| {
        let mut next = object.clone();
        next["status"] = status;
        next
    })
}

fn pod(live: &Value, outcome: fn(&str) -> ContainerOutcome) -> Option<NextResourceState> {
    if live["metadata"].get("deletionTimestamp").is_some() {
        return Some(NextResourceState::Gone);
    }
    if live["status"]["phase"] == "Failed" {
        return None;
    }
    let mut next = live.clone();
    if live["spec"].get("nodeName").is_none() {
        next["spec"]["nodeName"] = requested_node(live).unwrap_or("node").into();
        next["status"]["podIP"] = "10.0.0.1".into();
        condition(&mut next, "PodScheduled", true);
        return Some(NextResourceState::Present(next));
    }
    let is_new = live["status"].get("containerStatuses").is_none();
    let before = live["status"]["containerStatuses"].as_array().map_or(&[][..], Vec::as_slice);
    let entry = |spec: &Value| {
        let before = before.iter().find(|status| status["name"] == spec["name"]);
        container(spec, before, outcome)
    };
    let statuses: Vec<Value> =
        live["spec"]["containers"].as_array().into_iter().flatten().map(entry).collect();
    let all_up = statuses.iter().all(|status| status["ready"] == true);
    next["status"]["containerStatuses"] = statuses.into();
    next["status"]["phase"] = "Running".into();
    condition(&mut next, "ContainersReady", all_up);
    let gates = live["spec"]["readinessGates"].as_array().into_iter().flatten();
    let open = gates.into_iter().all(|gate| has(live, gate["conditionType"].as_str().unwrap_or_default()));
    condition(&mut next, "Ready", all_up && open);
    (is_new || next != *live).then_some(NextResourceState::Present(next))
}

/// A pod that no node has room for, since its creation.
pub(super) fn unschedulable(live: &Value) -> Option<NextResourceState> {
    let conditions = json!([{ "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "lastTransitionTime": live["metadata"]["creationTimestamp"] }]);
    let is_new = live["status"]["conditions"] != conditions;
    is_new.then(|| {
        let mut next = live.clone();
        next["status"] = json!({ "phase": "Pending", "conditions": conditions });
        NextResourceState::Present(next)
    })
}

/// The first node, by name, of the pod's node affinity.
fn requested_node(pod: &Value) -> Option<&str> {
    let affinity = &pod["spec"]["affinity"]["nodeAffinity"];
    let preferred = &affinity["preferredDuringSchedulingIgnoredDuringExecution"][0]["preference"];
    let required = &affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0];
    let expressions =
        [preferred, required].into_iter().filter_map(|term| term["matchExpressions"].as_array());
    let hosts = expressions.flatten().find(|entry| entry["key"] == "kubernetes.io/hostname");
    hosts?["values"][0].as_str()
}

/// Ends the pod at once on its requested node, if its containers end.
fn warmup_pod(live: &Value, outcome: fn(&str) -> ContainerOutcome) -> Option<NextResourceState> {
    if live["metadata"].get("deletionTimestamp").is_some() {
        return Some(NextResourceState::Gone);
    }
    if live["status"].get("phase").is_some() {
        return None;
    }
    let ended = |reason: &str, code: i32| json!({ "terminated": { "reason": reason, "exitCode": code } });
    let container = |spec: &Value| {
        let image = spec["image"].as_str().unwrap_or_default();
        let (state, id) = match outcome(image) {
            ContainerOutcome::Runs => (ended("Completed", 0), format!("sha256:{image}")),
            ContainerOutcome::Exits(reason, code) => (ended(reason, code), format!("sha256:{image}")),
            ContainerOutcome::NotStarted(reason) => {
                (json!({ "waiting": { "reason": reason } }), String::new())
            }
        };
        json!({ "name": spec["name"], "image": image, "imageID": id, "ready": false, "restartCount": 0, "state": state })
    };
    let statuses: Vec<Value> =
        live["spec"]["containers"].as_array().into_iter().flatten().map(container).collect();
    let any = |which: &dyn Fn(&Value) -> bool| statuses.iter().any(|entry| which(&entry["state"]));
    let phase = match () {
        () if any(&|state| state.get("waiting").is_some()) => "Pending",
        () if any(&|state| state["terminated"]["exitCode"] != 0) => "Failed",
        () => "Succeeded",
    };
    let mut next = live.clone();
    if live["spec"].get("nodeName").is_none() {
        next["spec"]["nodeName"] = live["spec"]["nodeSelector"]["kubernetes.io/hostname"].clone();
    }
    next["status"] = json!({ "phase": phase, "containerStatuses": statuses });
    Some(NextResourceState::Present(next))
}

/// A container whose image has changed is first down, and then up, if it starts.
fn container(spec: &Value, status: Option<&Value>, outcome: fn(&str) -> ContainerOutcome) -> Value {
    let image = spec["image"].as_str().unwrap_or_default();
    let id = if image.contains('@') { image.to_owned() } else { format!("{image}@sha256:0") };
    let runs = outcome(image) == ContainerOutcome::Runs;
    let Some(status) = status else {
        return json!({ "name": spec["name"], "image": image, "imageID": id, "ready": runs, "restartCount": 0 });
    };
    let mut next = status.clone();
    if !is_same_image(image, status["image"].as_str().unwrap_or_default()) {
        next["image"] = image.into();
        next["ready"] = false.into();
        next["restartCount"] = (status["restartCount"].as_i64().unwrap_or(0) + 1).into();
    } else if status["ready"] == false && runs {
        next["ready"] = true.into();
        next["imageID"] = id.into();
    }
    next
}

pub(crate) fn has(pod: &Value, kind: &str) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.into_iter().any(|entry| entry["type"] == kind && entry["status"] == "True")
}

fn condition(pod: &mut Value, kind: &str, is_true: bool) {
    let status = if is_true { "True" } else { "False" };
    if !pod["status"]["conditions"].is_array() {
        pod["status"]["conditions"] = json!([]);
    }
    let Value::Array(conditions) = &mut pod["status"]["conditions"] else { return };
    match conditions.iter_mut().find(|entry| entry["type"] == kind) {
        Some(entry) => entry["status"] = status.into(),
        None => conditions.push(json!({ "type": kind, "status": status })),
    }
}
