//! Groups of engines with comparable speed.

use crate::fleet::{ModelIndex, SchedulableFleet};
use crate::load_tracker::EngineLoadTracker;
use crate::options::SchedulerOptions;
use crate::prefill_time_learner::PrefillTimeLearner;

/// Groups engines that serve the same model and so should have equal speed. A group inherits the learned model of any
/// of its engines.
pub(super) fn group_engines(
    cluster: &SchedulableFleet,
    engines: &[Option<(EngineLoadTracker, usize)>],
    learners: &[PrefillTimeLearner],
    settings: &SchedulerOptions,
) -> (Vec<PrefillTimeLearner>, Vec<usize>) {
    let mut groups: Vec<(Option<ModelIndex>, Option<PrefillTimeLearner>)> = Vec::new();
    let mut kinds = Vec::with_capacity(engines.len());
    for (instance, engine) in cluster.instances().iter().zip(engines) {
        let model = instance.models.first().copied();
        let kind = groups.iter().position(|(known, _)| *known == model).unwrap_or_else(|| {
            groups.push((model, None));
            groups.len() - 1
        });
        kinds.push(kind);
        if let (None, Some((_, old))) = (&groups[kind].1, engine) {
            groups[kind].1 = learners.get(*old).cloned();
        }
    }
    let fresh = || PrefillTimeLearner::new(&settings.service_prior, settings.handover_prior_s_per_token);
    (groups.into_iter().map(|(_, learner)| learner.unwrap_or_else(fresh)).collect(), kinds)
}
