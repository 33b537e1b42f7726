//! Updating a pod in place: its gate is closed, then its images are changed, and its gate is opened when they run.
//!
//! How far it is stands in the pod's annotations, so that whoever looks next goes on from there.

use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::jiff::Timestamp;
use moongate_render::pod;
use rbg_api::{PodTemplate, keys};
use serde_json::{Map, Value, json};

use super::instance::{InstanceInput, component_of, delete};
use super::{Action, Plan, after, hooks, revisions};
use crate::Kind;
use crate::status::{pod_has, pod_label};

/// What an update began with: `{"revision", "updateTimestamp", "lastContainerStatuses": {container: {imageID, restartCount}}}`, and
/// `hooks`, how far the pod is with them, if it has any.
pub(super) const STATE: &str = "rbg.workloads.x-k8s.io/inplace-update-state";
/// Images that wait for the end of the grace period: `{"revision", "containerImages", "graceSeconds"}`.
pub(crate) const GRACE: &str = "rbg.workloads.x-k8s.io/inplace-update-grace";

/// Annotation of pod templates: when somebody asked for a restart. It is kubectl's, and others' controllers know it, too.
pub(crate) const RESTARTED_AT: &str = "kubectl.kubernetes.io/restartedAt";

/// A condition of a pod, as it is patched.
pub(super) fn condition(kind: &str, is_true: bool, reason: &str, message: &str, now: Timestamp) -> Value {
    let mut condition = json!({
        "type": kind,
        "status": if is_true { "True" } else { "False" },
        "lastTransitionTime": seconds(now),
    });
    for (member, text) in [("reason", reason), ("message", message)] {
        condition[member] = if text.is_empty() { Value::Null } else { text.into() };
    }
    condition
}

/// RFC 3339 without a fraction, as Kubernetes has it.
fn seconds(now: Timestamp) -> String {
    Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}

pub(super) fn annotation(pod: &Pod, key: &str) -> Option<Value> {
    serde_json::from_str(pod.metadata.annotations.as_ref()?.get(key)?).ok()
}

fn statuses(pod: &Pod) -> &[ContainerStatus] {
    let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
    statuses.map_or(&[], Vec::as_slice)
}

/// Begins the update of a pod that is of another revision. One that cannot be updated in place is made anew.
pub(super) fn begin(input: InstanceInput<'_>, pod: &Pod, revision: &revisions::Found, plan: &mut Plan) {
    let live = input.instance;
    let Some(component) = component_of(live, pod) else { return };
    let name = pod.metadata.name.clone().unwrap_or_default();
    let Some(old) = old_template(input, pod, &component.name) else {
        recreate(
            input,
            &[pod],
            |name| format!("{name}: the revision that it was made from is not known"),
            plan,
        );
        return;
    };
    let restart = component.template.annotation(RESTARTED_AT);
    if restart.is_some() && restart != old.annotation(RESTARTED_AT) {
        recreate(input, &[pod], |name| format!("{name}: a restart was asked for"), plan);
        return;
    }
    let Some(images) = images(&old, &component.template) else {
        recreate(input, &[pod], |name| format!("{name}: more than its images has changed"), plan);
        return;
    };
    let images = with_pending(images, pod, &component.template);
    let id = pod_label(pod, keys::COMPONENT_ID).and_then(|id| id.parse().ok()).unwrap_or(0);
    let mut labels = texts(&old, &component.template, "labels");
    labels.extend(
        pod::labels(live, component, id, &revision.hash).into_iter().map(|(key, value)| (key, value.into())),
    );
    let mut annotations = texts(&old, &component.template, "annotations");
    let mut body = json!({ "metadata": { "uid": pod.metadata.uid } });
    if !images.is_empty() {
        if pod_has(pod, "InPlaceUpdateReady") || pod_has(pod, "InstancePodReady") {
            close(input, pod, &name, plan);
        }
        let mut state = state(pod, &images, revision, input.now);
        if hooks::has_hooks(&component.template) {
            state["hooks"] = hooks::begun();
        }
        annotations.insert(STATE.to_owned(), state.to_string().into());
        let grace = grace_seconds(input);
        annotations.insert(GRACE.to_owned(), Value::Null);
        if grace > 0 || hooks::are_used(input.instance) {
            let waiting =
                json!({ "revision": revision.name, "containerImages": images, "graceSeconds": grace });
            annotations.insert(GRACE.to_owned(), waiting.to_string().into());
            plan.look_again(after(input.now, Duration::from_secs(grace)));
        } else {
            body["spec"] = containers(&images);
        }
    }
    body["metadata"]["labels"] = Value::Object(labels);
    body["metadata"]["annotations"] = Value::Object(annotations);
    let action = Action::Patch { kind: Kind::Pod, name: name.clone(), status: false, body };
    plan.push(action, format!("{name} is updated in place"));
}

