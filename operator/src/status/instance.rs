//! Status of a RoleInstance.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use rbg_api::keys;
use rbg_api::v1alpha2::{ComponentStatus, RoleInstance, RoleInstanceStatus};

use super::{has, set_condition, since};

const READY: &str = "RoleInstanceReady";
const ALL_PODS_READY: &str = "RoleInstanceAllPodsReady";
const IN_PLACE_UPDATE_READY: &str = "RoleInstanceInPlaceUpdateReady";

/// Whether it is ready as its present spec wants it.
#[must_use]
pub fn is_ready(instance: &RoleInstance) -> bool {
    let Some(status) = &instance.status else { return false };
    instance.metadata.deletion_timestamp.is_none()
        && status.observed_generation == instance.metadata.generation
        && has(&status.conditions, READY)
}

/// Whether all of its pods have nodes.
#[must_use]
pub fn is_scheduled(instance: &RoleInstance) -> bool {
    let Some(status) = &instance.status else { return false };
    let scheduled = |name: &str| {
        let component = status.component_statuses.iter().find(|component| component.name == name);
        component.map_or(0, |component| component.scheduled_replicas)
    };
    instance.spec.components.iter().all(|component| scheduled(&component.name) >= component.size())
}

/// Whether it has been ready for so long.
#[must_use]
pub fn is_available(instance: &RoleInstance, least: Duration, now: Timestamp) -> bool {
    let since = instance.status.as_ref().and_then(|status| since(&status.conditions, READY));
    is_ready(instance)
        && (least.is_zero() || since.is_some_and(|since| crate::plan::add_duration(since, least) <= now))
}

/// Since when it is not ready.
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

/// The status: `pods` are those that live, `hash` and `name` the revision that they shall have.
#[must_use]
pub fn instance(
    instance: &RoleInstance,
    pods: &[&Pod],
    (name, hash): (&str, &str),
    now: Timestamp,
) -> RoleInstanceStatus {
    let mut status = instance.status.clone().unwrap_or_default();
    let (mut ready, mut updated) = (true, true);
    let mut components = Vec::new();
    for component in &instance.spec.components {
        let own = || {
            pods.iter().filter(|pod| pod_label(pod, keys::COMPONENT_NAME) == Some(component.name.as_str()))
        };
        let is_new = |pod: &Pod| pod_label(pod, keys::CONTROLLER_REVISION_HASH) == Some(hash);
        let count = |which: &dyn Fn(&Pod) -> bool| {
            i32::try_from(own().filter(|pod| which(pod)).count()).unwrap_or(i32::MAX)
        };
        let one = ComponentStatus {
            name: component.name.clone(),
            size: component.size(),
            ready_replicas: count(&|pod| pod_has(pod, "Ready")),
            available_replicas: count(&|pod| pod_has(pod, "Ready")),
            scheduled_replicas: count(&|pod| pod_has(pod, "PodScheduled")),
            updated_replicas: count(&is_new),
            updated_ready_replicas: count(&|pod| is_new(pod) && pod_has(pod, "Ready")),
        };
        ready &= one.ready_replicas >= one.size;
        updated &= one.updated_replicas >= one.size;
        components.push(one);
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
    let of_pods =
        if ready { ("PodsReady", "Ready") } else { ("AtLeastOnePodNotReady", "a pod is not ready") };
    set_condition(conditions, ALL_PODS_READY, ready, of_pods, now);
    let gated = instance.spec.readiness_gates.iter().any(|gate| gate.condition_type == IN_PLACE_UPDATE_READY);
    if gated {
        let text = if settled { ("Settled", "") } else { ("StartInPlaceUpdate", "pods are being updated") };
        set_condition(conditions, IN_PLACE_UPDATE_READY, settled, text, now);
    }
    let gates = instance.spec.readiness_gates.iter();
    let closed = gates.map(|gate| gate.condition_type.as_str()).find(|gate| !has(conditions, gate));
    let any = instance.spec.ready_policy.as_deref() == Some("None");
    let (is_ready, reason, message) = match closed {
        _ if !(ready || any) => (false, "PodsNotReady", "not all pods are ready"),
        _ if !updated => (false, "InplaceUpdateNotReady", "not all pods are of the instance's revision"),
        Some(_) => (false, "ReadinessGatesNotReady", "a readiness gate is closed"),
        None if pods.iter().any(|pod| crate::plan::is_pending(pod)) => {
            (false, "WaitingForHooks", "a pod is not back with all it had")
        }
        None => (true, "Ready", ""),
    };
    set_condition(conditions, READY, is_ready, (reason, message), now);
    status
}
