//! Actions that the faults of instances require from others, requested by the group's plan.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use rbg_api::keys;
use rbg_api::v1alpha2::{CoordinatedPolicySpec, FaultStatus, RoleBasedGroupStatus, RoleInstance};
use serde::Deserialize as _;
use serde_json::json;

use super::history::{condition, fault_status, push_fault};
use super::records::{ActionRequest, FaultActions, InstanceFault, InstanceRecords};
use super::replacement;
use super::rules::{FaultAction, FaultCondition, FaultRule, FaultRules, LinkScope};
use crate::ResourceKind;
use crate::plan::group::GroupInput;
use crate::plan::{PlanStep, ReconcilePlan, WriteAction};
use crate::status::{FAULT_RECOVERY, INVALID_POLICY, pod_label, set_condition};
use crate::time::add_duration;

/// An action that has not ended after this time does not delay the next one any longer.
const MAX_ACTION: Duration = Duration::from_secs(600);

/// Recovery of a group, for its status.
#[derive(Debug, Default)]
pub(in crate::plan) struct GroupRecovery {
    faults: Option<Vec<FaultStatus>>,
    /// Status, reason and message of the condition.
    condition: Option<(bool, &'static str, String)>,
}

impl GroupRecovery {
    pub(in crate::plan) fn apply(self, status: &mut RoleBasedGroupStatus, now: Timestamp) {
        if let Some(faults) = self.faults {
            status.faults = faults;
        }
        if let Some((is_true, reason, message)) = self.condition {
            set_condition(&mut status.conditions, FAULT_RECOVERY, is_true, (reason, &message), now);
        }
    }
}

/// An instance of the group with its records, as the steps of this plan will leave them.
pub(super) struct Member<'a> {
    pub(super) instance: &'a RoleInstance,
    pub(super) records: InstanceRecords,
}

impl Member<'_> {
    pub(super) fn name(&self) -> &str {
        self.instance.metadata.name.as_deref().unwrap_or_default()
    }

    fn label(&self, key: &str) -> Option<&str> {
        self.instance.metadata.labels.as_ref()?.get(key).map(String::as_str)
    }

    fn role(&self) -> &str {
        self.label(keys::ROLE_NAME).unwrap_or_default()
    }

    fn ordinal(&self) -> Option<&str> {
        self.label(keys::ROLE_INSTANCE_INDEX)
    }

    fn is_in_domain(&self, label: &str, domain: &str) -> bool {
        self.records
            .faults
            .nodes
            .values()
            .any(|node| node.domains.get(label).is_some_and(|own| own == domain))
    }

    pub(super) fn write(&self, actions: &FaultActions, reason: String, plan: &mut ReconcilePlan) {
        let text = serde_json::to_string(actions).unwrap_or_default();
        let body = json!({ "metadata": { "uid": self.instance.metadata.uid,
            "annotations": { keys::FAULT_ACTION: text } } });
        let name = self.name().to_owned();
        plan.push(WriteAction::Patch { kind: ResourceKind::Instance, name, status: false, body }, reason);
    }
}

/// The action that a step requests, for the metric.
pub(crate) fn requested_action(step: &PlanStep) -> Option<FaultAction> {
    let WriteAction::Patch { kind: ResourceKind::Instance, status: false, body, .. } = &step.action else {
        return None;
    };
    let text = body["metadata"]["annotations"].get(keys::FAULT_ACTION)?.as_str()?;
    let actions: FaultActions = serde_json::from_str(text).ok()?;
    let request = actions.request?;
    // Marking a fault as dealt with repeats the request.
    (request.reason == step.reason).then_some(request.action)
}

