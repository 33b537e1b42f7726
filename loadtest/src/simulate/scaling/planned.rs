//! Moongate's planner as a controller.

use moongate_capacity::{Planner, PlannerDecision};

use super::fleet::WantedReplicas;
use super::observation::FleetObservation;
use super::run::ScalingController;

#[derive(Debug)]
pub(crate) struct PlannedReplicas {
    pub(crate) planner: Planner,
    /// Decisions, if they are recorded.
    pub(crate) record: Option<Vec<PlannerDecision>>,
}

impl PlannedReplicas {
    pub(crate) fn new(planner: Planner) -> Self {
        Self { planner, record: None }
    }
}

impl ScalingController for PlannedReplicas {
    fn interval_s(&self) -> f64 {
        self.planner.settings().interval_s
    }

    fn decide(&mut self, observation: &FleetObservation) -> WantedReplicas {
        let decision = self.planner.step(&observation.input);
        let wanted = WantedReplicas {
            prefill: decision.prefill.wanted,
            decode: decision.decode.wanted,
            prefill_to_decode: decision.flips.prefill_to_decode,
            decode_to_prefill: decision.flips.decode_to_prefill,
        };
        if let Some(record) = &mut self.record {
            record.push(decision);
        }
        wanted
    }
}
