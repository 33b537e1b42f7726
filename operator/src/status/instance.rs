//! Status of a RoleInstance.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use rbg_api::keys;
use rbg_api::v1alpha2::{ComponentStatus, RoleInstance, RoleInstanceStatus};

use super::{has, set_condition, since};
use crate::time::add_duration;

const READY: &str = "RoleInstanceReady";
const ALL_PODS_READY: &str = "RoleInstanceAllPodsReady";
const IN_PLACE_UPDATE_READY: &str = "RoleInstanceInPlaceUpdateReady";

/// Whether the instance is ready at its present spec.
#[must_use]
pub fn is_ready(instance: &RoleInstance) -> bool {
    let Some(status) = &instance.status else { return false };
    instance.metadata.deletion_timestamp.is_none()
        && status.observed_generation == instance.metadata.generation
        && has(&status.conditions, READY)
}

/// Whether all pods of the instance are scheduled.
#[must_use]
pub fn is_scheduled(instance: &RoleInstance) -> bool {
    let Some(status) = &instance.status else { return false };
    let scheduled = |name: &str| {
        let component = status.component_statuses.iter().find(|component| component.name == name);
        component.map_or(0, |component| component.scheduled_replicas)
    };
    instance.spec.components.iter().all(|component| scheduled(&component.name) >= component.size())
}

/// Whether the instance has been ready for that long.
#[must_use]
pub fn is_available(instance: &RoleInstance, min_ready: Duration, now: Timestamp) -> bool {
    let since = instance.status.as_ref().and_then(|status| since(&status.conditions, READY));
    is_ready(instance)
        && (min_ready.is_zero() || since.is_some_and(|since| add_duration(since, min_ready) <= now))
}

/// Since when the instance is not ready.
#[must_use]
pub(crate) fn unready_since(instance: &RoleInstance) -> Option<Timestamp> {
    let conditions = &instance.status.as_ref()?.conditions;
    if has(conditions, READY) { None } else { since(conditions, READY) }
}

pub(crate) fn pod_has(pod: &Pod, kind: &str) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == kind && condition.status == "True")
}

pub(crate) fn pod_label<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.labels.as_ref()?.get(key).map(String::as_str)
}

/// Computes the status: `pods` are those that are not terminating, `name` and `hash` the desired revision, and
/// `waits_for_hooks` says whether a pod has not settled yet.
#[must_use]
pub fn instance(
    instance: &RoleInstance,
    pods: &[&Pod],
    (name, hash): (&str, &str),
    waits_for_hooks: bool,
    now: Timestamp,
) -> RoleInstanceStatus {
    let mut status = instance.status.clone().unwrap_or_default();
    let (mut ready, mut updated) = (true, true);
    let mut components = Vec::new();
    for component in &instance.spec.components {
        let component_pods = || {
            pods.iter().filter(|pod| pod_label(pod, keys::COMPONENT_NAME) == Some(component.name.as_str()))
        };
        let is_new = |pod: &Pod| pod_label(pod, keys::CONTROLLER_REVISION_HASH) == Some(hash);
        let count = |which: &dyn Fn(&Pod) -> bool| {
            i32::try_from(component_pods().filter(|pod| which(pod)).count()).unwrap_or(i32::MAX)
        };
        let component_status = ComponentStatus {
            name: component.name.clone(),
            size: component.size(),
            ready_replicas: count(&|pod| pod_has(pod, "Ready")),
            available_replicas: count(&|pod| pod_has(pod, "Ready")),
            scheduled_replicas: count(&|pod| pod_has(pod, "PodScheduled")),
            updated_replicas: count(&is_new),
            updated_ready_replicas: count(&|pod| is_new(pod) && pod_has(pod, "Ready")),
        };
        ready &= component_status.ready_replicas >= component_status.size;
        updated &= component_status.updated_replicas >= component_status.size;
        components.push(component_status);
    }
    let settled = pods.iter().all(|pod| pod_has(pod, "InPlaceUpdateReady")) && updated;
    status.observed_generation = instance.metadata.generation;
    status.component_statuses = components;
    status.update_revision = Some(name.to_owned());
    if updated || status.current_revision.is_none() {
        status.current_revision = Some(name.to_owned());
    }
    let instance_name = instance.metadata.name.as_deref().unwrap_or_default();
    status.label_selector = Some(format!("{}={instance_name}", keys::ROLE_INSTANCE_NAME));
    let conditions = &mut status.conditions;
    let pods_reason =
        if ready { ("PodsReady", "Ready") } else { ("AtLeastOnePodNotReady", "a pod is not ready") };
    set_condition(conditions, ALL_PODS_READY, ready, pods_reason, now);
    let has_update_gate =
        instance.spec.readiness_gates.iter().any(|gate| gate.condition_type == IN_PLACE_UPDATE_READY);
    if has_update_gate {
        let text = if settled { ("Settled", "") } else { ("StartInPlaceUpdate", "pods are being updated") };
        set_condition(conditions, IN_PLACE_UPDATE_READY, settled, text, now);
    }
    let gates = instance.spec.readiness_gates.iter();
    let closed = gates.map(|gate| gate.condition_type.as_str()).find(|gate| !has(conditions, gate));
    let is_ready_policy_none = instance.spec.ready_policy.as_deref() == Some("None");
    let (is_ready, reason, message) = match closed {
        _ if !(ready || is_ready_policy_none) => (false, "PodsNotReady", "not all pods are ready"),
        _ if !updated => (false, "InplaceUpdateNotReady", "not all pods are of the instance's revision"),
        Some(_) => (false, "ReadinessGatesNotReady", "a readiness gate is closed"),
        None if waits_for_hooks => (false, "WaitingForHooks", "a pod has not settled yet"),
        None => (true, "Ready", ""),
    };
    set_condition(conditions, READY, is_ready, (reason, message), now);
    status
}
