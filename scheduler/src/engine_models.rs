//! What is learned about the engines of one group.

use crate::decode_step::DecodeStepLearner;
use crate::options::SchedulerOptions;
use crate::prefill_time_learner::PrefillTimeLearner;

/// Engines that serve the same model should have equal speed, and share these.
#[derive(Debug, Clone)]
pub(crate) struct EngineModels {
    pub(crate) prefill: PrefillTimeLearner,
    pub(crate) decode: DecodeStepLearner,
}

impl EngineModels {
    /// The start values.
    pub(crate) fn new(settings: &SchedulerOptions) -> Self {
        Self {
            prefill: PrefillTimeLearner::new(&settings.service_prior, settings.handover_prior_s_per_token),
            decode: DecodeStepLearner::new(&settings.decode_step_prior),
        }
    }
}
