//! What pods answer at their hooks, and whether the operator heeds it.

use std::collections::{BTreeMap, BTreeSet};

use moongate_operator::Kind;
use moongate_operator::forecast::Server;
use moongate_operator::plan::{Answer, Ask, Hook};
use rbg_api::keys;
use serde_json::Value;

/// All hooks of a cluster.
pub(crate) struct Answers {
    /// So often a pod says that it is not done yet.
    pub(crate) patience: usize,
    /// Answers that were given.
    pub(crate) given: usize,
    /// Whether nobody answers.
    pub(crate) deaf: bool,
    /// Questions since the last restart, by pod.
    asked: BTreeMap<(String, bool), usize>,
    /// Pods that may be restarted.
    drained: BTreeSet<String>,
    /// Pods that were restarted and have not settled since: their instances, by role.
    unsettled: BTreeMap<String, (String, String)>,
    /// Pods that were told to end before they had drained.
    pub(crate) ended_undrained: Vec<String>,
    /// What must not happen.
    pub(crate) wrong: Vec<String>,
}

impl Default for Answers {
    fn default() -> Self {
        Self {
            patience: 2,
            given: 0,
            deaf: false,
            asked: BTreeMap::new(),
            drained: BTreeSet::new(),
            unsettled: BTreeMap::new(),
            ended_undrained: Vec::new(),
            wrong: Vec::new(),
        }
    }
}

fn label(pod: &Value, key: &str) -> String {
    pod["metadata"]["labels"][key].as_str().unwrap_or_default().to_owned()
}

fn has_hooks(pod: &Value) -> bool {
    pod["metadata"]["annotations"].get(keys::UPGRADE_HOOKS).is_some()
}

impl Answers {
    /// What the pod answers. `None` if it does not.
    pub(crate) fn answer(&mut self, server: &Server, ask: &Ask) -> Option<Answer> {
        self.given += 1;
        let pod = server.all(Kind::Pod).find(|pod| pod["metadata"]["uid"] == ask.pod.as_str())?;
        if self.deaf {
            return None;
        }
        let place = (label(pod, keys::ROLE_NAME), label(pod, keys::ROLE_INSTANCE_NAME));
        let drains = ask.hook == Hook::Drain;
        let neighbours = self.unsettled.values().filter(|other| other.0 == place.0 && other.1 != place.1);
        if drains && let Some((_, other)) = neighbours.into_iter().next() {
            self.wrong.push(format!("{} is to drain, and {other} has not settled", place.1));
        }
        if !drains && self.drained.remove(&ask.pod) {
            return Some(Answer::NotYet(Some("an update".to_owned())));
        }
        let asked = self.asked.entry((ask.pod.clone(), drains)).or_default();
        *asked += 1;
        if *asked <= self.patience {
            return Some(Answer::NotYet(Some("requests".to_owned())));
        }
        if drains {
            self.drained.insert(ask.pod.clone());
        } else {
            self.unsettled.remove(&ask.pod);
        }
        Some(Answer::Done(None))
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
        if self.deaf || !has_hooks(after) || restarts(before).is_none() || restarts(before) == restarts(after)
        {
            return;
        }
        let uid = after["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
        if !self.drained.remove(&uid) {
            self.wrong.push(format!("{} was restarted before it had drained", after["metadata"]["name"]));
        }
        self.asked.retain(|(pod, _), _| *pod != uid);
        let place = (label(after, keys::ROLE_NAME), label(after, keys::ROLE_INSTANCE_NAME));
        self.unsettled.insert(uid, place);
    }

    /// Pods that the operator has gone on from although they have not settled.
    pub(crate) fn left_unsettled(&self) -> usize {
        self.unsettled.len()
    }
}
