//! LoRA adapters that engines load at run time: where an adapter is loaded, and how long a load takes.

use std::collections::BTreeMap;

use crate::fleet::{InstanceIndex, ModelIndex, SchedulableFleet};
use crate::seconds::Seconds;

/// Weight of a new observation in the mean duration of a load.
const LOAD_TIME_GAIN: f64 = 0.2;

/// A load is this much dearer for every model that the engine already serves: adapters share its slots, so that the first load of an
/// adapter goes to the engine with the fewest.
const CROWDING_SHARE: f64 = 0.05;

/// Most models that count for [`CROWDING_SHARE`].
const MAX_CROWDING: usize = 20;

/// A load without a result for this long counts as lost: the gateway that started it may have failed.
const LOST_AFTER: Seconds = 600.0;

/// How long a completed load counts before the fleet lists the adapter: a probe of the engine takes less.
const UNLISTED_FOR: Seconds = 10.0;

/// Whether an engine has the adapter that a request needs. A request for a model without adapters finds it loaded everywhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum AdapterResidency {
    #[default]
    Loaded,
    /// The engine is loading it, for about this many more seconds.
    Loading { remaining: Seconds },
    /// The engine can load it, in about this many seconds.
    Loadable { load_time: Seconds },
}

impl AdapterResidency {
    /// Seconds until a request for the adapter can be sent to the engine.
    #[must_use]
    pub fn wait(self) -> Seconds {
        match self {
            Self::Loaded => 0.0,
            Self::Loading { remaining } => remaining,
            Self::Loadable { load_time } => load_time,
        }
    }

    /// Order of preference for policies that do not price a load, the best first.
    pub(crate) fn preference(self) -> u8 {
        match self {
            Self::Loaded => 0,
            Self::Loading { .. } => 1,
            Self::Loadable { .. } => 2,
        }
    }
}

/// Residency of one request's adapter on each engine, in the cluster's order. Empty if it is loaded on every engine that serves the
/// model. Engines that can neither serve nor load it are no candidates: see [`SchedulableFleet::prefills`].
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct AdapterResidencies(Vec<AdapterResidency>);

impl AdapterResidencies {
    #[must_use]
    pub fn of(&self, ix: InstanceIndex) -> AdapterResidency {
        self.0.get(ix.as_usize()).copied().unwrap_or_default()
    }

    /// Whether no engine needs a load.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Longest wait for a load on any engine.
    pub(crate) fn max_wait(&self) -> Seconds {
        self.0.iter().map(|residency| residency.wait()).fold(0.0, f64::max)
    }
}

impl FromIterator<AdapterResidency> for AdapterResidencies {
    fn from_iter<I: IntoIterator<Item = AdapterResidency>>(residencies: I) -> Self {
        Self(residencies.into_iter().collect())
    }
}

/// A load that was started, by the first rank of its engine.
#[derive(Debug, Clone, Copy)]
struct TrackedLoad {
    started: Seconds,
    completed: Option<Seconds>,
}

/// Loads in progress, loads that the fleet does not list yet, and the learned duration of a load.
#[derive(Debug)]
pub(crate) struct AdapterLoadTracker {
    loads: BTreeMap<(InstanceIndex, ModelIndex), TrackedLoad>,
    mean: Seconds,
    is_learned: bool,
}

impl AdapterLoadTracker {
    /// `prior` is the duration of a load until one was observed.
    pub(crate) fn new(prior: Seconds) -> Self {
        Self { loads: BTreeMap::new(), mean: prior, is_learned: false }
    }

    /// Residency of `model` on every engine.
    pub(crate) fn residencies(
        &self,
        now: Seconds,
        cluster: &SchedulableFleet,
        model: ModelIndex,
    ) -> AdapterResidencies {
        let loadable = cluster.loadable(model);
        if loadable.is_empty() {
            return AdapterResidencies::default();
        }
        let mut residencies = vec![AdapterResidency::Loaded; cluster.instances().len()];
        for &ix in loadable {
            if let Some(residency) = residencies.get_mut(ix.as_usize()) {
                *residency = self.residency(now, cluster, ix, model);
            }
        }
        AdapterResidencies(residencies)
    }

