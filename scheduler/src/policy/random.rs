//! Any engine.

use super::{Input, Policy, PolicyName, Verdict, conclude, drawn, is_prefill, open_entries, partners};
use crate::cluster::InstanceIx;
use crate::decision::{Candidate, Refusal, Term};

/// Draws an entry, and a decode for it.
#[derive(Debug)]
pub(super) struct Random;

impl Policy for Random {
    fn name(&self) -> PolicyName {
        PolicyName::Random
    }

    fn decide(&mut self, input: &Input<'_>) -> Result<Verdict, Refusal> {
        let open = open_entries(input)?;
        let Some(entry) = drawn(&open, input.entropy) else { return Err(Refusal::UnknownModel) };
        let decode = is_prefill(input, entry).and_then(|prefill| {
            let partners: Vec<InstanceIx> = partners(input, prefill).collect();
            drawn(&partners, input.entropy >> 32)
        });
        let candidates = open
            .into_iter()
            .map(|instance| Candidate { instance, cost: 0.0, leading_term: Term::None })
            .collect();
        Ok(conclude(input, self.name(), "drawn", entry, decode, candidates))
    }
}
