//! Plans a RoleInstance: its revision, its pods at that revision, and their readiness gates.

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use moongate_render::revision::SpecRevision;
use moongate_render::{OwnerRef, SizeLimits, pod, pod_name};
use rbg_api::keys;
use rbg_api::v1alpha2::{InstanceComponent, RoleInstance};
use serde_json::{Value, json};

use super::component_order::{self, ComponentOrder};
use super::fault::RecoveryProgress;
use super::{
    FaultRules, NodeLabelLookup, NodeStateLookup, PlanError, ReconcilePlan, WriteAction, fault, gang, hooks,
    in_place, lifecycle, node_affinity, pod_locations, ports, pre_pull, restart, revisions,
};
use crate::ResourceKind;
use crate::resource_cache::PortTable;
use crate::status::{self, pod_has, pod_label};
use crate::upgrade_hook::{HookCall, HookResult};

/// Number of unused revisions of an instance to keep.
const REVISION_LIMIT: usize = 5;

#[derive(Clone, Copy)]
pub struct InstanceInput<'a> {
    pub instance: &'a RoleInstance,
    /// Stored revisions of the instance.
    pub revisions: &'a [ControllerRevision],
    pub pods: &'a [Pod],
    /// Pods that pull images for the instance's pods.
    pub pulls: &'a [Pod],
    pub limits: SizeLimits,
    /// Ports in use in the whole cluster.
    pub ports: &'a PortTable,
    /// Last response of a pod's hook.
    pub hook_result: &'a dyn Fn(&HookCall) -> Option<HookResult>,
    /// Labels of the nodes that the pods run on.
    pub nodes: NodeLabelLookup<'a>,
    pub node: NodeStateLookup<'a>,
    /// Fault recovery of the group's policy, if it is valid.
    pub faults: Option<&'a FaultRules>,
    pub now: Timestamp,
}

/// Plans one RoleInstance.
///
/// # Errors
/// [`PlanError`].
pub fn instance(input: InstanceInput<'_>) -> Result<ReconcilePlan, PlanError> {
    let mut plan = ReconcilePlan::default();
    let live = input.instance;
    if live.metadata.deletion_timestamp.is_some() {
        return Ok(plan);
    }
    input.limits.check_instance(&live.spec.components)?;
    if ports::allocate_instance_ports(input, &mut plan)? {
        return Ok(plan);
    }
    node_affinity::record_instance_nodes(input, &mut plan);
    let revision = find_revision(input, &mut plan)?;
    let pods: Vec<&Pod> = input.pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect();
    fault::observe(input, &revision, &mut plan);
    let recovery = fault::recover(input, &revision, &mut plan);
    if recovery == RecoveryProgress::Acting {
        return Ok(plan);
    }
    // An instance that will be deleted gets no new pods.
    let is_leaving = lifecycle::is_draining(live);
    if !is_leaving {
        match restart::plan(input, &pods, &revision, &mut plan) {
            restart::RestartDecision::RestartNow => return Ok(plan),
            restart::RestartDecision::RestartLater => {}
            restart::RestartDecision::NoRestart => replace_failed(&pods, &mut plan),
        }
    }
    let pull = pre_pull::PrePullStage::of(input, &pods, &revision)?;
    let scaled = !is_leaving && scale(input, &pods, &revision, &mut plan)?;
    let is_held_back = pull.delays_update(input, &mut plan)?;
    let is_draining = is_leaving && in_place::drain(input, &pods, &mut plan);
    let is_recovering = recovery == RecoveryProgress::Draining;
    if !scaled && !is_held_back && !is_leaving && !is_recovering {
        update(input, &pods, &revision, &mut plan);
    }
    if !is_recovering {
        patch_readiness_gates(input, &pods, (&revision, is_held_back), &mut plan);
    }
    hooks::poll_settling(input, &pods, &mut plan);
    let in_use: Vec<&str> =
        input.pods.iter().filter_map(|pod| pod_label(pod, keys::CONTROLLER_REVISION_HASH)).collect();
    let is_used =
        |name: &str| name == revision.name || in_use.contains(&name.rsplit('-').next().unwrap_or_default());
    revisions::prune(input.revisions, is_used, REVISION_LIMIT, &mut plan);
    let waits_for_hooks = pods.iter().any(|pod| hooks::is_pending(pod));
    let revision_name = (revision.name.as_str(), revision.hash.as_str());
    let mut after = status::instance(live, &pods, revision_name, waits_for_hooks, input.now);
    restart::settle(&mut after, input.now);
    hooks::set_hook_conditions(input, &pods, &mut after.conditions);
    pull.set_conditions(input, &mut after);
    status::aggregate_stalled(&mut after.conditions, std::iter::empty(), input.now);
    fault::set_recovery_condition(input, &mut after.conditions);
    after.conditions.retain(|condition| {
        condition.kind != lifecycle::DRAINED || is_leaving && lifecycle::is_of_this_drain(live, condition)
    });
    if is_leaving {
        let warnings = hooks::drain_warnings(input, &pods).join("; ");
        let text =
            if is_draining { ("Draining", "pods are at work") } else { ("Drained", warnings.as_str()) };
        status::set_condition(&mut after.conditions, lifecycle::DRAINED, !is_draining, text, input.now);
    }
    plan.status(ResourceKind::Instance, name(live), live.status.as_ref(), &after);
    Ok(plan)
}

