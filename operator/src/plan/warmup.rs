//! Plans a warmup: one successful pod on each target node.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::jiff::Timestamp;
use moongate_render::warmup as render;
use moongate_runtime::BackoffPolicy;
use rbg_api::keys;
use rbg_api::v1alpha2::{RoleBasedGroupWarmup, WarmupActions, WarmupPolicies};

use super::{PlanError, ReconcilePlan, WriteAction};
use crate::ResourceKind;
use crate::status::{self, ObservedWarmup, pod_label};
use crate::time::add_duration;

/// Pauses between attempts on a node.
const RETRY: BackoffPolicy = BackoffPolicy { initial: Duration::from_secs(1), max: Duration::from_secs(300) };
/// Failed pods of a node to keep if attempts are not limited.
const MAX_RETAINED_PODS: usize = 10;
/// Waiting reasons of a container whose image is on the node but cannot be run, for example because it has no shell.
const NOT_STARTED: [&str; 3] = ["CreateContainerConfigError", "CreateContainerError", "RunContainerError"];

#[derive(Clone, Copy)]
pub struct WarmupInput<'a> {
    pub warmup: &'a RoleBasedGroupWarmup,
    pub pods: &'a [Pod],
    /// Labels of all nodes, by node name.
    pub nodes: &'a BTreeMap<String, BTreeMap<String, String>>,
    /// Pods of the group that the warmup targets; `None` if the group does not exist.
    pub group: Option<&'a [Pod]>,
    pub now: Timestamp,
}

enum NodeWarmupProgress<'a> {
    /// A pod has to be created, not before this time. The last failed pod, if any.
    Due(Timestamp, Option<&'a Pod>),
    Active,
    Succeeded,
    Failed,
}

/// Plans one RoleBasedGroupWarmup.
///
/// # Errors
/// [`PlanError`].
pub fn warmup(input: WarmupInput<'_>) -> Result<ReconcilePlan, PlanError> {
    let mut plan = ReconcilePlan::default();
    let warmup = input.warmup;
    if warmup.metadata.deletion_timestamp.is_some() {
        return Ok(plan);
    }
    if warmup.status.as_ref().is_some_and(status::is_warmup_over) {
        clean_up(input, &mut plan);
        return Ok(plan);
    }
    let targets = targets(input);
    let targets = targets.as_ref();
    let progress: BTreeMap<&str, NodeWarmupProgress<'_>> =
        targets.into_iter().flatten().map(|(node, _)| (*node, progress(input, node))).collect();
    let count =
        |which: fn(&NodeWarmupProgress<'_>) -> bool| progress.values().filter(|status| which(status)).count();
    let missing = warmup.spec.target_role_based_group.as_ref().filter(|_| targets.is_none());
    let facts = ObservedWarmup {
        desired: progress.len(),
        active: count(|status| matches!(status, NodeWarmupProgress::Active)),
        succeeded: count(|status| matches!(status, NodeWarmupProgress::Succeeded)),
        failed: count(|status| matches!(status, NodeWarmupProgress::Failed)),
        has_started: !input.pods.is_empty(),
        target_error: missing.map(|target| format!("there is no group `{}`", target.name)),
        conflict: targets.into_iter().flatten().find_map(|(_, actions)| render::conflict(actions)),
    };
    let after = status::warmup(warmup, &facts, input.now);
    if !status::is_warmup_over(&after) {
        if let Some(targets) = targets.filter(|_| !warmup.spec.paused) {
            start(input, targets, &progress, &mut plan)?;
        }
        prune_failed_pods(input, &mut plan);
        if let Some((at, _)) = status::deadline(&policies(warmup), &after).filter(|(at, _)| *at > input.now) {
            plan.schedule_requeue(at);
        }
    }
    plan.status(ResourceKind::Warmup, name(warmup), warmup.status.as_ref(), &after);
    Ok(plan)
}

fn name(warmup: &RoleBasedGroupWarmup) -> &str {
    warmup.metadata.name.as_deref().unwrap_or_default()
}

fn policies(warmup: &RoleBasedGroupWarmup) -> WarmupPolicies {
    warmup.spec.policies.clone().unwrap_or_default()
}

/// Target nodes with their actions. `None` if the target group does not exist.
fn targets(input: WarmupInput<'_>) -> Option<BTreeMap<&str, Vec<WarmupActions>>> {
    let spec = &input.warmup.spec;
    let mut targets: BTreeMap<&str, Vec<WarmupActions>> = BTreeMap::new();
    if let Some(target) = &spec.target_nodes {
        let is_chosen = |labels: &BTreeMap<String, String>| {
            !target.node_selector.is_empty()
                && target.node_selector.iter().all(|(key, value)| labels.get(key) == Some(value))
        };
        let chosen = input.nodes.iter().filter(|(_, labels)| is_chosen(labels)).map(|(node, _)| node);
        for node in chosen.chain(&target.node_names) {
            targets.insert(node, vec![target.actions()]);
        }
    }
    if let Some(target) = &spec.target_role_based_group {
        let pods = input.group?;
        for (role, actions) in &target.roles {
            let node_pods = pods.iter().filter(|pod| {
                pod.metadata.deletion_timestamp.is_none()
                    && pod_label(pod, keys::ROLE_NAME) == Some(role.as_str())
            });
            for node in node_pods.filter_map(|pod| pod.spec.as_ref()?.node_name.as_deref()) {
                let of_node = targets.entry(node).or_default();
                if !of_node.contains(actions) {
                    of_node.push(actions.clone());
                }
            }
        }
    }
    Some(targets)
}

fn progress<'a>(input: WarmupInput<'a>, node: &str) -> NodeWarmupProgress<'a> {
    let node_pods = pods_of(input, node);
    if node_pods.iter().any(|pod| is_done(pod)) {
        return NodeWarmupProgress::Succeeded;
    }
    if !node_pods.iter().all(|pod| phase(pod) == "Failed") {
        return NodeWarmupProgress::Active;
    }
    let limit = policies(input.warmup).backoff_limit_per_node;
    if limit.and_then(|limit| usize::try_from(limit).ok()).is_some_and(|limit| node_pods.len() > limit) {
        return NodeWarmupProgress::Failed;
    }
    let last = node_pods.iter().max_by_key(|pod| (ended_at(pod), &pod.metadata.name)).copied();
    let due = last.map(|last| {
        let pause = RETRY.pause(u32::try_from(node_pods.len()).unwrap_or(u32::MAX));
        add_duration(ended_at(last).unwrap_or(input.now), pause)
    });
    NodeWarmupProgress::Due(due.unwrap_or(input.now), last)
}

