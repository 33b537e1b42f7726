//! Faults of an instance, recorded by its own plan before it removes the evidence.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use rbg_api::keys;
use rbg_api::v1alpha2::InstanceComponent;
use serde_json::json;

use super::NodeState;
use super::records::{InstanceFault, InstanceFaults, InstanceRecords, NodeRecord};
use super::recover::is_complete;
use super::rules::{FaultCondition, WatchedFaults};
use crate::ResourceKind;
use crate::plan::instance::InstanceInput;
use crate::plan::{ReconcilePlan, WriteAction, in_place, restart, revisions};
use crate::status::pod_has;
use crate::time::add_duration;

/// Maximum number of nodes to record: annotations of an object are limited to 256 KiB.
const MAX_NODES: usize = 500;

/// A sign of a fault. It has the same identity as long as it is there.
struct FaultEvidence<'a> {
    id: String,
    condition: FaultCondition,
    node: &'a str,
    text: String,
}

/// Records the instance's nodes and its faults, and the end of both a fault and an action.
pub(in crate::plan) fn observe(
    input: InstanceInput<'_>,
    revision: &revisions::RevisionRef,
    plan: &mut ReconcilePlan,
) {
    let metadata = &input.instance.metadata;
    let role = metadata.labels.as_ref().and_then(|labels| labels.get(keys::ROLE_NAME));
    let watched = input.faults.zip(role).and_then(|(rules, role)| rules.watched(role));
    let records = InstanceRecords::of(input.instance);
    let in_progress = records.in_progress();
    if watched.is_none() && in_progress.is_none() {
        return;
    }
    let watched = watched.unwrap_or_default();
    let before = &records.faults;
    let mut after = InstanceFaults { nodes: nodes(input, &watched, before), ..before.clone() };
    let evidence = evidence(input, &watched, revision, &after.nodes, plan);
    let ids: BTreeSet<String> = evidence.iter().map(|one| one.id.clone()).collect();
    after.seen.retain(|id| ids.contains(id));
    let open = before.latest.as_ref().filter(|_| !before.is_over).map(InstanceFault::condition);
    let is_new = |one: &&FaultEvidence<'_>| {
        let is_blocked = in_progress.is_some() || open.is_some_and(|open| one.condition <= open);
        // A lost node has a different cause than the fault or the action before it.
        !after.seen.contains(&one.id) && (!is_blocked || one.condition == FaultCondition::NodeLost)
    };
    let mut reason = "pods were scheduled to nodes".to_owned();
    if let Some(worst) = evidence.iter().filter(is_new).max_by_key(|one| one.condition) {
        let fault = record(worst, &records, &after.nodes, input.now);
        reason = format!("{}: {}", metadata.name.as_deref().unwrap_or_default(), fault.text);
        after.latest = Some(fault);
        after.is_over = false;
        after.seen = ids;
    } else if is_up(input) {
        let is_open = after.latest.is_some() && !after.is_over;
        let ended = in_progress.filter(|request| is_complete(input, request, revision));
        if is_open || ended.is_some() {
            after.is_over = after.latest.is_some();
            after.seen = ids;
            "the instance has recovered".clone_into(&mut reason);
        }
        if let Some(request) = ended {
            after.recovered = request.key();
        }
    }
    if after != *before {
        let text = serde_json::to_string(&after).unwrap_or_default();
        let body = json!({ "metadata": { "uid": metadata.uid, "annotations": { keys::FAULT: text } } });
        let name = metadata.name.clone().unwrap_or_default();
        plan.push(WriteAction::Patch { kind: ResourceKind::Instance, name, status: false, body }, reason);
    }
}

fn record(
    evidence: &FaultEvidence<'_>,
    records: &InstanceRecords,
    nodes: &BTreeMap<String, NodeRecord>,
    now: Timestamp,
) -> InstanceFault {
    let undealt = records.pending().map(|fault| fault.conditions.clone()).unwrap_or_default();
    let node = nodes.get(evidence.node);
    InstanceFault {
        id: evidence.id.clone(),
        conditions: undealt.into_iter().chain([evidence.condition]).collect(),
        node: evidence.node.to_owned(),
        domains: node.map(|node| node.domains.clone()).unwrap_or_default(),
        text: evidence.text.clone(),
        at: Time(now),
    }
}

/// Whether all pods of the instance exist and are ready.
pub(super) fn is_up(input: InstanceInput<'_>) -> bool {
    let wanted: i32 = input.instance.spec.components.iter().map(InstanceComponent::size).sum();
    let is_ready = |pod: &&Pod| pod.metadata.deletion_timestamp.is_none() && pod_has(pod, "Ready");
    i32::try_from(input.pods.iter().filter(is_ready).count()).is_ok_and(|ready| ready >= wanted)
}

pub(super) fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Nodes of the pods. A node that no longer exists stays as it was.
fn nodes(
    input: InstanceInput<'_>,
    watched: &WatchedFaults,
    before: &InstanceFaults,
) -> BTreeMap<String, NodeRecord> {
    if watched.labels.is_empty() && watched.node_lost_after.is_none() {
        return BTreeMap::new();
    }
    let names: BTreeSet<&str> = input.pods.iter().filter_map(node_of).collect();
    let record = |name: &str| match (input.node)(name) {
        NodeState::Present { uid, .. } => {
            let mut labels = (input.nodes)(name).unwrap_or_default();
            labels.retain(|label, _| watched.labels.contains(label));
            Some(NodeRecord { uid, domains: labels })
        }
        NodeState::Gone | NodeState::Unlisted => before.nodes.get(name).cloned(),
    };
    names.into_iter().filter_map(|name| Some((name.to_owned(), record(name)?))).take(MAX_NODES).collect()
}

