//! Progress of a pod's in-place update, from its annotations and its status.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::jiff::Timestamp;
use rbg_api::keys;
use serde_json::{Map, Value, json};

use crate::plan::revisions;
use crate::status::pod_label;

/// State at the start of an update: `{"revision", "updateTimestamp", "lastContainerStatuses": {container: {imageID,
/// restartCount}}}`, and
/// `hooks` with the progress of the hooks, if the pod has any.
pub(in crate::plan) const STATE: &str = "rbg.workloads.x-k8s.io/inplace-update-state";

/// Images to be set after the grace period: `{"revision", "containerImages", "graceSeconds"}`.
pub(crate) const GRACE: &str = "rbg.workloads.x-k8s.io/inplace-update-grace";

/// RFC 3339 without a fraction, as Kubernetes formats times.
pub(super) fn rfc3339_seconds(now: Timestamp) -> String {
    Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}

pub(in crate::plan) fn annotation(pod: &Pod, key: &str) -> Option<Value> {
    serde_json::from_str(pod.metadata.annotations.as_ref()?.get(key)?).ok()
}

fn statuses(pod: &Pod) -> &[ContainerStatus] {
    let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
    statuses.map_or(&[], Vec::as_slice)
}

pub(in crate::plan) fn started_at(pod: &Pod) -> Option<Timestamp> {
    annotation(pod, STATE)?["updateTimestamp"].as_str()?.parse().ok()
}

/// Whether the pod's new images have not been set yet.
pub(in crate::plan) fn has_pending_images(pod: &Pod) -> bool {
    pod.metadata.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(GRACE))
}

/// Since when the pod's gate is open, or closed. The Unix epoch if the condition has no transition time.
pub(in crate::plan) fn gate_since(pod: &Pod, open: bool) -> Option<Timestamp> {
    let mut conditions = pod.status.as_ref()?.conditions.iter().flatten();
    let gate = conditions.find(|condition| condition.type_ == "InPlaceUpdateReady")?;
    let time = gate.last_transition_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0);
    ((gate.status == "True") == open).then_some(time)
}

/// Whether no container of the pod runs.
pub(in crate::plan) fn is_down(pod: &Pod) -> bool {
    let is_down = |status: &ContainerStatus| {
        status.state.as_ref().is_some_and(|state| state.waiting.is_some() || state.terminated.is_some())
    };
    statuses(pod).iter().all(is_down)
}

/// The state at the start of the update, with the new progress of the hooks.
pub(in crate::plan) fn state_with(pod: &Pod, hooks: Value) -> String {
    let mut state = annotation(pod, STATE).unwrap_or_default();
    state["hooks"] = hooks;
    state.to_string()
}

/// Whether a pod is not fully at the revision: not started, in its grace period, or its new images do not run yet.
pub(in crate::plan) fn is_updating(pod: &Pod, revision: &revisions::RevisionRef) -> bool {
    if pod_label(pod, keys::CONTROLLER_REVISION_HASH) != Some(revision.hash.as_str()) {
        return true;
    }
    if has_pending_images(pod) {
        return true;
    }
    let Some(state) = annotation(pod, STATE) else { return false };
    let Some(before) = state["lastContainerStatuses"].as_object() else { return false };
    let started = state["updateTimestamp"].as_str().and_then(|text| text.parse().ok());
    !before.iter().all(|(container, before)| has_new_image(pod, container, before, started))
}

/// Number of restarts of a container that the update causes and that are not crashes.
pub(in crate::plan) fn expected_restarts(pod: &Pod, container: &str) -> i32 {
    let Some(state) = annotation(pod, STATE) else { return 0 };
    let before = &state["lastContainerStatuses"][container];
    let restarts = before["restartCount"].as_i64().and_then(|count| i32::try_from(count).ok());
    match before {
        Value::Object(_) => restarts.unwrap_or(0).saturating_add(1),
        _ => 0,
    }
}