pub(super) fn name(instance: &RoleInstance) -> &str {
    instance.metadata.name.as_deref().unwrap_or_default()
}

fn find_revision(
    input: InstanceInput<'_>,
    plan: &mut ReconcilePlan,
) -> Result<revisions::RevisionRef, PlanError> {
    let live = input.instance;
    let namespace = live.metadata.namespace.as_deref().ok_or(PlanError::NoMetadata("namespace"))?;
    let reference = OwnerRef {
        api_version: ResourceKind::Instance.api_version().to_owned(),
        kind: ResourceKind::Instance.name().to_owned(),
        name: name(live).to_owned(),
        uid: live.metadata.uid.clone().unwrap_or_default(),
        controller: true,
    };
    let labels = [(keys::ROLE_INSTANCE_NAME.to_owned(), name(live).to_owned())].into();
    let owner = revisions::RevisionOwner { namespace, labels, reference };
    let make = |collisions| SpecRevision::for_instance(name(live), &live.spec.components, collisions);
    Ok(revisions::find_or_make(make, input.revisions, owner, plan))
}

pub(super) fn delete(pod: &Pod) -> WriteAction {
    WriteAction::Delete {
        kind: ResourceKind::Pod,
        name: pod.metadata.name.clone().unwrap_or_default(),
        uid: pod.metadata.uid.clone().unwrap_or_default(),
    }
}

fn replace_failed(pods: &[&Pod], plan: &mut ReconcilePlan) {
    for pod in pods.iter().filter(|pod| restart::is_failed(pod)) {
        plan.push(delete(pod), "the pod has failed");
    }
}

/// Creates missing pods and deletes surplus ones. Returns whether there was anything to do.
fn scale(
    input: InstanceInput<'_>,
    pods: &[&Pod],
    revision: &revisions::RevisionRef,
    plan: &mut ReconcilePlan,
) -> Result<bool, PlanError> {
    let live = input.instance;
    let before = plan.steps.len();
    let order = ComponentOrder::for_instance(live)?;
    for pod in pods {
        let component = component_of(live, pod);
        // A terminating pod still counts, so pass all pods.
        let may_delete = |one| !component_order::is_wanted(pod, one) && order.may_delete(one, input.pods);
        if component.is_none_or(may_delete) {
            plan.push(delete(pod), "the instance has no such pod");
        }
    }
    let gang = gang::is_gang(live);
    let may_start = |component: &&InstanceComponent| {
        gang::is_scheduled_together(live, component) || order.may_start(component, pods)
    };
    let (mut missing, mut reasons) = (Vec::new(), Vec::new());
    for component in live.spec.components.iter().filter(may_start) {
        for id in 0..component.size() {
            let name = pod_name(live, &component.name, id);
            // A terminating pod still has the name.
            if let Some(pod) = input.pods.iter().find(|pod| pod.metadata.name.as_ref() == Some(&name)) {
                if gang && pod.metadata.deletion_timestamp.is_some() {
                    return Ok(true);
                }
                continue;
            }
            let mut placement = node_affinity::placement(live, component, &name);
            fault::placement(live, &mut placement);
            missing.push(pod::pod(live, component, id, &revision.hash, &placement)?);
            reasons.push(format!("pod {name} is missing"));
        }
    }
    gang::join_kueue_group(input, pods, &mut missing);
    for (pod, reason) in missing.into_iter().zip(reasons) {
        plan.push(WriteAction::Create(pod), reason);
    }
    Ok(plan.steps.len() > before)
}

pub(super) fn component_of<'a>(instance: &'a RoleInstance, pod: &Pod) -> Option<&'a InstanceComponent> {
    let name = pod_label(pod, keys::COMPONENT_NAME)?;
    instance.spec.components.iter().find(|component| component.name == name)
}

