//! Power of two choices.

use super::{
    Input, Policy, PolicyName, Verdict, conclude, decode_cost, entry_cost, is_prefill, load, open_entries,
    partners,
};
use crate::cluster::InstanceIx;
use crate::decision::{Candidate, Refusal, Term};

/// Draws two different candidates and takes the less loaded one: nearly as even as the minimum, without the
/// herding that stale loads cause when every gateway picks the same minimum.
#[derive(Debug)]
pub(super) struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn name(&self) -> PolicyName {
        PolicyName::PowerOfTwo
    }

    fn decide(&mut self, input: &Input<'_>) -> Result<Verdict, Refusal> {
        let open = open_entries(input)?;
        let drawn = draw_two(&open, input.entropy);
        let priced = drawn.map(|ix| (ix, entry_cost(&load(input, ix))));
        let entry = lighter(priced);
        let decode = is_prefill(input, entry).map(|prefill| {
            let partners: Vec<InstanceIx> = partners(input, prefill).collect();
            // The high half of the entropy: independent of the draw above.
            lighter(draw_two(&partners, input.entropy >> 32).map(|ix| (ix, decode_cost(&load(input, ix)))))
        });
        let mut candidates: Vec<Candidate> = priced
            .into_iter()
            .map(|(instance, cost)| Candidate { instance, cost, leading_term: Term::Backlog })
            .collect();
        candidates.dedup_by_key(|candidate| candidate.instance);
        Ok(conclude(input, self.name(), "less loaded of two drawn", entry, decode, candidates))
    }
}

/// Two different members if there are two, otherwise the only one twice. `from` is not empty.
fn draw_two(from: &[InstanceIx], entropy: u64) -> [InstanceIx; 2] {
    let len = from.len();
    let first = (entropy & 0xffff) as usize % len;
    let step = if len > 1 { 1 + ((entropy >> 16) & 0xffff) as usize % (len - 1) } else { 0 };
    [from[first], from[(first + step) % len]]
}

fn lighter([a, b]: [(InstanceIx, f64); 2]) -> InstanceIx {
    if b.1 < a.1 { b.0 } else { a.0 }
}