/// Whether the pod can become what the instance says of it without being made anew.
pub(super) fn is_possible(input: InstanceInput<'_>, pod: &Pod) -> bool {
    component_of(input.instance, pod).is_some_and(|component| {
        let old = old_template(input, pod, &component.name);
        old.is_some_and(|old| images(&old, &component.template).is_some())
    })
}

/// Makes pods anew that cannot keep their names and change in place, all at once when the last of them has drained.
pub(super) fn recreate(
    input: InstanceInput<'_>,
    pods: &[&Pod],
    reason: impl Fn(&str) -> String,
    plan: &mut Plan,
) {
    let name = |pod: &Pod| pod.metadata.name.clone().unwrap_or_default();
    let mut held = false;
    for pod in pods {
        if hooks::are_used(input.instance) && pod_has(pod, "InPlaceUpdateReady") {
            close(input, pod, &name(pod), plan);
            held = true;
        } else {
            held |= hooks::holds_deletion(input, pod, plan);
        }
    }
    for pod in pods.iter().filter(|_| !held) {
        plan.push(delete(pod), reason(&name(pod)));
    }
}

/// Goes on with the update of a pod that has been given its revision: when its grace period is over, and nobody holds the
/// instance, its images are changed.
pub(super) fn go_on(
    input: InstanceInput<'_>,
    pod: &Pod,
    revision: &revisions::Found,
    held: bool,
    plan: &mut Plan,
) {
    let Some(waiting) = annotation(pod, GRACE) else { return };
    let begun = begun_at(pod);
    let seconds = waiting["graceSeconds"].as_u64().unwrap_or(0);
    let due = after(begun.unwrap_or(input.now), Duration::from_secs(seconds));
    if begun.is_some() && due > input.now {
        plan.look_again(due);
        return;
    }
    if held {
        return;
    }
    let name = pod.metadata.name.clone().unwrap_or_default();
    let images = waiting["containerImages"].as_object().cloned().unwrap_or_default();
    let mut body = json!({ "metadata": { "uid": pod.metadata.uid, "annotations": { GRACE: null } } });
    let mut state = None;
    if waiting["revision"] == revision.name.as_str() {
        body["spec"] = containers(&images);
        // A crash meanwhile is no sign that the new images run.
        state = Some(self::state(pod, &images, revision, input.now));
    }
    let mut reason = format!("{name}: its grace period is over");
    if let Some((hooks, why)) = hooks::drained(input, pod) {
        state.get_or_insert_with(|| annotation(pod, STATE).unwrap_or_default())["hooks"] = hooks;
        reason = why;
    }
    if let Some(state) = state {
        body["metadata"]["annotations"][STATE] = state.to_string().into();
    }
    plan.push(Action::Patch { kind: Kind::Pod, name, status: false, body }, reason);
}

/// When the pod's update began.
pub(super) fn begun_at(pod: &Pod) -> Option<Timestamp> {
    annotation(pod, STATE)?["updateTimestamp"].as_str()?.parse().ok()
}

/// Whether the pod's new images wait.
pub(super) fn has_waiting_images(pod: &Pod) -> bool {
    pod.metadata.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(GRACE))
}

/// Since when the pod's gate is open, or closed; for ever, if that is not said.
pub(super) fn gate_since(pod: &Pod, open: bool) -> Option<Timestamp> {
    let mut conditions = pod.status.as_ref()?.conditions.iter().flatten();
    let gate = conditions.find(|condition| condition.type_ == "InPlaceUpdateReady")?;
    let time = gate.last_transition_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0);
    ((gate.status == "True") == open).then_some(time)
}