/// Requests the actions for faults that the group has not dealt with, and the next attempts of replacements.
pub(in crate::plan) fn coordinate(input: GroupInput<'_>, plan: &mut ReconcilePlan) -> GroupRecovery {
    let mut recovery = GroupRecovery::default();
    let name = input.group.metadata.name.as_deref().unwrap_or_default();
    let policy = (input.live)(ResourceKind::Policy, name);
    let policy = policy.and_then(|policy| CoordinatedPolicySpec::deserialize(&policy["spec"]).ok());
    let rules = match policy
        .map(|policy| FaultRules::for_group(&policy, input.group, Some(input.node_levels)))
        .transpose()
    {
        Ok(rules) => rules.unwrap_or_default(),
        Err(error) => {
            recovery.condition = Some((false, INVALID_POLICY, error.to_string()));
            return recovery;
        }
    };
    let before = input.group.status.clone().unwrap_or_default();
    if rules.is_empty() {
        if before.conditions.iter().any(|condition| condition.kind == FAULT_RECOVERY) {
            recovery.condition = Some((false, "NoPolicy", String::new()));
        }
        return recovery;
    }
    let instances = (input.instances)();
    let members = instances.iter().filter(|one| one.metadata.deletion_timestamp.is_none());
    let mut members: Vec<Member<'_>> =
        members.map(|instance| Member { instance, records: InstanceRecords::of(instance) }).collect();
    let mut faults = before.faults.clone();
    let mut pending: Vec<(Timestamp, String, usize)> = members
        .iter()
        .enumerate()
        .filter_map(|(index, member)| {
            let fault = member.records.pending()?;
            Some((fault.at.0, fault.id.clone(), index))
        })
        .collect();
    pending.sort();
    for (_, _, source) in pending {
        FaultHandling { input, rules: &rules, plan }.handle(source, &mut members, &mut faults);
    }
    replacement::next_attempts(input, &rules, &mut members, plan);
    let active = members.iter().filter_map(|member| member.records.in_progress());
    let active = active.map(|request| request.reason.as_str()).collect();
    recovery.condition = condition(active, &faults, &before, input.now);
    recovery.faults = Some(faults);
    recovery
}

struct FaultHandling<'a, 'p> {
    input: GroupInput<'a>,
    rules: &'a FaultRules,
    plan: &'p mut ReconcilePlan,
}

/// What one rule does about a fault.
struct RuleActions<'a> {
    rule: &'a FaultRule,
    /// Instances by index, with the action.
    targets: BTreeMap<usize, FaultAction>,
    /// Label of the domain in which the instances are replaced together.
    domain: Option<&'a str>,
}