fn pods_of<'a>(input: WarmupInput<'a>, node: &str) -> Vec<&'a Pod> {
    let label = render::node_label(node);
    input.pods.iter().filter(|pod| pod_label(pod, keys::WARMUP_NODE) == Some(label.as_str())).collect()
}

fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

fn has_ended(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
}

fn statuses(pod: &Pod) -> impl Iterator<Item = &ContainerStatus> {
    pod.status.iter().filter_map(|status| status.container_statuses.as_ref()).flatten()
}

/// End of the pod's last container; the pod's creation if none has ended.
fn ended_at(pod: &Pod) -> Option<Timestamp> {
    let completion =
        statuses(pod).filter_map(|status| status.state.as_ref()?.terminated.as_ref()?.finished_at.as_ref());
    completion.chain(pod.metadata.creation_timestamp.as_ref()).map(|time| time.0).max()
}

/// Whether all actions of the pod are done. Images are also pulled if their containers cannot start for lack of a shell;
/// such a pod would hang or fail.
pub(super) fn is_done(pod: &Pod) -> bool {
    if phase(pod) == "Succeeded" {
        return true;
    }
    let containers = pod.spec.as_ref().map_or(0, |spec| spec.containers.len());
    let (done, stuck) = statuses(pod).fold((0, false), |(done, stuck), status| match outcome(status) {
        Some(is_stuck) => (done + 1, stuck || is_stuck),
        None => (done, stuck),
    });
    containers > 0 && done >= containers && (stuck || phase(pod) == "Failed")
}