fn update(
    input: InstanceInput<'_>,
    pods: &[&Pod],
    revision: &revisions::RevisionRef,
    plan: &mut ReconcilePlan,
) {
    let has_revision =
        |pod: &Pod| pod_label(pod, keys::CONTROLLER_REVISION_HASH) == Some(revision.hash.as_str());
    let mut old = pods.iter().filter(|pod| !has_revision(pod));
    if gang::is_gang(input.instance) && old.any(|pod| !in_place::is_possible(input, pod)) {
        in_place::recreate(input, pods, |_| "all pods of a gang are recreated together".to_owned(), plan);
        return;
    }
    let is_held_back = hooks::poll_draining(input, pods, revision, plan);
    for pod in pods {
        if has_revision(pod) {
            in_place::continue_update(input, pod, revision, is_held_back, plan);
        } else {
            in_place::begin(input, pod, revision, plan);
        }
    }
}

/// The `Ready` condition that the kubelet will derive from these gates. Writing it together with the gates saves a round
/// trip.
fn readiness(pod: &Pod, gates: &[Value], now: Timestamp) -> Option<Value> {
    let gate_state =
        |kind: &str| gates.iter().find(|gate| gate["type"] == kind).map(|gate| gate["status"] == "True");
    let pod_gates = pod.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
    let mut pod_gates = pod_gates.map(|gate| gate.condition_type.as_str());
    let is_open = |gate: &str| gate_state(gate).unwrap_or_else(|| pod_has(pod, gate));
    let ready = pod_has(pod, "ContainersReady") && pod_gates.all(is_open);
    let is_other = !gates.is_empty() && ready != pod_has(pod, "Ready");
    let text = if ready { ("", "") } else { ("ReadinessGatesNotReady", "the instance is not in service") };
    is_other.then(|| in_place::condition("Ready", ready, text.0, text.1, now))
}

/// Opens and closes the readiness gates of the pods: an instance serves only while all its pods are up. Pods whose update
/// is held back count as
/// up.
fn patch_readiness_gates(
    input: InstanceInput<'_>,
    pods: &[&Pod],
    (revision, is_held_back): (&revisions::RevisionRef, bool),
    plan: &mut ReconcilePlan,
) {
    let has_started = |pod: &Pod| !(is_held_back && pod_has(pod, "InPlaceUpdateReady"));
    let is_up = |pod: &Pod| {
        pod_has(pod, "ContainersReady")
            && !(in_place::is_updating(pod, revision) && has_started(pod))
            && !restart::is_failed(pod)
    };
    let wanted: i32 = input.instance.spec.components.iter().map(InstanceComponent::size).sum();
    let complete = i32::try_from(pods.len()).is_ok_and(|count| count >= wanted);
    let may_serve = !lifecycle::is_marked(input.instance) && !lifecycle::is_draining(input.instance);
    let all_up = complete && may_serve && pods.iter().all(|pod| is_up(pod));
    for pod in pods {
        let settled = pod_has(pod, "InPlaceUpdateReady");
        let serving = pod_has(pod, "InstancePodReady");
        let mut conditions = Vec::new();
        if !settled && is_up(pod) && all_up {
            conditions.push(in_place::condition("InPlaceUpdateReady", true, "", "", input.now));
        }
        if serving != all_up && (serving || settled || is_up(pod)) {
            // The text is what Kruise's lifecycle readers expect.
            let closed = r#"[{"userAgent":"Lifecycle","key":"InstanceReady"}]"#;
            let message = if all_up { "[]" } else { closed };
            if all_up || serving {
                conditions.push(in_place::condition("InstancePodReady", all_up, "", message, input.now));
            }
        }
        conditions.extend(readiness(pod, &conditions, input.now));
        let is_patched = |step: &super::PlanStep| {
            matches!(&step.action, WriteAction::Patch { kind: ResourceKind::Pod, name, status: true, .. }
                if pod.metadata.name.as_ref() == Some(name))
        };
        if plan.steps.iter().any(is_patched) {
            continue;
        }
        let topology = pod_locations::topology_annotations(input, pod);
        let name = pod.metadata.name.clone().unwrap_or_default();
        let mut body = json!({ "metadata": { "uid": pod.metadata.uid, "annotations": topology } });
        if !conditions.is_empty() {
            let is_ready =
                |gate_state: &Value| gate_state["type"] == "Ready" && gate_state["status"] == "True";
            if let Some(version) = &pod.metadata.resource_version
                && conditions.iter().any(is_ready)
            {
                // Fails if the pod has changed, for example crashed, since it was read.
                body["metadata"]["resourceVersion"] = version.as_str().into();
            }
            body["status"] = json!({ "conditions": conditions });
            let reason =
                if all_up { "all pods of the instance are up" } else { "a pod of the instance is down" };
            plan.push(WriteAction::Patch { kind: ResourceKind::Pod, name, status: true, body }, reason);
        } else if serving && !topology.is_empty() {
            plan.push(
                WriteAction::Patch { kind: ResourceKind::Pod, name, status: false, body },
                "the pod's topology annotations are missing",
            );
        }
    }
}
