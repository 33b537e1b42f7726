//! Simulated hooks of pods, and the invariants that the operator must maintain.

use std::collections::{BTreeMap, BTreeSet};

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator::upgrade_hook::{HookCall, HookResult, UpgradeHook};
use rbg_api::keys;
use serde_json::Value;

/// Hooks of all pods of a cluster.
pub struct SimulatedHooks {
    /// Number of calls that return `Pending` before a hook finishes.
    pub not_ready_responses: usize,
    /// Number of responses so far.
    pub response_count: usize,
    pub unresponsive: bool,
    /// Responses to calls for the cost of a removal, by the pod's name.
    pub removal_costs: BTreeMap<String, i32>,
    /// Calls since the last restart, by pod.
    call_counts: BTreeMap<(String, bool), usize>,
    /// Pods that may be restarted.
    drained: BTreeSet<String>,
    /// Pods that were called to drain and have neither restarted nor settled since.
    draining: BTreeSet<String>,
    /// Pods that have restarted and not settled since: their instances, by role.
    unsettled: BTreeMap<String, (String, String)>,
    /// Pods that were deleted before they had drained.
    pub ended_undrained: Vec<String>,
    pub violations: Vec<String>,
}

impl Default for SimulatedHooks {
    fn default() -> Self {
        Self {
            not_ready_responses: 2,
            response_count: 0,
            unresponsive: false,
            removal_costs: BTreeMap::new(),
            call_counts: BTreeMap::new(),
            drained: BTreeSet::new(),
            draining: BTreeSet::new(),
            unsettled: BTreeMap::new(),
            ended_undrained: Vec::new(),
            violations: Vec::new(),
        }
    }
}

fn label(pod: &Value, key: &str) -> String {
    pod["metadata"]["labels"][key].as_str().unwrap_or_default().to_owned()
}

fn has_hooks(pod: &Value) -> bool {
    pod["metadata"]["annotations"].get(keys::UPGRADE_HOOKS).is_some()
}

impl SimulatedHooks {
    /// Response of the pod; `None` if it does not respond.
    pub fn answer(&mut self, server: &SimulatedApiServer, call: &HookCall) -> Option<HookResult> {
        self.response_count += 1;
        let pod = server.all(ResourceKind::Pod).find(|pod| pod["metadata"]["uid"] == call.pod.as_str())?;
        if self.unresponsive {
            return None;
        }
        if call.hook == UpgradeHook::RemovalCost {
            let cost = pod["metadata"]["name"].as_str().and_then(|name| self.removal_costs.get(name));
            return Some(cost.map_or(HookResult::Done(None), |cost| HookResult::Cost(*cost)));
        }
        let location = (label(pod, keys::ROLE_NAME), label(pod, keys::ROLE_INSTANCE_NAME));
        let drains = matches!(call.hook, UpgradeHook::Drain | UpgradeHook::DrainForRemoval);
        let neighbours =
            self.unsettled.values().filter(|other| other.0 == location.0 && other.1 != location.1);
        if drains && let Some((_, other)) = neighbours.into_iter().next() {
            self.violations.push(format!("{} drains while {other} has not settled", location.1));
        }
        let was_draining = !drains && self.draining.remove(&call.pod);
        if was_draining {
            self.drained.remove(&call.pod);
            self.call_counts.retain(|(pod, _), _| *pod != call.pod);
            return Some(HookResult::Pending(Some("an update".to_owned())));
        }
        if drains && pod["metadata"].get("deletionTimestamp").is_none() {
            self.draining.insert(call.pod.clone());
        }
        let calls = self.call_counts.entry((call.pod.clone(), drains)).or_default();
        *calls += 1;
        if *calls <= self.not_ready_responses {
            return Some(HookResult::Pending(Some("requests".to_owned())));
        }
        if drains {
            self.drained.insert(call.pod.clone());
        } else {
            self.unsettled.remove(&call.pod);
        }
        Some(HookResult::Done(None))
    }

    /// Records that a pod is being deleted.
    pub fn end(&mut self, name: &str, uid: &str) {
        self.draining.remove(uid);
        if !self.drained.contains(uid) {
            self.ended_undrained.push(name.to_owned());
        }
    }

    /// Records a change of a pod by the kubelet.
    pub fn observe(&mut self, before: &Value, after: &Value) {
        let restarts = |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"].as_i64();
        if self.unresponsive
            || !has_hooks(after)
            || restarts(before).is_none()
            || restarts(before) == restarts(after)
        {
            return;
        }
        let uid = after["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
        self.draining.remove(&uid);
        if !self.drained.remove(&uid) {
            self.violations
                .push(format!("{} was restarted before it had drained", after["metadata"]["name"]));
        }
        self.call_counts.retain(|(pod, _), _| *pod != uid);
        let location = (label(after, keys::ROLE_NAME), label(after, keys::ROLE_INSTANCE_NAME));
        self.unsettled.insert(uid, location);
    }

    /// Number of pods that are left draining: they neither restarted nor returned to service, and were not deleted.
    #[must_use]
    pub fn left_draining(&self) -> usize {
        self.draining.len()
    }

    /// Number of pods that have not settled although the operator has completed their update.
    pub fn left_unsettled(&self) -> usize {
        self.unsettled.len()
    }
}