impl FaultHandling<'_, '_> {
    /// Requests all actions for a fault, and then marks it as dealt with; or postpones all of them.
    fn handle(&mut self, source: usize, members: &mut [Member<'_>], faults: &mut Vec<FaultStatus>) {
        let Some(fault) = members[source].records.pending().cloned() else { return };
        let mut taken = BTreeSet::new();
        let mut all = Vec::new();
        for rule in &self.rules.0 {
            let mut actions = rule_actions(rule, &fault, source, members);
            actions.targets.retain(|target, _| taken.insert(*target));
            if !actions.targets.is_empty() {
                all.push(actions);
            }
        }
        let due = all.iter().filter_map(|actions| self.postponed_until(actions, &fault, members)).max();
        if let Some(due) = due {
            self.plan.schedule_requeue(due);
            return;
        }
        for actions in &all {
            self.request(actions, &fault, source, members, faults);
        }
        let mut after = members[source].records.actions.clone();
        after.handled.clone_from(&fault.id);
        let reason = format!("the fault of {} is dealt with", members[source].name());
        members[source].write(&after, reason, self.plan);
        members[source].records.actions = after;
    }

    /// When a target may be acted on again; `None` if all may be now.
    fn postponed_until(
        &self,
        actions: &RuleActions<'_>,
        fault: &InstanceFault,
        members: &[Member<'_>],
    ) -> Option<Timestamp> {
        let due = actions.targets.iter().filter_map(|(target, action)| {
            let records = &members[*target].records;
            let last = records.actions.request.as_ref()?;
            if records.actions.has_acted_on(&fault.id) {
                return None;
            }
            // A replacement of all pods includes what an action before it has not done yet.
            let is_busy = records.in_progress().is_some() && *action != FaultAction::Replace;
            Some(add_duration(last.at.0, if is_busy { MAX_ACTION } else { actions.rule.backoff }))
        });
        due.max().filter(|due| *due > self.input.now)
    }

    fn request(
        &mut self,
        actions: &RuleActions<'_>,
        fault: &InstanceFault,
        source: usize,
        members: &mut [Member<'_>],
        faults: &mut Vec<FaultStatus>,
    ) {
        let (rule, now) = (actions.rule, self.input.now);
        let recorded = faults.iter().find(|one| one.fault == fault.id && one.policy == rule.name).cloned();
        let status = recorded.unwrap_or_else(|| {
            let names = actions.targets.iter().map(|(target, action)| (*action, members[*target].name()));
            let status = fault_status(rule, fault, members[source].name(), names, faults, now);
            push_fault(faults, status.clone(), rule.max_per_hour);
            let name = self.input.group.metadata.name.clone().unwrap_or_default();
            let body = json!({ "status": { "faults": faults } });
            let action = WriteAction::Patch { kind: ResourceKind::Group, name, status: true, body };
            // Counted before the first action: an operator that takes over neither repeats nor omits it.
            self.plan.push(action, "a fault was recorded");
            status
        });
        if status.actions == 0 {
            return;
        }
        let lost_node = if fault.condition() == FaultCondition::NodeLost { fault.node.as_str() } else { "" };
        let placement = actions.domain.and_then(|label| {
            replacement::first_placement(self.input, label, fault.domains.get(label)?, lost_node)
        });
        let pods = (self.input.pods)();
        for (target, action) in &actions.targets {
            let member = &mut members[*target];
            if member.records.actions.has_acted_on(&fault.id) {
                continue;
            }
            let mut after = member.records.actions.clone();
            after.set_request(ActionRequest {
                fault: fault.id.clone(),
                attempt: 1,
                action: *action,
                policy: rule.name.clone(),
                reason: status.message.clone(),
                pods: pods_of(&pods, member.name()).filter_map(|pod| pod.metadata.uid.clone()).collect(),
                lost_node: lost_node.to_owned(),
                placement: placement.clone(),
                is_joint: placement.is_some(),
                at: Time(now),
            });
            member.write(&after, status.message.clone(), self.plan);
            member.records.actions = after;
        }
    }
}

pub(super) fn pods_of<'p>(pods: &'p [Pod], instance: &'p str) -> impl Iterator<Item = &'p Pod> {
    pods.iter().filter(move |pod| pod_label(pod, keys::ROLE_INSTANCE_NAME) == Some(instance))
}

/// Instances that a rule acts on. A replacement precedes links.
fn rule_actions<'a>(
    rule: &'a FaultRule,
    fault: &InstanceFault,
    source: usize,
    members: &[Member<'_>],
) -> RuleActions<'a> {
    let role = members[source].role();
    let mut actions = RuleActions { rule, targets: BTreeMap::new(), domain: None };
    let is_node_lost = fault.conditions.contains(&FaultCondition::NodeLost);
    let has_role = |role: &str| rule.roles.iter().any(|name| name == role);
    if let Some(label) = rule.replacement.as_deref().filter(|_| is_node_lost && has_role(role)) {
        let is_concerned = |member: &Member<'_>| {
            let is_in_domain =
                fault.domains.get(label).is_some_and(|domain| member.is_in_domain(label, domain));
            is_in_domain || member.records.faults.nodes.contains_key(&fault.node)
        };
        let concerned =
            members.iter().enumerate().filter(|(_, one)| has_role(one.role()) && is_concerned(one));
        actions.targets = concerned.map(|(index, _)| (index, FaultAction::Replace)).collect();
        actions.domain = Some(label);
    }
    let source = &members[source];
    for link in
        rule.links.iter().filter(|link| link.role == role && !link.conditions.is_disjoint(&fault.conditions))
    {
        for (index, member) in members.iter().enumerate() {
            let Some((_, action)) = link.then.iter().find(|(target, _)| target == member.role()) else {
                continue;
            };
            let is_associated = match &link.scope {
                LinkScope::Group => true,
                LinkScope::Ordinal => member.ordinal().is_some() && member.ordinal() == source.ordinal(),
                LinkScope::Domain(label) => {
                    fault.domains.get(label).is_some_and(|domain| member.is_in_domain(label, domain))
                }
            };
            if is_associated {
                let entry = actions.targets.entry(index).or_insert(*action);
                *entry = (*entry).max(*action);
            }
        }
    }
    actions
}
