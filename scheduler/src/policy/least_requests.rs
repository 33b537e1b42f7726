//! Fewest requests.

use super::{
    Input, Policy, PolicyName, Verdict, conclude, is_prefill, lightest, open_entries, partners, requests,
};
use crate::decision::{Candidate, Refusal, Term};

/// Counts requests whatever their length: what most load balancers do. Ties go to a random member.
#[derive(Debug)]
pub(super) struct LeastRequests;

impl Policy for LeastRequests {
    fn name(&self) -> PolicyName {
        PolicyName::LeastRequests
    }

    fn decide(&mut self, input: &Input<'_>) -> Result<Verdict, Refusal> {
        let requests = |ix| f64::from(requests(input, ix));
        let candidates: Vec<Candidate> = open_entries(input)?
            .into_iter()
            .map(|instance| Candidate { instance, cost: requests(instance), leading_term: Term::Backlog })
            .collect();
        let entry = lightest(candidates.iter().map(|c| (c.instance, c.cost)), input.entropy);
        let Some(entry) = entry else { return Err(Refusal::UnknownModel) };
        let decode = is_prefill(input, entry).and_then(|prefill| {
            lightest(partners(input, prefill).map(|ix| (ix, requests(ix))), input.entropy >> 32)
        });
        Ok(conclude(input, self.name(), "fewest requests", entry, decode, candidates))
    }
}
