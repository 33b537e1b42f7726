//! What Kubernetes does about pods and workloads that are not ours: it runs them, one step at a look.

use moongate_operator::Kind;
use serde_json::{Value, json};

/// The pod as it is next: `None` if it stays as it is. One that is to end is gone when this answers `Gone`.
pub(crate) enum Next {
    Is(Value),
    Gone,
}

/// What becomes of an object of a kind that the operator does not look after.
pub(crate) fn next(kind: Kind, object: &Value) -> Option<Next> {
    match kind {
        Kind::Pod => pod(object),
        Kind::WarmupPod => warmup_pod(object),
        Kind::StatefulSet | Kind::Deployment => workload(object).map(Next::Is),
        _ => None,
    }
}

/// All replicas are ready at once.
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

fn pod(live: &Value) -> Option<Next> {
    if live["metadata"].get("deletionTimestamp").is_some() {
        return Some(Next::Gone);
    }
    if live["status"]["phase"] == "Failed" {
        return None;
    }
    let mut next = live.clone();
    if live["spec"].get("nodeName").is_none() {
        next["spec"]["nodeName"] = "node".into();
        condition(&mut next, "PodScheduled", true);
        return Some(Next::Is(next));
    }
    let specs = live["spec"]["containers"].as_array().unwrap();
    let is_new = live["status"].get("containerStatuses").is_none();
    let statuses: Vec<Value> = specs
        .iter()
        .enumerate()
        .map(|(index, spec)| container(spec, &live["status"]["containerStatuses"][index]))
        .collect();
    let all_up = statuses.iter().all(|status| status["ready"] == true);
    next["status"]["containerStatuses"] = statuses.into();
    next["status"]["phase"] = "Running".into();
    condition(&mut next, "ContainersReady", all_up);
    let gates = live["spec"]["readinessGates"].as_array().into_iter().flatten();
    let open = gates.into_iter().all(|gate| has(live, gate["conditionType"].as_str().unwrap()));
    condition(&mut next, "Ready", all_up && open);
    (is_new || next != *live).then_some(Next::Is(next))
}

/// It ends at once on the node that it asks for. Images may be called broken, or to have no shell: then a container does not
/// start, and ends, or waits for ever.
fn warmup_pod(live: &Value) -> Option<Next> {
    if live["metadata"].get("deletionTimestamp").is_some() {
        return Some(Next::Gone);
    }
    if live["status"].get("phase").is_some() {
        return None;
    }
    let ended = |reason: &str, code: i32| json!({ "terminated": { "reason": reason, "exitCode": code } });
    let container = |spec: &Value| {
        let image = spec["image"].as_str().unwrap();
        let state = match image.split(':').next().unwrap() {
            "broken" => ended("Error", 1),
            "shell-less" => ended("StartError", 128),
            "stuck" => json!({ "waiting": { "reason": "CreateContainerError" } }),
            "absent" => json!({ "waiting": { "reason": "ImagePullBackOff" } }),
            _ => ended("Completed", 0),
        };
        let id = if state.get("waiting").is_some() { String::new() } else { format!("sha256:{image}") };
        json!({ "name": spec["name"], "image": image, "imageID": id, "ready": false, "restartCount": 0, "state": state })
    };
    let statuses: Vec<Value> = live["spec"]["containers"].as_array().unwrap().iter().map(container).collect();
    let any = |which: &dyn Fn(&Value) -> bool| statuses.iter().any(|one| which(&one["state"]));
    let phase = match () {
        () if any(&|state| state.get("waiting").is_some()) => "Pending",
        () if any(&|state| state["terminated"]["exitCode"] != 0) => "Failed",
        () => "Succeeded",
    };
    let mut next = live.clone();
    next["spec"]["nodeName"] = live["spec"]["nodeSelector"]["kubernetes.io/hostname"].clone();
    next["status"] = json!({ "phase": phase, "containerStatuses": statuses });
    Some(Next::Is(next))
}

/// A container whose image has changed is down first, and then up, unless it is called broken.
fn container(spec: &Value, status: &Value) -> Value {
    let image = spec["image"].as_str().unwrap_or_default();
    let id = format!("sha256:{image}");
    let works = !image.starts_with("broken");
    if status.is_null() {
        return json!({ "name": spec["name"], "image": image, "imageID": id, "ready": works, "restartCount": 0 });
    }
    let mut next = status.clone();
    if status["image"] != image {
        next["image"] = image.into();
        next["ready"] = false.into();
        next["restartCount"] = (status["restartCount"].as_i64().unwrap() + 1).into();
    } else if status["ready"] == false && works {
        next["ready"] = true.into();
        next["imageID"] = id.into();
    }
    next
}

pub(crate) fn has(pod: &Value, kind: &str) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.into_iter().any(|one| one["type"] == kind && one["status"] == "True")
}

fn condition(pod: &mut Value, kind: &str, is_true: bool) {
    let status = if is_true { "True" } else { "False" };
    if !pod["status"]["conditions"].is_array() {
        pod["status"]["conditions"] = json!([]);
    }
    let conditions = pod["status"]["conditions"].as_array_mut().unwrap();
    match conditions.iter_mut().find(|one| one["type"] == kind) {
        Some(one) => one["status"] = status.into(),
        None => conditions.push(json!({ "type": kind, "status": status })),
    }
}