/// Whether none of the pod's containers runs.
pub(super) fn is_down(pod: &Pod) -> bool {
    let is_down = |status: &ContainerStatus| {
        status.state.as_ref().is_some_and(|state| state.waiting.is_some() || state.terminated.is_some())
    };
    statuses(pod).iter().all(is_down)
}

/// What an update began with, and how far the pod is with its hooks.
pub(super) fn state_with(pod: &Pod, hooks: Value) -> String {
    let mut state = annotation(pod, STATE).unwrap_or_default();
    state["hooks"] = hooks;
    state.to_string()
}

/// Whether a pod is on its way to the revision: not begun, waiting, or its new images do not run yet.
pub(super) fn is_updating(pod: &Pod, revision: &revisions::Found) -> bool {
    if pod_label(pod, keys::CONTROLLER_REVISION_HASH) != Some(revision.hash.as_str()) {
        return true;
    }
    if has_waiting_images(pod) {
        return true;
    }
    let Some(state) = annotation(pod, STATE) else { return false };
    let Some(before) = state["lastContainerStatuses"].as_object() else { return false };
    let begun = state["updateTimestamp"].as_str().and_then(|text| text.parse().ok());
    !before.iter().all(|(container, before)| has_new_image(pod, container, before, begun))
}

/// Restarts of a container that are no crashes.
pub(super) fn explained_restarts(pod: &Pod, container: &str) -> i32 {
    let Some(state) = annotation(pod, STATE) else { return 0 };
    let before = &state["lastContainerStatuses"][container];
    let restarts = before["restartCount"].as_i64().and_then(|count| i32::try_from(count).ok());
    match before {
        Value::Object(_) => restarts.unwrap_or(0).saturating_add(1),
        _ => 0,
    }
}

/// Runtimes may report a new tag of an image that they have by its old tag: then the restart tells.
fn has_new_image(pod: &Pod, container: &str, before: &Value, begun: Option<Timestamp>) -> bool {
    let Some(status) = statuses(pod).iter().find(|status| status.name == container) else { return false };
    let containers = pod.spec.as_ref().map(|spec| spec.containers.as_slice()).unwrap_or_default();
    let wanted = containers.iter().find(|spec| spec.name == container).and_then(|spec| spec.image.as_deref());
    let is_other = !status.image_id.is_empty() && before["imageID"] != status.image_id.as_str();
    let runs = status.state.as_ref().and_then(|state| state.running.as_ref()?.started_at.as_ref());
    let restarted =
        before["restartCount"].as_i64().is_some_and(|count| i64::from(status.restart_count) > count)
            && runs.zip(begun).is_some_and(|(started, begun)| started.0 >= begun);
    is_other || restarted || wanted.is_some_and(|wanted| is_same_image(wanted, &status.image))
}

/// Whether a runtime means the image that a spec names: it may put a registry before it and a tag behind.
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

fn close(input: InstanceInput<'_>, pod: &Pod, name: &str, plan: &mut Plan) {
    let closed = r#"[{"userAgent":"Lifecycle","key":"InstanceReady"}]"#;
    let conditions = [
        condition("InPlaceUpdateReady", false, "StartInPlaceUpdate", "", input.now),
        condition("InstancePodReady", false, "", closed, input.now),
        condition("Ready", false, "ReadinessGatesNotReady", "the pod is being updated in place", input.now),
    ];
    let body = json!({ "metadata": { "uid": pod.metadata.uid }, "status": { "conditions": conditions } });
    let action = Action::Patch { kind: Kind::Pod, name: name.to_owned(), status: true, body };
    plan.push(action, format!("{name} shall serve nobody while it is updated"));
}

fn grace_seconds(input: InstanceInput<'_>) -> u64 {
    let annotations = input.instance.metadata.annotations.as_ref();
    let text = annotations.and_then(|annotations| annotations.get(keys::GRACE_PERIOD_SECONDS));
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}

