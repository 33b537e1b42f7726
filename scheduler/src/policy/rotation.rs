//! Round robin.

use super::{Input, Policy, PolicyName, Verdict, conclude, is_prefill, open_entries, partners};
use crate::cluster::InstanceIx;
use crate::decision::{Candidate, Refusal, Term};

/// Takes entries in turn. Decodes turn too, shifted by one after every full turn of the entries, so that all
/// pairs come up even if there are as many decodes as entries.
#[derive(Debug)]
pub(super) struct RoundRobin;

impl Policy for RoundRobin {
    fn name(&self) -> PolicyName {
        PolicyName::RoundRobin
    }

    fn decide(&mut self, input: &Input<'_>) -> Result<Verdict, Refusal> {
        let open = open_entries(input)?;
        let turns = input.sequence / open.len() as u64;
        let entry = open[turn(input.sequence, open.len())];
        let decode = is_prefill(input, entry).map(|prefill| {
            let partners: Vec<InstanceIx> = partners(input, prefill).collect();
            partners[turn(input.sequence.wrapping_add(turns), partners.len())]
        });
        let candidates = open
            .into_iter()
            .map(|instance| Candidate { instance, cost: 0.0, leading_term: Term::None })
            .collect();
        Ok(conclude(input, self.name(), "next in turn", entry, decode, candidates))
    }
}

fn turn(sequence: u64, len: usize) -> usize {
    usize::try_from(sequence % len as u64).unwrap_or(0)
}