    fn residency(
        &self,
        now: Seconds,
        cluster: &SchedulableFleet,
        ix: InstanceIndex,
        model: ModelIndex,
    ) -> AdapterResidency {
        let engine = cluster.first_rank(ix);
        match self.loads.get(&(engine, model)) {
            Some(TrackedLoad { completed: Some(_), .. }) => AdapterResidency::Loaded,
            Some(load) if now - load.started < LOST_AFTER => {
                // An overdue load is expected to take as long again as it is overdue.
                AdapterResidency::Loading { remaining: (self.mean - (now - load.started)).abs() }
            }
            _ => {
                let served = cluster.get(engine).map_or(0, |instance| instance.models.len());
                let others = self.loads.keys().filter(|(loading, _)| *loading == engine).count();
                let crowding = (served + others).min(MAX_CROWDING) as f64;
                AdapterResidency::Loadable { load_time: self.mean * (1.0 + CROWDING_SHARE * crowding) }
            }
        }
    }

    /// A request was sent to an engine that has to load its adapter first.
    pub(crate) fn start(
        &mut self,
        now: Seconds,
        cluster: &SchedulableFleet,
        ix: InstanceIndex,
        model: ModelIndex,
    ) {
        if cluster.loadable(model).contains(&ix) {
            let load = self.loads.entry((cluster.first_rank(ix), model));
            let load = load.or_insert(TrackedLoad { started: now, completed: None });
            if load.completed.is_none() && now - load.started >= LOST_AFTER {
                load.started = now;
            }
        }
    }

    /// An engine has loaded an adapter in `took` seconds; `None` if that was not observed.
    pub(crate) fn complete(
        &mut self,
        now: Seconds,
        cluster: &SchedulableFleet,
        ix: InstanceIndex,
        (model, took): (ModelIndex, Option<Seconds>),
    ) {
        if let Some(took) = took.filter(|took| took.is_finite() && *took >= 0.0) {
            let gain = if std::mem::replace(&mut self.is_learned, true) { LOAD_TIME_GAIN } else { 1.0 };
            self.mean += gain * (took - self.mean);
        }
        if cluster.loadable(model).contains(&ix) {
            let started = TrackedLoad { started: now, completed: None };
            let load = self.loads.entry((cluster.first_rank(ix), model)).or_insert(started);
            load.completed = Some(now);
        }
    }

    /// An engine could not load an adapter.
    pub(crate) fn fail(&mut self, cluster: &SchedulableFleet, ix: InstanceIndex, model: ModelIndex) {
        self.loads.remove(&(cluster.first_rank(ix), model));
    }

