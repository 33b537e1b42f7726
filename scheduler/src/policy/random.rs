//! Uniformly random routing.

use super::{
    EngineChoice, Policy, PolicyInput, PolicyName, PolicyVerdict, as_prefill, available_prefills,
    build_decision, pairable_decodes, pick_random,
};
use crate::decision::{CandidateEngine, CostTerm, ScheduleRejection};
use crate::fleet::InstanceIndex;

/// Draws a prefill, and a decode for it.
#[derive(Debug)]
pub(super) struct RandomPolicy;

impl Policy for RandomPolicy {
    fn name(&self) -> PolicyName {
        PolicyName::Random
    }

    fn decide(&mut self, input: &PolicyInput<'_>) -> Result<PolicyVerdict, ScheduleRejection> {
        let open = available_prefills(input)?;
        let Some(entry) = pick_random(&open, input.entropy) else {
            return Err(ScheduleRejection::UnknownModel);
        };
        let decode = as_prefill(input, entry).and_then(|prefill| {
            let partners: Vec<InstanceIndex> = pairable_decodes(input, prefill).collect();
            pick_random(&partners, input.entropy >> 32)
        });
        let candidates = open
            .into_iter()
            .map(|instance| CandidateEngine { instance, cost: 0.0, leading_term: CostTerm::None })
            .collect();
        Ok(build_decision(input, self.name(), EngineChoice { reason: "random", entry, decode, candidates }))
    }
}
