//! Least load in tokens.

use super::{
    EngineChoice, Policy, PolicyInput, PolicyName, PolicyVerdict, available_prefills, build_decision,
    least_loaded_decode, load, min_cost, prefill_cost,
};
use crate::decision::{CandidateEngine, CostTerm, ScheduleRejection};

/// Counts tokens, not requests, because prompts differ in length by orders of magnitude. Ties go to a random engine, so
/// that an idle fleet is used evenly.
#[derive(Debug)]
pub(super) struct LeastLoadPolicy;

impl Policy for LeastLoadPolicy {
    fn name(&self) -> PolicyName {
        PolicyName::LeastLoad
    }

    fn decide(&mut self, input: &PolicyInput<'_>) -> Result<PolicyVerdict, ScheduleRejection> {
        let candidates: Vec<CandidateEngine> = available_prefills(input)?
            .into_iter()
            .map(|instance| CandidateEngine {
                instance,
                cost: prefill_cost(&load(input, instance)),
                leading_term: CostTerm::Backlog,
            })
            .collect();
        let entry = min_cost(candidates.iter().map(|c| (c.instance, c.cost)), input.entropy);
        let Some(entry) = entry else { return Err(ScheduleRejection::UnknownModel) };
        let decode = least_loaded_decode(input, entry);
        Ok(build_decision(
            input,
            self.name(),
            EngineChoice { reason: "fewest tokens ahead", entry, decode, candidates },
        ))
    }
}
