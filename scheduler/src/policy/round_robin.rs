//! Round robin.

use super::{
    EngineChoice, Policy, PolicyInput, PolicyName, PolicyVerdict, as_prefill, available_prefills,
    build_decision, pairable_decodes,
};
use crate::decision::{CandidateEngine, CostTerm, ScheduleRejection};
use crate::fleet::InstanceIndex;

/// Rotates through prefills. Decodes rotate too, shifted by one after every full rotation of the prefills, so that all
/// pairs occur even with as many decodes as prefills.
#[derive(Debug)]
pub(super) struct RoundRobinPolicy;

impl Policy for RoundRobinPolicy {
    fn name(&self) -> PolicyName {
        PolicyName::RoundRobin
    }

    fn decide(&mut self, input: &PolicyInput<'_>) -> Result<PolicyVerdict, ScheduleRejection> {
        let open = available_prefills(input)?;
        let turns = input.sequence / open.len() as u64;
        let entry = open[slot(input.sequence, open.len())];
        let decode = as_prefill(input, entry).map(|prefill| {
            let partners: Vec<InstanceIndex> = pairable_decodes(input, prefill).collect();
            partners[slot(input.sequence.wrapping_add(turns), partners.len())]
        });
        let candidates = open
            .into_iter()
            .map(|instance| CandidateEngine { instance, cost: 0.0, leading_term: CostTerm::None })
            .collect();
        Ok(build_decision(
            input,
            self.name(),
            EngineChoice { reason: "next in rotation", entry, decode, candidates },
        ))
    }
}

fn slot(sequence: u64, len: usize) -> usize {
    usize::try_from(sequence % len as u64).unwrap_or(0)
}
