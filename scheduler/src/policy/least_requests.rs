//! Fewest requests in flight.

use super::{
    EngineChoice, Policy, PolicyInput, PolicyName, PolicyVerdict, active_requests, as_prefill,
    available_prefills, build_decision, min_cost, pairable_decodes,
};
use crate::decision::{CandidateEngine, CostTerm, ScheduleRejection};

/// Counts requests whatever their length, as most load balancers do. Ties go to a random engine.
#[derive(Debug)]
pub(super) struct LeastRequestsPolicy;

impl Policy for LeastRequestsPolicy {
    fn name(&self) -> PolicyName {
        PolicyName::LeastRequests
    }

    fn decide(&mut self, input: &PolicyInput<'_>) -> Result<PolicyVerdict, ScheduleRejection> {
        let requests = |ix| f64::from(active_requests(input, ix));
        let candidates: Vec<CandidateEngine> = available_prefills(input)?
            .into_iter()
            .map(|instance| CandidateEngine {
                instance,
                cost: requests(instance),
                leading_term: CostTerm::Backlog,
            })
            .collect();
        let entry = min_cost(candidates.iter().map(|c| (c.instance, c.cost)), input.entropy);
        let Some(entry) = entry else { return Err(ScheduleRejection::UnknownModel) };
        let decode = as_prefill(input, entry).and_then(|prefill| {
            min_cost(pairable_decodes(input, prefill).map(|ix| (ix, requests(ix))), input.entropy >> 32)
        });
        Ok(build_decision(
            input,
            self.name(),
            EngineChoice { reason: "fewest requests", entry, decode, candidates },
        ))
    }
}
