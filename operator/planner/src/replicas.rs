//! Replicas of one role, from the pods that the selector of its scale subresource selects.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::jiff::Timestamp;
use moongate_capacity::{RoleReplicas, StartingReplica};

/// A Ready condition that changes to false later than this after the start of its pod, in seconds, means that the pod was ready before.
const FIRST_STATUS_S: f64 = 5.0;
/// Most pods of one role.
const MAX_PODS: usize = 20_000;

/// What decisions need of one pod.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ReplicaState {
    Ready,
    /// Not ready since this Unix time, in seconds: since its creation, or since it was ready.
    Starting {
        since_s: f64,
    },
    Draining,
}

/// Pods of one role by their UID.
#[derive(Debug, Default)]
pub(crate) struct RolePods {
    states: HashMap<String, ReplicaState>,
    /// Pods that a new list has contained so far.
    listed: HashMap<String, ReplicaState>,
}

impl RolePods {
    pub(crate) fn begin_list(&mut self) {
        self.listed.clear();
    }

    pub(crate) fn list(&mut self, pod: &Pod) {
        insert(&mut self.listed, pod);
    }

    /// The new list replaces the pods.
    pub(crate) fn end_list(&mut self) {
        self.states = std::mem::take(&mut self.listed);
    }

    pub(crate) fn apply(&mut self, pod: &Pod) {
        insert(&mut self.states, pod);
    }

    pub(crate) fn delete(&mut self, pod: &Pod) {
        self.states.remove(uid(pod));
    }

    /// Ready, starting and draining replicas, as the pods show them.
    pub(crate) fn counts(&self) -> RoleReplicas {
        let mut replicas = RoleReplicas::default();
        for state in self.states.values() {
            match *state {
                ReplicaState::Ready => replicas.ready += 1,
                ReplicaState::Starting { since_s } => replicas.starting.push(StartingReplica { since_s }),
                ReplicaState::Draining => replicas.draining += 1,
            }
        }
        replicas.starting.sort_by(|one, other| one.since_s.total_cmp(&other.since_s));
        replicas
    }
}

fn insert(states: &mut HashMap<String, ReplicaState>, pod: &Pod) {
    match replica_state(pod) {
        Some(state) if states.len() < MAX_PODS => drop(states.insert(uid(pod).to_owned(), state)),
        _ => drop(states.remove(uid(pod))),
    }
}

fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

/// State of the pod as a replica; `None` for a pod that has ended, which its controller replaces.
fn replica_state(pod: &Pod) -> Option<ReplicaState> {
    let status = pod.status.as_ref();
    if matches!(status.and_then(|status| status.phase.as_deref()), Some("Succeeded" | "Failed")) {
        return None;
    }
    if pod.metadata.deletion_timestamp.is_some() {
        return Some(ReplicaState::Draining);
    }
    let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let ready = conditions.iter().find(|condition| condition.type_ == "Ready");
    if ready.is_some_and(|condition| condition.status == "True") {
        return Some(ReplicaState::Ready);
    }
    let created = pod.metadata.creation_timestamp.as_ref().map_or(0.0, |time| unix_seconds(time.0));
    let started =
        status.and_then(|status| status.start_time.as_ref()).map_or(created, |time| unix_seconds(time.0));
    // The start of a pod that was ready before and has failed begins with its failure.
    let failed = ready.and_then(transition).filter(|since| *since > started + FIRST_STATUS_S);
    Some(ReplicaState::Starting { since_s: failed.unwrap_or(created) })
}

fn transition(condition: &PodCondition) -> Option<f64> {
    condition.last_transition_time.as_ref().map(|time| unix_seconds(time.0))
}

fn unix_seconds(time: Timestamp) -> f64 {
    time.as_millisecond() as f64 / 1000.0
}

/// Adjusts the pods' counts to the replicas that the target has: pods are created and deleted some time after its change. Missing ones are
/// starting since `changed_s`, and those in excess are about to drain. So a decision that keeps the number of replicas keeps the
/// target's.
pub(crate) fn adjust_to_target(mut replicas: RoleReplicas, target: u32, changed_s: f64) -> RoleReplicas {
    while replicas.current() < target {
        replicas.starting.push(StartingReplica { since_s: changed_s });
    }
    while replicas.current() > target {
        // The newest first, as controllers do.
        if replicas.starting.pop().is_none() {
            replicas.ready -= 1;
        }
        replicas.draining += 1;
    }
    replicas
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(uid: &str, status: Value) -> Pod {
        let metadata = json!({ "uid": uid, "creationTimestamp": "1970-01-01T00:01:40Z" });
        serde_json::from_value(json!({ "metadata": metadata, "status": status })).unwrap()
    }

    fn ready(status: &str, since: &str) -> Value {
        json!({ "startTime": "1970-01-01T00:02:00Z", "phase": "Running",
            "conditions": [{ "type": "Ready", "status": status, "lastTransitionTime": since }] })
    }

    #[test]
    fn pods_are_ready_starting_or_draining() {
        let mut pods = RolePods::default();
        pods.begin_list();
        pods.list(&pod("pending", json!({ "phase": "Pending" })));
        pods.list(&pod("ready", ready("True", "1970-01-01T00:05:00Z")));
        pods.list(&pod("loading", ready("False", "1970-01-01T00:02:01Z")));
        pods.list(&pod("restarted", ready("False", "1970-01-01T00:10:00Z")));
        pods.list(&pod("ended", json!({ "phase": "Failed" })));
        assert_eq!(pods.counts(), RoleReplicas::default(), "an incomplete list is not used");
        pods.end_list();
        let since =
            |replicas: &RoleReplicas| replicas.starting.iter().map(|one| one.since_s).collect::<Vec<_>>();
        let counts = pods.counts();
        assert_eq!((counts.ready, counts.draining), (1, 0));
        assert_eq!(since(&counts), [100.0, 100.0, 600.0], "a failed engine starts again");

        let mut draining = pod("ready", ready("True", "1970-01-01T00:05:00Z"));
        draining.metadata.deletion_timestamp = draining.metadata.creation_timestamp.clone();
        pods.apply(&draining);
        pods.delete(&pod("pending", json!({})));
        pods.apply(&pod("loading", json!({ "phase": "Succeeded" })));
        let counts = pods.counts();
        assert_eq!((counts.ready, since(&counts), counts.draining), (0, vec![600.0], 1));
    }

    #[test]
    fn replicas_follow_the_target_before_its_pods_do() {
        let pods = RoleReplicas {
            ready: 3,
            starting: vec![StartingReplica { since_s: 7.0 }],
            draining: 1,
            ..RoleReplicas::default()
        };
        let more = adjust_to_target(pods.clone(), 6, 9.0);
        assert_eq!((more.ready, more.current(), more.draining), (3, 6, 1));
        assert_eq!(more.starting[2].since_s, 9.0);
        let fewer = adjust_to_target(pods.clone(), 2, 9.0);
        assert_eq!((fewer.ready, fewer.starting.len(), fewer.draining), (2, 0, 3));
        assert_eq!(adjust_to_target(pods.clone(), 4, 9.0), pods);
        assert_eq!(adjust_to_target(pods, 0, 9.0).current(), 0);
    }
}