fn evidence<'a>(
    input: InstanceInput<'a>,
    watched: &WatchedFaults,
    revision: &revisions::RevisionRef,
    nodes: &BTreeMap<String, NodeRecord>,
    plan: &mut ReconcilePlan,
) -> Vec<FaultEvidence<'a>> {
    let mut all = Vec::new();
    for pod in input.pods {
        if let (Some(node), Some(limit)) = (node_of(pod), watched.node_lost_after) {
            all.extend(lost_node(input, node, nodes, limit, plan));
        }
        // A pod that has never been in service is still starting.
        let was_in_service = condition(pod, "InPlaceUpdateReady").is_some();
        if !was_in_service || pod.metadata.deletion_timestamp.is_some() || restart::is_ignored(pod) {
            continue;
        }
        if restart::is_failed(pod) {
            all.push(failure(pod));
        } else if !in_place::is_updating(pod, revision) {
            all.extend(restarted(pod));
            all.extend(watched.unready_after.and_then(|limit| unready(pod, limit, input.now, plan)));
        }
    }
    all.retain(|one| watched.conditions.contains(&one.condition));
    all
}

/// Evidence of a node that is gone, or has not been ready for too long.
fn lost_node<'a>(
    input: InstanceInput<'_>,
    node: &'a str,
    nodes: &BTreeMap<String, NodeRecord>,
    limit: Duration,
    plan: &mut ReconcilePlan,
) -> Option<FaultEvidence<'a>> {
    let (id, text) = match (input.node)(node) {
        NodeState::Unlisted => return None,
        NodeState::Gone => {
            // A node that was never observed may be one that this operator may not read.
            let uid = &nodes.get(node)?.uid;
            (format!("node/{node}/{uid}"), format!("lost node {node}, which was deleted"))
        }
        NodeState::Present { uid, not_ready_since } => {
            let since = not_ready_since?;
            let due = add_duration(since, limit);
            if due > input.now {
                plan.schedule_requeue(due);
                return None;
            }
            let text = format!("lost node {node}, which has not been ready for {} s", limit.as_secs());
            (format!("node/{node}/{uid}/{}", since.as_second()), text)
        }
    };
    Some(FaultEvidence { id, condition: FaultCondition::NodeLost, node, text })
}

fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

fn on_node(pod: &Pod) -> String {
    node_of(pod).map(|node| format!(" on node {node}")).unwrap_or_default()
}

fn failure(pod: &Pod) -> FaultEvidence<'_> {
    let status = pod.status.as_ref();
    let reason = status.and_then(|status| status.reason.as_deref()).unwrap_or("its containers ended");
    FaultEvidence {
        id: format!("failed/{}", uid(pod)),
        condition: FaultCondition::Failed,
        node: node_of(pod).unwrap_or_default(),
        text: format!("failed{} (pod {}: {reason})", on_node(pod), name(pod)),
    }
}

/// Evidence of a container that exited and was restarted, other than by an update.
fn restarted(pod: &Pod) -> Option<FaultEvidence<'_>> {
    let statuses = pod.status.as_ref()?.container_statuses.as_deref()?;
    let container = statuses
        .iter()
        .find(|status| status.restart_count > in_place::expected_restarts(pod, &status.name))?;
    let restarts: i32 = statuses.iter().map(|status| status.restart_count).sum();
    let ended = container.last_state.as_ref().and_then(|state| state.terminated.as_ref());
    let reason = ended.and_then(|ended| ended.reason.as_deref()).map(|reason| format!(", {reason}"));
    let reason = reason.unwrap_or_default();
    Some(FaultEvidence {
        id: format!("restarted/{}/{restarts}", uid(pod)),
        condition: FaultCondition::Restarted,
        node: node_of(pod).unwrap_or_default(),
        text: format!("restarted{} (pod {}, container {}{reason})", on_node(pod), name(pod), container.name),
    })
}

fn condition<'a>(pod: &'a Pod, kind: &str) -> Option<&'a PodCondition> {
    pod.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == kind)
}

/// Evidence of a pod whose containers have not been ready for too long.
fn unready<'a>(
    pod: &'a Pod,
    limit: Duration,
    now: Timestamp,
    plan: &mut ReconcilePlan,
) -> Option<FaultEvidence<'a>> {
    let condition = condition(pod, "ContainersReady").filter(|condition| condition.status != "True")?;
    let since = condition.last_transition_time.as_ref()?.0;
    let due = add_duration(since, limit);
    if due > now {
        plan.schedule_requeue(due);
        return None;
    }
    Some(FaultEvidence {
        id: format!("unready/{}/{}", uid(pod), since.as_second()),
        condition: FaultCondition::Failed,
        node: node_of(pod).unwrap_or_default(),
        text: format!("failed{} (pod {}: not ready for {} s)", on_node(pod), name(pod), limit.as_secs()),
    })
}
