//! Least token load.

use super::{
    Input, Policy, PolicyName, Verdict, conclude, entry_cost, least_loaded_decode, lightest, load,
    open_entries,
};
use crate::decision::{Candidate, Refusal, Term};

/// Counts tokens, not requests: one 100 k prompt is not one "hello". Ties go to a random member, so that an idle
/// fleet is used evenly.
#[derive(Debug)]
pub(super) struct LeastLoad;

impl Policy for LeastLoad {
    fn name(&self) -> PolicyName {
        PolicyName::LeastLoad
    }

    fn decide(&mut self, input: &Input<'_>) -> Result<Verdict, Refusal> {
        let candidates: Vec<Candidate> = open_entries(input)?
            .into_iter()
            .map(|instance| Candidate {
                instance,
                cost: entry_cost(&load(input, instance)),
                leading_term: Term::Backlog,
            })
            .collect();
        let entry = lightest(candidates.iter().map(|c| (c.instance, c.cost)), input.entropy);
        let Some(entry) = entry else { return Err(Refusal::UnknownModel) };
        let decode = least_loaded_decode(input, entry);
        Ok(conclude(input, self.name(), "fewest tokens ahead", entry, decode, candidates))
    }
}
