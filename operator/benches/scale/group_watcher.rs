//! State of groups as observed through watches.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::time::{Duration, Instant};

use futures_util::stream::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher::{Config, Event, watcher};
use kube::runtime::{WatchStreamExt as _, reflector::Lookup as _};
use kube::{Api, Client};
use rbg_api::keys;
use rbg_api::v1alpha2::RoleBasedGroup;

#[derive(Default)]
pub(crate) struct ObservedGroup {
    pub(crate) status: ObservedGroupStatus,
    pub(crate) pods: HashMap<String, ObservedPod>,
}

#[derive(Default)]
pub(crate) struct ObservedGroupStatus {
    pub(crate) generation: i64,
    /// Whether the status refers to the present generation.
    pub(crate) is_current: bool,
    pub(crate) is_ready: bool,
    /// Number of updated replicas of all roles.
    pub(crate) updated: usize,
}

pub(crate) struct ObservedPod {
    pub(crate) is_ready: bool,
    /// Image of the pod's container.
    pub(crate) image: String,
}

enum GroupWatchEvent {
    Group(RoleBasedGroup),
    Pod(Pod),
    PodDeleted(Pod),
}

pub(crate) struct GroupWatcher {
    events: Pin<Box<dyn Stream<Item = GroupWatchEvent>>>,
    groups: HashMap<String, ObservedGroup>,
    /// Number of pods that each group should have.
    pods: usize,
}

impl GroupWatcher {
    pub(crate) fn follow(client: &Client, pods_each: usize) -> Self {
        let groups = watcher(Api::<RoleBasedGroup>::default_namespaced(client.clone()), Config::default());
        let groups = groups
            .default_backoff()
            .applied_objects()
            .filter_map(async |group| group.ok().map(GroupWatchEvent::Group));
        let pods = watcher(Api::<Pod>::default_namespaced(client.clone()), Config::default());
        let pods = pods.default_backoff().filter_map(async |event| match event {
            Ok(Event::Apply(pod) | Event::InitApply(pod)) => Some(GroupWatchEvent::Pod(pod)),
            Ok(Event::Delete(pod)) => Some(GroupWatchEvent::PodDeleted(pod)),
            _ => None,
        });
        Self {
            events: Box::pin(futures_util::stream::select(groups, pods)),
            groups: HashMap::new(),
            pods: pods_each,
        }
    }

    /// Times after which each of these groups fulfilled each predicate.
    pub(crate) async fn reached(
        &mut self,
        names: &[String],
        wishes: &[fn(&ObservedGroup, usize) -> bool],
        limit: Duration,
    ) -> Vec<Vec<Duration>> {
        let started = Instant::now();
        let wanted: HashSet<&str> = names.iter().map(String::as_str).collect();
        let mut times = vec![HashMap::new(); wishes.len()];
        for name in names {
            self.record_times(name, wishes, &mut times, started);
        }
        while times.iter().any(|times| times.len() < names.len()) {
            let left = limit.saturating_sub(started.elapsed());
            let event = tokio::time::timeout(left, self.events.next()).await;
            let event = event.unwrap_or_else(|_| {
                let reached: Vec<_> = times.iter().map(HashMap::len).collect();
                unreachable!("{reached:?} of {} groups after {limit:?}", names.len())
            });
            let name = self.apply_event(event.unwrap());
            if wanted.contains(name.as_str()) {
                self.record_times(&name, wishes, &mut times, started);
            }
        }
        times.into_iter().map(|times| times.into_values().collect()).collect()
    }

    fn record_times(
        &self,
        name: &str,
        wishes: &[fn(&ObservedGroup, usize) -> bool],
        times: &mut [HashMap<String, Duration>],
        started: Instant,
    ) {
        let Some(group) = self.groups.get(name) else { return };
        for (wish, times) in wishes.iter().zip(times) {
            if wish(group, self.pods) {
                times.entry(name.to_owned()).or_insert_with(|| started.elapsed());
            }
        }
    }

    /// Updates the state; returns the group that the event belongs to.
    fn apply_event(&mut self, event: GroupWatchEvent) -> String {
        match event {
            GroupWatchEvent::Group(group) => {
                let name = group.name().unwrap_or_default().into_owned();
                self.groups.entry(name.clone()).or_default().status = status(&group);
                name
            }
            GroupWatchEvent::Pod(pod) => {
                let name = owner(&pod);
                let pods = &mut self.groups.entry(name.clone()).or_default().pods;
                pods.insert(pod.metadata.uid.clone().unwrap_or_default(), state(&pod));
                name
            }
            GroupWatchEvent::PodDeleted(pod) => {
                let name = owner(&pod);
                let pods = &mut self.groups.entry(name.clone()).or_default().pods;
                pods.remove(pod.metadata.uid.as_deref().unwrap_or_default());
                name
            }
        }
    }
}

fn owner(pod: &Pod) -> String {
    pod.metadata.labels.as_ref().and_then(|labels| labels.get(keys::GROUP_NAME)).cloned().unwrap_or_default()
}

fn status(group: &RoleBasedGroup) -> ObservedGroupStatus {
    let status = group.status.clone().unwrap_or_default();
    let is_true = |kind: &str| {
        status.conditions.iter().any(|condition| condition.kind == kind && condition.status == "True")
    };
    ObservedGroupStatus {
        generation: group.metadata.generation.unwrap_or(0),
        is_current: status.observed_generation == group.metadata.generation,
        is_ready: is_true("Ready") && !is_true("RollingUpdateInProgress"),
        updated: status
            .role_statuses
            .iter()
            .filter_map(|role| usize::try_from(role.updated_replicas).ok())
            .sum(),
    }
}

fn state(pod: &Pod) -> ObservedPod {
    let status = pod.status.clone().unwrap_or_default();
    let ready = status
        .conditions
        .iter()
        .flatten()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True");
    let container = status.container_statuses.into_iter().flatten().next();
    ObservedPod { is_ready: ready, image: container.map_or_else(String::new, |container| container.image) }
}
