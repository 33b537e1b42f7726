//! Power of two choices.

use super::{
    EngineChoice, Policy, PolicyInput, PolicyName, PolicyVerdict, as_prefill, available_prefills,
    build_decision, decode_cost, load, pairable_decodes, prefill_cost,
};
use crate::decision::{CandidateEngine, CostTerm, ScheduleRejection};
use crate::fleet::InstanceIndex;

/// Draws two different candidates and takes the less loaded one: nearly as even as the minimum, without the herding
/// that stale loads cause when every gateway picks the same minimum.
#[derive(Debug)]
pub(super) struct PowerOfTwoPolicy;

impl Policy for PowerOfTwoPolicy {
    fn name(&self) -> PolicyName {
        PolicyName::PowerOfTwo
    }

    fn decide(&mut self, input: &PolicyInput<'_>) -> Result<PolicyVerdict, ScheduleRejection> {
        let open = available_prefills(input)?;
        let drawn = draw_two(&open, input.entropy);
        let priced = drawn.map(|ix| (ix, prefill_cost(&load(input, ix))));
        let entry = cheaper(priced);
        let decode = as_prefill(input, entry).map(|prefill| {
            let partners: Vec<InstanceIndex> = pairable_decodes(input, prefill).collect();
            // The high half of the entropy: independent of the draw above.
            cheaper(draw_two(&partners, input.entropy >> 32).map(|ix| (ix, decode_cost(&load(input, ix)))))
        });
        let mut candidates: Vec<CandidateEngine> = priced
            .into_iter()
            .map(|(instance, cost)| CandidateEngine { instance, cost, leading_term: CostTerm::Backlog })
            .collect();
        candidates.dedup_by_key(|candidate| candidate.instance);
        Ok(build_decision(
            input,
            self.name(),
            EngineChoice { reason: "less loaded of two random engines", entry, decode, candidates },
        ))
    }
}

/// Two different members if there are two, otherwise the only one twice. `from` is not empty.
fn draw_two(from: &[InstanceIndex], entropy: u64) -> [InstanceIndex; 2] {
    let len = from.len();
    let first = (entropy & 0xffff) as usize % len;
    let step = if len > 1 { 1 + ((entropy >> 16) & 0xffff) as usize % (len - 1) } else { 0 };
    [from[first], from[(first + step) % len]]
}

fn cheaper([a, b]: [(InstanceIndex, f64); 2]) -> InstanceIndex {
    if b.1 < a.1 { b.0 } else { a.0 }
}