/// `Some` if the container's action is done; `true` if the container hangs nevertheless.
fn outcome(status: &ContainerStatus) -> Option<bool> {
    let state = status.state.as_ref()?;
    let is_preload = status.name.starts_with(render::PRELOAD);
    if let Some(ended) = &state.terminated {
        let never_ran = matches!(ended.reason.as_deref(), Some("StartError" | "ContainerCannotRun"));
        let is_present = is_preload && (never_ran || !status.image_id.is_empty());
        return (ended.exit_code == 0 || is_present).then_some(false);
    }
    let reason = state.waiting.as_ref()?.reason.as_deref()?;
    (is_preload && NOT_STARTED.contains(&reason)).then_some(true)
}

/// Creates pods on nodes that are due, up to the parallelism.
fn start(
    input: WarmupInput<'_>,
    targets: &BTreeMap<&str, Vec<WarmupActions>>,
    progress: &BTreeMap<&str, NodeWarmupProgress<'_>>,
    plan: &mut ReconcilePlan,
) -> Result<(), PlanError> {
    let active = input.pods.iter().filter(|pod| !has_ended(pod) && !is_done(pod)).count();
    let parallelism = policies(input.warmup).parallelism.and_then(|limit| usize::try_from(limit).ok());
    let mut capacity = parallelism.unwrap_or(usize::MAX).saturating_sub(active);
    for (node, actions) in targets {
        let Some(NodeWarmupProgress::Due(due, failed)) = progress.get(node) else { continue };
        if *due > input.now {
            plan.schedule_requeue(*due);
            continue;
        }
        if capacity == 0 {
            continue;
        }
        capacity -= 1;
        let hostname = input.nodes.get(*node).and_then(|labels| labels.get(keys::HOSTNAME));
        let hostname = hostname.map_or(*node, String::as_str);
        let last = failed.and_then(|pod| pod.metadata.uid.as_deref()).unwrap_or_default();
        let manifest = render::pod(input.warmup, (node, hostname), last, actions)?;
        let reason = format!("{} warms up the node {node}", manifest.name());
        plan.push(WriteAction::Create(manifest), reason);
    }
    Ok(())
}

/// Limits the number of failed pods if attempts are not limited.
fn prune_failed_pods(input: WarmupInput<'_>, plan: &mut ReconcilePlan) {
    if policies(input.warmup).backoff_limit_per_node.is_some() {
        return;
    }
    let mut failed: BTreeMap<&str, Vec<&Pod>> = BTreeMap::new();
    for pod in input.pods.iter().filter(|pod| phase(pod) == "Failed" && !is_terminating(pod)) {
        failed.entry(pod_label(pod, keys::WARMUP_NODE).unwrap_or_default()).or_default().push(pod);
    }
    for mut pods in failed.into_values() {
        pods.sort_by_key(|pod| ended_at(pod));
        for old in pods.iter().rev().skip(MAX_RETAINED_PODS) {
            plan.push(delete_pod(old), "later attempts on this node have failed, too");
        }
    }
}

pub(super) fn delete_pod(pod: &Pod) -> WriteAction {
    WriteAction::Delete {
        kind: ResourceKind::WarmupPod,
        name: pod.metadata.name.clone().unwrap_or_default(),
        uid: pod.metadata.uid.clone().unwrap_or_default(),
    }
}

fn is_terminating(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// Cleans up a finished warmup: deletes running pods, and the warmup itself after its TTL.
fn clean_up(input: WarmupInput<'_>, plan: &mut ReconcilePlan) {
    for pod in input.pods.iter().filter(|pod| !has_ended(pod) && !is_terminating(pod)) {
        plan.push(delete_pod(pod), "the warmup is over");
    }
    let completion = input.warmup.status.as_ref().and_then(|status| status.completion_time.as_ref());
    let Some((seconds, ended)) = policies(input.warmup).ttl_seconds_after_finished.zip(completion) else {
        return;
    };
    let due = add_duration(ended.0, Duration::from_secs(u64::try_from(seconds).unwrap_or(0)));
    if due > input.now {
        plan.schedule_requeue(due);
        return;
    }
    let action = WriteAction::Delete {
        kind: ResourceKind::Warmup,
        name: name(input.warmup).to_owned(),
        uid: input.warmup.metadata.uid.clone().unwrap_or_default(),
    };
    plan.push(action, format!("it finished {seconds} s ago"));
}

#[cfg(test)]
mod tests;
