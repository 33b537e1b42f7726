//! How many ready pods of the old and of the new images the roles have during a rollout: engines of different versions may not be able to
//! exchange KV caches, so both sides of a pair should have some of each.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value;

use super::simulated_controllers::has;
use super::{SimulatedApiServer, pods, role};

/// Ready pods of the roles whose images change, from one time of the rollout until the next.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VersionMix {
    /// Seconds after the start of the rollout.
    pub delay_seconds: i64,
    /// By role.
    pub ready: BTreeMap<String, ReadyVersions>,
}

/// Ready pods of one role.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ReadyVersions {
    /// With images that the role had before the rollout.
    pub old: usize,
    /// With other images.
    pub new: usize,
}

/// Records the mixes of a rollout.
#[derive(Debug, Default)]
pub(super) struct VersionMixRecorder {
    /// Images of the pods before the rollout, by role.
    images_at_first: BTreeMap<String, BTreeSet<Vec<String>>>,
    mixes: Vec<VersionMix>,
}

impl VersionMixRecorder {
    pub(super) fn new(server: &SimulatedApiServer) -> Self {
        let mut images_at_first: BTreeMap<String, BTreeSet<Vec<String>>> = BTreeMap::new();
        for pod in pods(server) {
            images_at_first.entry(role(pod).to_owned()).or_default().insert(images(pod));
        }
        let mut recorder = Self { images_at_first, mixes: Vec::new() };
        recorder.record(server, 0);
        recorder
    }

    pub(super) fn record(&mut self, server: &SimulatedApiServer, delay_seconds: i64) {
        let mut ready: BTreeMap<String, ReadyVersions> = BTreeMap::new();
        for role in self.images_at_first.keys() {
            ready.insert(role.clone(), ReadyVersions::default());
        }
        for pod in pods(server) {
            let Some(images_at_first) = self.images_at_first.get(role(pod)) else { continue };
            let versions = ready.entry(role(pod).to_owned()).or_default();
            match (has(pod, "Ready"), images_at_first.contains(&images(pod))) {
                (false, _) => {}
                (true, true) => versions.old += 1,
                (true, false) => versions.new += 1,
            }
        }
        if self.mixes.last().is_none_or(|last| last.ready != ready) {
            self.mixes.push(VersionMix { delay_seconds, ready });
        }
    }

    /// The mixes of the roles whose images change; empty if fewer than two do.
    pub(super) fn finish(self) -> Vec<VersionMix> {
        let changed: BTreeSet<String> = self
            .mixes
            .iter()
            .flat_map(|mix| &mix.ready)
            .filter(|(_, versions)| versions.new > 0)
            .map(|(role, _)| role.clone())
            .collect();
        if changed.len() < 2 {
            return Vec::new();
        }
        let mut mixes = self.mixes;
        mixes.iter_mut().for_each(|mix| mix.ready.retain(|role, _| changed.contains(role)));
        mixes.dedup_by(|next, last| next.ready == last.ready);
        mixes
    }
}

fn images(pod: &Value) -> Vec<String> {
    let containers = pod["spec"]["containers"].as_array().into_iter().flatten();
    containers.map(|container| container["image"].as_str().unwrap_or_default().to_owned()).collect()
}