fn old_template(input: InstanceInput<'_>, pod: &Pod, component: &str) -> Option<PodTemplate> {
    let hash = pod_label(pod, keys::CONTROLLER_REVISION_HASH)?;
    let stored = input.revisions.iter().find(|stored| revisions::hash(stored) == hash)?;
    let data = revisions::data(stored)?;
    let components = data["spec"]["components"].as_array()?;
    let mut template = components.iter().find(|one| one["name"] == component)?["template"].clone();
    template.as_object_mut()?.remove("$patch");
    serde_json::from_value(template).ok()
}

/// The images that differ, by container. `None` if anything else of the pods' specs does.
fn images(old: &PodTemplate, new: &PodTemplate) -> Option<Map<String, Value>> {
    let (mut old, new_spec) = (old.0.get("spec")?.clone(), new.0.get("spec")?);
    let mut images = Map::new();
    let containers = old.get_mut("containers").and_then(Value::as_array_mut)?;
    for (old, new) in containers.iter_mut().zip(new.containers()) {
        let image = new.get("image").filter(|image| old.get("image") != Some(image));
        if let Some(image) = image {
            images.insert(new.get("name")?.as_str()?.to_owned(), image.clone());
            old["image"] = image.clone();
        }
    }
    (old == *new_spec).then_some(images)
}

/// Also those that the pod does not have yet: an earlier update may not have come to the end of its grace period.
fn with_pending(mut images: Map<String, Value>, pod: &Pod, new: &PodTemplate) -> Map<String, Value> {
    for live in pod.spec.iter().flat_map(|spec| &spec.containers) {
        let template = new.containers().iter().find(|one| one["name"] == live.name.as_str());
        if let Some(image) = template.and_then(|one| one.get("image"))
            && image.as_str() != live.image.as_deref()
        {
            images.insert(live.name.clone(), image.clone());
        }
    }
    images
}

/// Labels or annotations that a template has, and null for those that it no longer has.
fn texts(old: &PodTemplate, new: &PodTemplate, member: &str) -> Map<String, Value> {
    let of = |template: &PodTemplate| {
        let texts = template.0.get("metadata").and_then(|metadata| metadata.get(member));
        texts.and_then(Value::as_object).cloned().unwrap_or_default()
    };
    let (old, new) = (of(old), of(new));
    let mut texts: Map<String, Value> = old
        .into_iter()
        .filter(|(key, _)| !new.contains_key(key))
        .map(|(key, _)| (key, Value::Null))
        .collect();
    texts.extend(new);
    texts.remove(keys::COMPONENT_DISCOVERY);
    texts
}

fn containers(images: &Map<String, Value>) -> Value {
    let containers = images.iter().map(|(name, image)| json!({ "name": name, "image": image }));
    json!({ "containers": containers.collect::<Vec<_>>() })
}

fn state(pod: &Pod, images: &Map<String, Value>, revision: &revisions::Found, now: Timestamp) -> Value {
    let own = statuses(pod).iter().filter(|status| images.contains_key(&status.name));
    let before = own.map(|status| {
        let one = json!({ "imageID": status.image_id, "restartCount": status.restart_count });
        (status.name.clone(), one)
    });
    json!({
        "revision": revision.name,
        "updateTimestamp": seconds(now),
        "lastContainerStatuses": before.collect::<Map<String, Value>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_may_name_an_image_at_length() {
        assert!(is_same_image("nginx", "docker.io/library/nginx:latest"));
        assert!(is_same_image("a/b:1", "docker.io/a/b:1"));
        assert!(!is_same_image("a/b:1", "docker.io/a/b:2"));
        assert!(!is_same_image("b:1", "quay.io/a/b:1"));
    }

    #[test]
    fn a_new_tag_of_the_same_image_is_an_update_that_ends() {
        let revision = revisions::Found { name: "i-h".to_owned(), hash: "h".to_owned() };
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

    #[test]
    fn only_images_change_in_place() {
        let template = |image: &str, value: &str| -> PodTemplate {
            serde_json::from_value(json!({ "spec": { "containers": [
                { "name": "c", "image": image, "env": [{ "name": "E", "value": value }] }] } }))
            .unwrap()
        };
        assert_eq!(images(&template("a", "1"), &template("b", "1")).unwrap()["c"], "b");
        assert!(images(&template("a", "1"), &template("b", "2")).is_none());
        assert!(images(&template("a", "1"), &template("a", "1")).unwrap().is_empty());
    }
}
