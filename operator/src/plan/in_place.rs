//! Updates a pod in place: closes its readiness gate, changes its images, and opens the gate when they run.
//!
//! Progress is stored in the pod's annotations, so that any later plan can continue.

mod difference;
mod progress;
mod restart;

pub(crate) use difference::RESTARTED_AT;
pub(super) use difference::{is_possible, new_images};
pub(crate) use progress::{GRACE, is_same_image};
pub(super) use progress::{
    STATE, annotation, expected_restarts, gate_since, has_pending_images, is_down, is_updating, started_at,
    state_with,
};
pub(super) use restart::{has_restarted, restart};

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use moongate_render::pod;
use rbg_api::keys;
use serde_json::{Map, Value, json};

use super::instance::{InstanceInput, component_of, delete};
use super::{ReconcilePlan, WriteAction, hooks, revisions};
use crate::ResourceKind;
use crate::status::{pod_has, pod_label};
use crate::time::add_duration;
use difference::{has_other_service, images, metadata_patch, old_template, with_pending};
use progress::rfc3339_seconds;

/// A pod condition in the form of a status patch.
pub(super) fn condition(kind: &str, is_true: bool, reason: &str, message: &str, now: Timestamp) -> Value {
    let mut condition = json!({
        "type": kind,
        "status": if is_true { "True" } else { "False" },
        "lastTransitionTime": rfc3339_seconds(now),
    });
    for (member, text) in [("reason", reason), ("message", message)] {
        condition[member] = if text.is_empty() { Value::Null } else { text.into() };
    }
    condition
}

/// Starts the update of a pod that has another revision. A pod that cannot be updated in place is recreated.
pub(super) fn begin(
    input: InstanceInput<'_>,
    pod: &Pod,
    revision: &revisions::RevisionRef,
    plan: &mut ReconcilePlan,
) {
    let live = input.instance;
    let Some(component) = component_of(live, pod) else { return };
    let name = pod.metadata.name.clone().unwrap_or_default();
    let Some(old) = old_template(input, pod, &component.name) else {
        recreate(input, &[pod], |name| format!("{name}: the revision it was created from is unknown"), plan);
        return;
    };
    if has_other_service(input, pod, component) {
        recreate(input, &[pod], |name| format!("{name}: its Service has changed"), plan);
        return;
    }
    let restart = component.template.annotation(RESTARTED_AT);
    if restart.is_some() && restart != old.annotation(RESTARTED_AT) {
        recreate(input, &[pod], |name| format!("{name}: a restart was requested"), plan);
        return;
    }
    let Some(images) = images(&old, &component.template) else {
        recreate(input, &[pod], |name| format!("{name}: other fields than its images have changed"), plan);
        return;
    };
    let images = with_pending(images, pod, &component.template);
    let id = pod_label(pod, keys::COMPONENT_ID).and_then(|id| id.parse().ok()).unwrap_or(0);
    let mut labels = metadata_patch(&old, &component.template, "labels");
    labels.extend(
        pod::labels(live, component, id, &revision.hash).into_iter().map(|(key, value)| (key, value.into())),
    );
    let mut annotations = metadata_patch(&old, &component.template, "annotations");
    let mut body = json!({ "metadata": { "uid": pod.metadata.uid } });
    if !images.is_empty() {
        if pod_has(pod, "InPlaceUpdateReady") || pod_has(pod, "InstancePodReady") {
            close_gate(input, pod, None, plan);
        }
        let mut state = progress::state(pod, &images, revision, input.now);
        if hooks::has_hooks(&component.template) {
            state["hooks"] = hooks::initial_progress();
        }
        annotations.insert(STATE.to_owned(), state.to_string().into());
        let grace = grace_seconds(input);
        annotations.insert(GRACE.to_owned(), Value::Null);
        if grace > 0 || hooks::are_used(input.instance) {
            let waiting =
                json!({ "revision": revision.name, "containerImages": images, "graceSeconds": grace });
            annotations.insert(GRACE.to_owned(), waiting.to_string().into());
            plan.schedule_requeue(add_duration(input.now, Duration::from_secs(grace)));
        } else {
            body["spec"] = containers(&images);
        }
    }
    body["metadata"]["labels"] = Value::Object(labels);
    body["metadata"]["annotations"] = Value::Object(annotations);
    let action = WriteAction::Patch { kind: ResourceKind::Pod, name: name.clone(), status: false, body };
    plan.push(action, format!("{name} is updated in place"));
}