/// Runtimes may report a new tag of an image that they have by its old tag. In that case a restart shows that the image is
/// in use.
fn has_new_image(pod: &Pod, container: &str, before: &Value, started: Option<Timestamp>) -> bool {
    let Some(status) = statuses(pod).iter().find(|status| status.name == container) else { return false };
    let containers = pod.spec.as_ref().map(|spec| spec.containers.as_slice()).unwrap_or_default();
    let wanted = containers.iter().find(|spec| spec.name == container).and_then(|spec| spec.image.as_deref());
    let is_other = !status.image_id.is_empty() && before["imageID"] != status.image_id.as_str();
    let runs = status.state.as_ref().and_then(|state| state.running.as_ref()?.started_at.as_ref());
    let restarted =
        before["restartCount"].as_i64().is_some_and(|count| i64::from(status.restart_count) > count)
            && runs.zip(started).is_some_and(|(running_since, update_start)| running_since.0 >= update_start);
    is_other || restarted || wanted.is_some_and(|wanted| is_same_image(wanted, &status.image))
}

/// Whether a runtime reports the image of a spec: it may prepend a registry and append a tag.
pub(crate) fn is_same_image(wanted: &str, running: &str) -> bool {
    let tagged = |image: &str| {
        let last = image.rsplit('/').next().unwrap_or(image);
        if last.contains([':', '@']) { image.to_owned() } else { format!("{image}:latest") }
    };
    let (wanted, running) = (tagged(wanted), tagged(running));
    running == wanted
        || running
            .strip_suffix(&wanted)
            .is_some_and(|rest| rest == "docker.io/" || rest == "docker.io/library/")
}

pub(super) fn state(
    pod: &Pod,
    images: &Map<String, Value>,
    revision: &revisions::RevisionRef,
    now: Timestamp,
) -> Value {
    let updated_statuses = statuses(pod).iter().filter(|status| images.contains_key(&status.name));
    let before = updated_statuses.map(|status| {
        let entry = json!({ "imageID": status.image_id, "restartCount": status.restart_count });
        (status.name.clone(), entry)
    });
    json!({
        "revision": revision.name,
        "updateTimestamp": rfc3339_seconds(now),
        "lastContainerStatuses": before.collect::<Map<String, Value>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_names_of_runtimes_may_be_fully_qualified() {
        assert!(is_same_image("nginx", "docker.io/library/nginx:latest"));
        assert!(is_same_image("a/b:1", "docker.io/a/b:1"));
        assert!(!is_same_image("a/b:1", "docker.io/a/b:2"));
        assert!(!is_same_image("b:1", "quay.io/a/b:1"));
    }

    #[test]
    fn a_new_tag_of_the_same_image_is_an_update_that_ends() {
        let revision = revisions::RevisionRef { name: "i-h".to_owned(), hash: "h".to_owned() };
        let state = r#"{"revision":"i-h","updateTimestamp":"2026-01-01T00:01:00Z","lastContainerStatuses":{"c":{"imageID":"sha256:1","restartCount":3}}}"#;
        let updating = |image: &str, restarts: i32, started: &str| {
            let pod = json!({
                "metadata": { "labels": { keys::CONTROLLER_REVISION_HASH: "h" }, "annotations": { STATE: state } },
                "spec": { "containers": [{ "name": "c", "image": "library/engine:2" }] },
                "status": { "containerStatuses": [{ "name": "c", "image": image, "imageID": "sha256:1", "ready": true,
                    "restartCount": restarts, "state": { "running": { "startedAt": started } } }] },
            });
            is_updating(&serde_json::from_value(pod).unwrap(), &revision)
        };
        // containerd's names, and the other tag of the same digest.
        let (before, since) = ("2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z");
        assert!(!updating("docker.io/library/engine:2", 4, since));
        assert!(!updating("docker.io/library/engine:1", 4, since));
        assert!(updating("docker.io/library/engine:1", 3, before), "it has not been restarted yet");
        assert!(updating("docker.io/library/engine:1", 4, before), "it crashed before the update began");
    }
}
