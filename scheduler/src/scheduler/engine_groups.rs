//! Groups of engines with comparable speed.

use crate::fleet::{InstanceIndex, ModelIndex, SchedulableFleet};
use crate::options::SchedulerOptions;
use crate::prefill_time_learner::PrefillTimeLearner;

/// Learned models of prefill times. Engines that serve the same model should have equal speed, and share one.
#[derive(Debug, Default)]
pub(super) struct EngineGroups {
    learners: Vec<PrefillTimeLearner>,
    /// Position in `learners` of each engine's model, in the cluster's order.
    learner_of: Vec<usize>,
}

impl EngineGroups {
    /// The groups of another cluster. `previous` has the former index of each of its engines. A group inherits the
    /// learned model of any of its engines.
    pub(super) fn regrouped(
        &self,
        cluster: &SchedulableFleet,
        previous: &[Option<InstanceIndex>],
        settings: &SchedulerOptions,
    ) -> Self {
        let mut groups: Vec<(Option<ModelIndex>, Option<PrefillTimeLearner>)> = Vec::new();
        let mut learner_of = Vec::with_capacity(previous.len());
        for (instance, previous) in cluster.instances().iter().zip(previous) {
            let model = instance.models.first().copied();
            let group = groups.iter().position(|(known, _)| *known == model).unwrap_or_else(|| {
                groups.push((model, None));
                groups.len() - 1
            });
            learner_of.push(group);
            if let (None, Some(old)) = (&groups[group].1, previous) {
                groups[group].1 = self.learner(*old).cloned();
            }
        }
        let fresh = || PrefillTimeLearner::new(&settings.service_prior, settings.handover_prior_s_per_token);
        let learners = groups.into_iter().map(|(_, learner)| learner.unwrap_or_else(fresh)).collect();
        Self { learners, learner_of }
    }

    pub(super) fn learner(&self, engine: InstanceIndex) -> Option<&PrefillTimeLearner> {
        self.learners.get(*self.learner_of.get(engine.as_usize())?)
    }

    pub(super) fn learner_mut(&mut self, engine: InstanceIndex) -> Option<&mut PrefillTimeLearner> {
        self.learners.get_mut(*self.learner_of.get(engine.as_usize())?)
    }

    /// The learned models of all engines, in the cluster's order.
    pub(super) fn by_engine(&self) -> impl Iterator<Item = &PrefillTimeLearner> {
        self.learner_of.iter().map(|&group| &self.learners[group])
    }
}
