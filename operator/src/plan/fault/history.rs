//! Faults in the status of a group: the budget of rules, and what users read.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use rbg_api::v1alpha2::{FaultStatus, RoleBasedGroupStatus};

use super::records::InstanceFault;
use super::rules::{FaultAction, FaultRule};
use crate::status::{FAULT_BUDGET_EXHAUSTED, FAULT_RECOVERY, INSTANCE_FAULT};
use crate::time::add_duration;

/// The period of `maxPerHour`.
const HOUR: Duration = Duration::from_secs(3600);
/// Number of instances to name in a message.
const MAX_NAMES: usize = 5;
/// Number of faults to name in the group's condition.
const MAX_FAULTS: usize = 3;

fn is_within_budget(rule: &FaultRule, faults: &[FaultStatus], now: Timestamp) -> bool {
    let is_recent = |time: &Time| add_duration(time.0, HOUR) > now;
    let of_rule = faults.iter().filter(|one| one.policy == rule.name && one.actions > 0);
    of_rule.filter(|one| one.time.as_ref().is_some_and(is_recent)).count() < rule.max_per_hour
}

/// Adds a fault, and removes the oldest ones of the rule that no longer count; of those without actions, the latest stays.
pub(super) fn push_fault(faults: &mut Vec<FaultStatus>, fault: FaultStatus, max_per_hour: usize) {
    let has_actions = fault.actions > 0;
    let is_alike = |one: &FaultStatus| one.policy == fault.policy && (one.actions > 0) == has_actions;
    let limit = if has_actions { max_per_hour } else { 1 };
    let mut excess = (faults.iter().filter(|one| is_alike(one)).count() + 1).saturating_sub(limit);
    faults.retain(|one| {
        let is_removed = excess > 0 && is_alike(one);
        excess -= usize::from(is_removed);
        !is_removed
    });
    faults.push(fault);
}

/// The record of a fault, with the actions on these instances; without any if the rule has acted too often.
pub(super) fn fault_status<'a>(
    rule: &FaultRule,
    fault: &InstanceFault,
    source: &str,
    targets: impl Iterator<Item = (FaultAction, &'a str)>,
    before: &[FaultStatus],
    now: Timestamp,
) -> FaultStatus {
    let (name, text) = (&rule.name, &fault.text);
    let (message, count) = if is_within_budget(rule, before, now) {
        let mut by_action: BTreeMap<FaultAction, Vec<&str>> = BTreeMap::new();
        targets.for_each(|(action, target)| by_action.entry(action).or_default().push(target));
        let count = by_action.values().map(Vec::len).sum();
        (format!("{source} {text}; {} by policy {name}", actions_text(&by_action)), count)
    } else {
        let max = rule.max_per_hour;
        (format!("{source} {text}; policy {name} does nothing, since it has acted {max} times in an hour"), 0)
    };
    FaultStatus {
        policy: name.clone(),
        fault: fault.id.clone(),
        instance: source.to_owned(),
        time: Some(Time(now)),
        actions: i32::try_from(count).unwrap_or(i32::MAX),
        message,
    }
}

/// `g-decode-0, g-decode-1 are restarted`, for each action.
fn actions_text(by_action: &BTreeMap<FaultAction, Vec<&str>>) -> String {
    let texts = by_action.iter().map(|(action, names)| {
        let verb = if names.len() == 1 { "is" } else { "are" };
        let mut text = names.iter().take(MAX_NAMES).copied().collect::<Vec<_>>().join(", ");
        if names.len() > MAX_NAMES {
            text.push_str(&format!(" and {} more", names.len() - MAX_NAMES));
        }
        format!("{text} {verb} {}", action.participle())
    });
    texts.collect::<Vec<_>>().join("; ")
}

/// The group's condition: the faults whose actions have not ended, or else the latest one.
pub(super) fn condition(
    mut active: Vec<&str>,
    faults: &[FaultStatus],
    before: &RoleBasedGroupStatus,
    now: Timestamp,
) -> Option<(bool, &'static str, String)> {
    active.sort_unstable();
    active.dedup();
    if !active.is_empty() {
        let mut text = active.iter().take(MAX_FAULTS).copied().collect::<Vec<_>>().join("; ");
        if active.len() > MAX_FAULTS {
            text.push_str(&format!("; and {} more", active.len() - MAX_FAULTS));
        }
        return Some((true, INSTANCE_FAULT, text));
    }
    let has_condition = before.conditions.iter().any(|condition| condition.kind == FAULT_RECOVERY);
    let Some(last) = faults.last() else { return has_condition.then(|| (false, "NoFault", String::new())) };
    let is_recent = last.time.as_ref().is_some_and(|time| add_duration(time.0, HOUR) > now);
    if last.actions == 0 && is_recent {
        return Some((false, FAULT_BUDGET_EXHAUSTED, last.message.clone()));
    }
    has_condition.then(|| (false, "Recovered", last.message.clone()))
}