    /// Applies a new fleet. `moved` has the new index of an engine of the former one.
    pub(crate) fn set_cluster(
        &mut self,
        now: Seconds,
        cluster: &SchedulableFleet,
        moved: impl Fn(InstanceIndex) -> Option<InstanceIndex>,
    ) {
        let loads = std::mem::take(&mut self.loads).into_iter();
        let kept = loads.filter_map(|((engine, model), load)| Some(((moved(engine)?, model), load)));
        self.loads = kept
            .filter(|((engine, model), load)| {
                let is_recent = match load.completed {
                    Some(completed) => now - completed < UNLISTED_FOR,
                    None => now - load.started < LOST_AFTER,
                };
                is_recent && cluster.loadable(*model).contains(engine)
            })
            .collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache_params::EngineCacheParams;
    use crate::fleet::{InstanceRole, LocationIds, PairingDomain, SchedulableInstance};

    const BASE: ModelIndex = ModelIndex(0);
    const ADAPTER: ModelIndex = ModelIndex(1);

    /// An engine with two ranks that can load the adapter, and one that has it.
    fn cluster() -> SchedulableFleet {
        let instance = |name: &str, rank, has_adapter: bool| SchedulableInstance {
            name: name.into(),
            role: InstanceRole::Plain,
            models: if has_adapter { vec![BASE, ADAPTER] } else { vec![BASE] },
            loadable: if has_adapter { Vec::new() } else { vec![ADAPTER] },
            domain: PairingDomain(0),
            rank,
            location: LocationIds::default(),
            cache: EngineCacheParams::default(),
            local_prefill: false,
        };
        SchedulableFleet::new(vec![
            instance("a#0", 0, false),
            instance("a#1", 1, false),
            instance("b", 0, true),
        ])
    }

    fn residencies(tracker: &AdapterLoadTracker, now: Seconds) -> [AdapterResidency; 3] {
        let of = tracker.residencies(now, &cluster(), ADAPTER);
        [0, 1, 2].map(|ix| of.of(InstanceIndex(ix)))
    }

    #[test]
    fn ranks_of_an_engine_share_a_load() {
        let mut tracker = AdapterLoadTracker::new(1.0);
        let loadable = AdapterResidency::Loadable { load_time: 1.0 + CROWDING_SHARE };
        assert_eq!(residencies(&tracker, 0.0), [loadable, loadable, AdapterResidency::Loaded]);
        tracker.start(0.0, &cluster(), InstanceIndex(1), ADAPTER);
        let loading = AdapterResidency::Loading { remaining: 0.75 };
        assert_eq!(residencies(&tracker, 0.25), [loading, loading, AdapterResidency::Loaded]);
        tracker.complete(0.5, &cluster(), InstanceIndex(0), (ADAPTER, Some(0.5)));
        assert_eq!(residencies(&tracker, 0.5), [AdapterResidency::Loaded; 3]);
        assert!(tracker.residencies(0.5, &cluster(), BASE).is_empty());
    }

    #[test]
    fn load_time_is_learned() {
        let mut tracker = AdapterLoadTracker::new(1.0);
        let complete = |tracker: &mut AdapterLoadTracker, took| {
            tracker.complete(0.0, &cluster(), InstanceIndex(0), (ADAPTER, took));
            tracker.fail(&cluster(), InstanceIndex(0), ADAPTER);
            residencies(tracker, 0.0)[0].wait() / (1.0 + CROWDING_SHARE)
        };
        assert_eq!(complete(&mut tracker, Some(4.0)), 4.0);
        assert!((complete(&mut tracker, Some(9.0)) - 5.0).abs() < 1e-9);
        assert!((complete(&mut tracker, None) - 5.0).abs() < 1e-9);
        assert!((complete(&mut tracker, Some(f64::NAN)) - 5.0).abs() < 1e-9);
    }

    #[test]
    fn overdue_load_becomes_dearer_until_it_counts_as_lost() {
        let mut tracker = AdapterLoadTracker::new(1.0);
        tracker.start(0.0, &cluster(), InstanceIndex(0), ADAPTER);
        assert_eq!(residencies(&tracker, 3.0)[0], AdapterResidency::Loading { remaining: 2.0 });
        assert!(matches!(residencies(&tracker, LOST_AFTER)[0], AdapterResidency::Loadable { .. }));
        tracker.start(LOST_AFTER, &cluster(), InstanceIndex(0), ADAPTER);
        assert_eq!(residencies(&tracker, LOST_AFTER)[0], AdapterResidency::Loading { remaining: 1.0 });
    }

    #[test]
    fn failed_load_leaves_the_adapter_loadable() {
        let mut tracker = AdapterLoadTracker::new(1.0);
        tracker.start(0.0, &cluster(), InstanceIndex(0), ADAPTER);
        tracker.fail(&cluster(), InstanceIndex(1), ADAPTER);
        assert!(matches!(residencies(&tracker, 0.0)[0], AdapterResidency::Loadable { .. }));
    }

    #[test]
    fn unlisted_load_counts_until_the_fleet_is_expected_to_list_it() {
        let mut tracker = AdapterLoadTracker::new(1.0);
        tracker.complete(0.0, &cluster(), InstanceIndex(0), (ADAPTER, None));
        tracker.set_cluster(1.0, &cluster(), Some);
        assert_eq!(residencies(&tracker, 1.0)[0], AdapterResidency::Loaded);
        tracker.set_cluster(UNLISTED_FOR, &cluster(), Some);
        assert!(matches!(residencies(&tracker, UNLISTED_FOR)[0], AdapterResidency::Loadable { .. }));
    }
}
