//! Least token load.

use super::{
    Input, Policy, PolicyName, conclude, decode_cost, entry_cost, is_prefill, load, open_entries, partners,
};
use crate::cluster::InstanceIx;
use crate::decision::{Candidate, Decision, Refusal, Term};

/// Counts tokens, not requests: one 100 k prompt is not one "hello". Ties go to a random member, so that an idle
/// fleet is used evenly.
#[derive(Debug)]
pub(super) struct LeastLoad;

impl Policy for LeastLoad {
    fn name(&self) -> PolicyName {
        PolicyName::LeastLoad
    }

    fn decide(&self, input: &Input<'_>) -> Result<Decision, Refusal> {
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
        let decode = is_prefill(input, entry).and_then(|prefill| {
            let priced = partners(input, prefill).map(|ix| (ix, decode_cost(&load(input, ix))));
            lightest(priced, input.entropy >> 32)
        });
        Ok(conclude(input, self.name(), "fewest tokens ahead", entry, decode, candidates))
    }
}

/// The cheapest; among equals each is as likely as any other (reservoir of one, fed from `entropy`).
fn lightest(priced: impl Iterator<Item = (InstanceIx, f64)>, entropy: u64) -> Option<InstanceIx> {
    let mut best: Option<(InstanceIx, f64)> = None;
    let mut equals = 0_u64;
    let mut bits = entropy;
    for (ix, cost) in priced {
        match best {
            Some((_, least)) if cost > least => {}
            Some((_, least)) if cost == least => {
                equals += 1;
                bits = bits.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                if (bits >> 33).is_multiple_of(equals) {
                    best = Some((ix, cost));
                }
            }
            _ => {
                equals = 1;
                best = Some((ix, cost));
            }
        }
    }
    best.map(|(ix, _)| ix)
}
