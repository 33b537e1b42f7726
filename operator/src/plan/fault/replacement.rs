//! Replacement of all instances in a domain: first in the same domain, then together in another one, and in the end anywhere.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use rbg_api::keys;

use super::NodeState;
use super::coordinate::{Member, pods_of};
use super::observe::node_of;
use super::records::{ActionRequest, ReplacementPlacement};
use super::rules::FaultRules;
use crate::plan::ReconcilePlan;
use crate::plan::group::GroupInput;
use crate::status::pod_label;
use crate::time::add_duration;

/// Attempts that require one domain for all instances.
const MAX_ATTEMPTS: u32 = 4;

/// Where the instances of a lost node's domain are placed: in it, if another of its nodes is ready.
pub(super) fn first_placement(
    input: GroupInput<'_>,
    label: &str,
    domain: &str,
    lost_node: &str,
) -> Option<ReplacementPlacement> {
    let is_ready = |name: &String| {
        matches!((input.node)(name), NodeState::Present { not_ready_since: None, .. })
            && (input.nodes)(name).is_some_and(|labels| labels.get(label).is_some_and(|own| own == domain))
    };
    let has_other = (input.node_names)().iter().any(|name| name != lost_node && is_ready(name));
    let (label, domains) = (label.to_owned(), vec![domain.to_owned()]);
    Some(ReplacementPlacement { label, domains, are_excluded: !has_other })
}

/// Starts the next attempt of replacements whose pods have been unschedulable for too long.
pub(super) fn next_attempts(
    input: GroupInput<'_>,
    rules: &FaultRules,
    members: &mut [Member<'_>],
    plan: &mut ReconcilePlan,
) {
    let mut by_fault: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (index, member) in members.iter().enumerate() {
        if let Some(request) = joint_request(member) {
            by_fault.entry(request.fault.clone()).or_default().push(index);
        }
    }
    // An instance that is up already moves with the others.
    by_fault.retain(|_, indices| indices.iter().any(|index| members[*index].records.in_progress().is_some()));
    if by_fault.is_empty() {
        return;
    }
    let pods = (input.pods)();
    for indices in by_fault.values() {
        let requests = indices.iter().filter_map(|index| joint_request(&members[*index]));
        let Some(newest) = requests.max_by_key(|request| request.attempt).cloned() else { continue };
        let is_behind = |index: &usize| {
            joint_request(&members[*index]).is_some_and(|request| request.attempt < newest.attempt)
        };
        // An operator was stopped while it started the attempt.
        let behind: Vec<usize> = indices.iter().copied().filter(|index| is_behind(index)).collect();
        if !behind.is_empty() {
            begin(&newest, &behind, &pods, members, plan);
            continue;
        }
        let joint: Vec<&Pod> = indices.iter().flat_map(|index| new_pods(&members[*index], &pods)).collect();
        let timeout =
            rules.0.iter().find(|rule| rule.name == newest.policy).map(|rule| rule.placement_timeout);
        let since = joint.iter().filter_map(|pod| unschedulable_since(pod)).min();
        let (Some(timeout), Some(since), Some(placement)) = (timeout, since, &newest.placement) else {
            plan.schedule_requeue(add_duration(input.now, POLL));
            continue;
        };
        let due = add_duration(since, timeout);
        if due > input.now {
            plan.schedule_requeue(due);
            continue;
        }
        let attempt = newest.attempt.saturating_add(1);
        let tried = joint.iter().filter_map(|pod| (input.nodes)(node_of(pod)?)?.remove(&placement.label));
        let tried: BTreeSet<String> = placement.domains.iter().cloned().chain(tried).collect();
        let domains = tried.into_iter().collect();
        let placement = ReplacementPlacement { domains, are_excluded: true, ..placement.clone() };
        let placement = (attempt <= MAX_ATTEMPTS).then_some(placement);
        let next = ActionRequest { attempt, placement, at: Time(input.now), ..newest };
        begin(&next, indices, &pods, members, plan);
    }
}

/// Interval between checks whether pods are unschedulable, which triggers no plan of their group.
const POLL: std::time::Duration = std::time::Duration::from_secs(5);

fn begin(
    request: &ActionRequest,
    indices: &[usize],
    pods: &[Pod],
    members: &mut [Member<'_>],
    plan: &mut ReconcilePlan,
) {
    for index in indices {
        let member = &mut members[*index];
        let uids = pods_of(pods, member.name()).filter_map(|pod| pod.metadata.uid.clone());
        let mut after = member.records.actions.clone();
        after.set_request(ActionRequest { pods: uids.collect(), ..request.clone() });
        let reason = format!("{}: attempt {} of its placement", member.name(), request.attempt);
        member.write(&after, reason, plan);
        member.records.actions = after;
    }
}

/// The member's part in a replacement of several instances, also if it has ended.
fn joint_request<'m>(member: &'m Member<'_>) -> Option<&'m ActionRequest> {
    member.records.actions.request.as_ref().filter(|request| request.is_joint)
}

/// Pods that the present attempt has created: those that it has yet to delete say nothing about it.
fn new_pods<'p>(member: &Member<'_>, pods: &'p [Pod]) -> Vec<&'p Pod> {
    let request = joint_request(member);
    let is_old = |pod: &Pod| {
        let uid = pod.metadata.uid.as_ref();
        uid.zip(request).is_some_and(|(uid, request)| request.pods.contains(uid))
    };
    pods.iter()
        .filter(|pod| pod_label(pod, keys::ROLE_INSTANCE_NAME) == Some(member.name()) && !is_old(pod))
        .collect()
}

fn unschedulable_since(pod: &Pod) -> Option<Timestamp> {
    let mut conditions = pod.status.as_ref()?.conditions.as_ref()?.iter();
    let condition =
        conditions.find(|condition| condition.type_ == "PodScheduled" && condition.status == "False")?;
    (pod.metadata.deletion_timestamp.is_none())
        .then_some(condition.last_transition_time.as_ref())?
        .map(|time| time.0)
}
