//! What pods answer at their hooks, and whether the operator heeds it.

use std::collections::{BTreeMap, BTreeSet};

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator::plan::{HookCall, HookResult, UpgradeHook};
use rbg_api::keys;
use serde_json::Value;

/// All hooks of a cluster.
pub(crate) struct SimulatedHooks {
    /// So often a pod says that it is not done yet.
    pub(crate) not_ready_responses: usize,
    /// Answers that were given.
    pub(crate) response_count: usize,
    /// Whether nobody answers.
    pub(crate) unresponsive: bool,
    /// Questions since the last restart, by pod.
    call_counts: BTreeMap<(String, bool), usize>,
    /// Pods that may be restarted.
    drained: BTreeSet<String>,
    /// Pods that were restarted and have not settled since: their instances, by role.
    unsettled: BTreeMap<String, (String, String)>,
    /// Pods that were told to end before they had drained.
    pub(crate) ended_undrained: Vec<String>,
    /// What must not happen.
    pub(crate) violations: Vec<String>,
}

impl Default for SimulatedHooks {
    fn default() -> Self {
        Self {
            not_ready_responses: 2,
            response_count: 0,
            unresponsive: false,
            call_counts: BTreeMap::new(),
            drained: BTreeSet::new(),
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
    /// What the pod answers. `None` if it does not.
    pub(crate) fn answer(&mut self, server: &SimulatedApiServer, ask: &HookCall) -> Option<HookResult> {
        self.response_count += 1;
        let pod = server.all(ResourceKind::Pod).find(|pod| pod["metadata"]["uid"] == ask.pod.as_str())?;
        if self.unresponsive {
            return None;
        }
        let place = (label(pod, keys::ROLE_NAME), label(pod, keys::ROLE_INSTANCE_NAME));
        let drains = ask.hook == UpgradeHook::Drain;
        let neighbours = self.unsettled.values().filter(|other| other.0 == place.0 && other.1 != place.1);
        if drains && let Some((_, other)) = neighbours.into_iter().next() {
            self.violations.push(format!("{} is to drain, and {other} has not settled", place.1));
        }
        if !drains && self.drained.remove(&ask.pod) {
            return Some(HookResult::NotYet(Some("an update".to_owned())));
        }
        let asked = self.call_counts.entry((ask.pod.clone(), drains)).or_default();
        *asked += 1;
        if *asked <= self.not_ready_responses {
            return Some(HookResult::NotYet(Some("requests".to_owned())));
        }
        if drains {
            self.drained.insert(ask.pod.clone());
        } else {
            self.unsettled.remove(&ask.pod);
        }
        Some(HookResult::Done(None))
    }

    /// A pod is told to end.
    pub(crate) fn end(&mut self, name: &str, uid: &str) {
        if !self.drained.contains(uid) {
            self.ended_undrained.push(name.to_owned());
        }
    }

    /// What the kubelet has done to a pod.
    pub(crate) fn see(&mut self, before: &Value, after: &Value) {
        let restarts = |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"].as_i64();
        if self.unresponsive
            || !has_hooks(after)
            || restarts(before).is_none()
            || restarts(before) == restarts(after)
        {
            return;
        }
        let uid = after["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
        if !self.drained.remove(&uid) {
            self.violations
                .push(format!("{} was restarted before it had drained", after["metadata"]["name"]));
        }
        self.call_counts.retain(|(pod, _), _| *pod != uid);
        let place = (label(after, keys::ROLE_NAME), label(after, keys::ROLE_INSTANCE_NAME));
        self.unsettled.insert(uid, place);
    }

    /// Pods that the operator has gone on from although they have not settled.
    pub(crate) fn left_unsettled(&self) -> usize {
        self.unsettled.len()
    }
}