/// Recreates pods that cannot be updated in place, all at once after the last of them has drained.
pub(super) fn recreate(
    input: InstanceInput<'_>,
    pods: &[&Pod],
    reason: impl Fn(&str) -> String,
    plan: &mut ReconcilePlan,
) {
    let is_draining = drain(input, pods, plan);
    for pod in pods.iter().filter(|_| !is_draining) {
        plan.push(delete(pod), reason(pod.metadata.name.as_deref().unwrap_or_default()));
    }
}

/// Drains pods that are going to be deleted. Returns whether one of them is still draining.
pub(super) fn drain(input: InstanceInput<'_>, pods: &[&Pod], plan: &mut ReconcilePlan) -> bool {
    if !hooks::are_used(input.instance) {
        return false;
    }
    let is_open = |pod: &&Pod| pod_has(pod, "InPlaceUpdateReady");
    let (open, closed): (Vec<&Pod>, Vec<&Pod>) = pods.iter().copied().partition(is_open);
    for pod in &open {
        close_gate(input, pod, hooks::leaving_state(pod), plan);
    }
    hooks::block_deletion(input, &closed, plan) || !open.is_empty()
}

/// Continues the update of a pod that already has the new revision: changes its images when its grace period is over and
/// the instance is not on hold.
pub(super) fn continue_update(
    input: InstanceInput<'_>,
    pod: &Pod,
    revision: &revisions::RevisionRef,
    is_draining: bool,
    plan: &mut ReconcilePlan,
) {
    let Some(waiting) = annotation(pod, GRACE) else { return };
    let started = started_at(pod);
    let seconds = waiting["graceSeconds"].as_u64().unwrap_or(0);
    let due = add_duration(started.unwrap_or(input.now), Duration::from_secs(seconds));
    if started.is_some() && due > input.now {
        plan.schedule_requeue(due);
        return;
    }
    if is_draining {
        return;
    }
    let name = pod.metadata.name.clone().unwrap_or_default();
    let images = waiting["containerImages"].as_object().cloned().unwrap_or_default();
    let mut body = json!({ "metadata": { "uid": pod.metadata.uid, "annotations": { GRACE: null } } });
    let mut state = None;
    if waiting["revision"] == revision.name.as_str() {
        body["spec"] = containers(&images);
        // A crash during the grace period does not show that the new images run.
        state = Some(progress::state(pod, &images, revision, input.now));
    }
    let mut reason = format!("{name}: its grace period is over");
    if let Some((hooks, why)) = hooks::drained(input, pod) {
        state.get_or_insert_with(|| annotation(pod, STATE).unwrap_or_default())["hooks"] = hooks;
        reason = why;
    }
    if let Some(state) = state {
        body["metadata"]["annotations"][STATE] = state.to_string().into();
    }
    plan.push(WriteAction::Patch { kind: ResourceKind::Pod, name, status: false, body }, reason);
}

/// Takes a pod out of service, and stores the new state of its hooks.
fn close_gate(input: InstanceInput<'_>, pod: &Pod, state: Option<String>, plan: &mut ReconcilePlan) {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let purpose = if state.is_some() { "deletion" } else { "update" };
    let closed = r#"[{"userAgent":"Lifecycle","key":"InstanceReady"}]"#;
    let conditions = [
        condition("InPlaceUpdateReady", false, "StartInPlaceUpdate", "", input.now),
        condition("InstancePodReady", false, "", closed, input.now),
        condition("Ready", false, "ReadinessGatesNotReady", "the pod is out of service", input.now),
    ];
    let mut body = json!({ "metadata": { "uid": pod.metadata.uid }, "status": { "conditions": conditions } });
    if let Some(state) = state {
        body["metadata"]["annotations"] = json!({ STATE: state });
    }
    let action = WriteAction::Patch { kind: ResourceKind::Pod, name: name.to_owned(), status: true, body };
    plan.push(action, format!("{name} is taken out of service for its {purpose}"));
}

fn grace_seconds(input: InstanceInput<'_>) -> u64 {
    let annotations = input.instance.metadata.annotations.as_ref();
    let text = annotations.and_then(|annotations| annotations.get(keys::GRACE_PERIOD_SECONDS));
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}

fn containers(images: &Map<String, Value>) -> Value {
    let containers = images.iter().map(|(name, image)| json!({ "name": name, "image": image }));
    json!({ "containers": containers.collect::<Vec<_>>() })
}
