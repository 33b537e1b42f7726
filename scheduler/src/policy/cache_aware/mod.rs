//! smg's (the SGLang model gateway's) `cache_aware`, as it works without KV events.

mod routed_prefixes;

use std::collections::BTreeMap;

use self::routed_prefixes::{EngineNameHash, RoutedPrefixes, TrimTarget};
use super::name_hash::name_hash;
use super::{
    EngineChoice, Policy, PolicyInput, PolicyName, PolicyVerdict, active_requests, available_prefills,
    build_decision, least_loaded_decode,
};
use crate::decision::{CandidateEngine, CostTerm, RoutingDecision, ScheduleRejection};
use crate::fleet::InstanceIndex;
use crate::seconds::Seconds;

/// Affinity is given up when the busiest engine exceeds the idlest one by this number of requests in flight (smg's
/// `balance_abs_threshold`) and by [`BALANCE_RELATIVE`].
const BALANCE_ABSOLUTE: u32 = 32;
/// Factor by which the busiest engine must also exceed the idlest one (smg's `balance_rel_threshold`).
const BALANCE_RELATIVE: f64 = 1.1;
/// Share of the prompt that must have been sent to an engine before (smg's `cache_threshold`).
const CACHE_THRESHOLD: f64 = 0.5;
/// Interval between two checks of the table's size (smg's `eviction_interval_secs`).
const TRIM_INTERVAL: Seconds = 30.0;
/// Tokens recorded per engine. smg's library defaults to 10,000 and its command line to 67,108,864 (`--max-tree-size`).
/// The smaller value is less than one long prompt and would end affinity twice a minute, so the command line's is used.
const MAX_TOKENS_PER_ENGINE: u64 = 1 << 26;
/// Blocks recorded in all, counted once per engine: bounds memory to some 100 MB. smg has no such bound between two
/// checks.
const MAX_PAGES: usize = 1 << 20;

/// Sends a prompt to the engine that got most of it before, unless that is less than half of it or the fleet is out of
/// balance: then to the engine with the fewest requests.
///
/// It counts requests instead of tokens, infers caches from its own routing, and ignores the shared store. One engine
/// with many requests turns affinity off for all.
///
/// smg counts a request on its prefill until the response has ended, so that long responses hide how busy prefills are.
/// Here it counts until the first token, which favours the policy.
#[derive(Debug, Default)]
pub(super) struct CacheAwarePolicy {
    routed: RoutedPrefixes,
    /// Requests ever sent to each engine, as tie-breaker.
    processed: BTreeMap<EngineNameHash, u64>,
    trimmed_at: Seconds,
}

impl Policy for CacheAwarePolicy {
    fn name(&self) -> PolicyName {
        PolicyName::CacheAware
    }

    fn decide(&mut self, input: &PolicyInput<'_>) -> Result<PolicyVerdict, ScheduleRejection> {
        let open = available_prefills(input)?;
        let in_flight = |ix| active_requests(input, ix);
        let (entry, reason) = if out_of_balance(open.iter().map(|&ix| in_flight(ix))) {
            (self.fewest_requests(input, &open), "out of balance: fewest requests")
        } else {
            match self.longest_share(input) {
                Some((engine, share)) if share > CACHE_THRESHOLD => {
                    match open.iter().copied().find(|&ix| engine_id(input, ix) == Some(engine)) {
                        Some(ix) => (Some(ix), "most of the prompt was sent there before"),
                        None => {
                            (open.first().copied(), "the engine with the prefix is unavailable: first engine")
                        }
                    }
                }
                _ => (self.fewest_requests(input, &open), "unknown prompt: fewest requests"),
            }
        };
        let Some(entry) = entry else { return Err(ScheduleRejection::UnknownModel) };
        let candidates = open
            .into_iter()
            .map(|instance| CandidateEngine {
                instance,
                cost: f64::from(in_flight(instance)),
                leading_term: CostTerm::Backlog,
            })
            .collect();
        let decode = least_loaded_decode(input, entry);
        Ok(build_decision(input, self.name(), EngineChoice { reason, entry, decode, candidates }))
    }

    fn on_sent(&mut self, input: &PolicyInput<'_>, decision: &RoutingDecision) {
        let Some(engine) = engine_id(input, decision.route.prefill_instance()) else { return };
        *self.processed.entry(engine).or_default() += 1;
        self.routed.insert(&input.prediction.pages, input.prediction.page_tokens, engine);
        self.trim(input);
    }
}

impl CacheAwarePolicy {
    /// The engine that got the longest prefix of the prompt, and that prefix's share of the prompt.
    fn longest_share(&self, input: &PolicyInput<'_>) -> Option<(EngineNameHash, f64)> {
        let (engine, pages) = self.routed.longest(&input.prediction.pages)?;
        let tokens = pages as f64 * f64::from(input.prediction.page_tokens);
        Some((engine, tokens / f64::from(input.request.input_tokens.max(1))))
    }

    /// Fewest requests in flight, then fewest ever, then the first.
    fn fewest_requests(&self, input: &PolicyInput<'_>, open: &[InstanceIndex]) -> Option<InstanceIndex> {
        let processed = |ix| engine_id(input, ix).and_then(|id| self.processed.get(&id)).copied();
        open.iter().copied().min_by_key(|&ix| (active_requests(input, ix), processed(ix).unwrap_or(0), ix))
    }

    /// Enforces the size limits, and drops engines that left the fleet.
    fn trim(&mut self, input: &PolicyInput<'_>) {
        let due = input.now - self.trimmed_at >= TRIM_INTERVAL;
        let full = self.routed.record_count() > MAX_PAGES;
        if !due && !full {
            return;
        }
        self.trimmed_at = input.now;
        let fleet: Vec<EngineNameHash> =
            input.cluster.instances().iter().map(|instance| name_hash(&instance.name, 0)).collect();
        self.processed.retain(|engine, _| fleet.contains(engine));
        // Half of what fits, so that the next trim is not needed soon.
        let fair_share = MAX_PAGES / 2 / fleet.len().max(1);
        for engine in self.routed.engines().collect::<Vec<_>>() {
            if !fleet.contains(&engine) {
                self.routed.trim(engine, TrimTarget::Zero);
            } else if full {
                self.routed.trim(engine, TrimTarget::Pages(fair_share));
            } else {
                self.routed.trim(engine, TrimTarget::Tokens(MAX_TOKENS_PER_ENGINE));
            }
        }
    }
}

fn engine_id(input: &PolicyInput<'_>, ix: InstanceIndex) -> Option<EngineNameHash> {
    input.cluster.get(ix).map(|instance| name_hash(&instance.name, 0))
}

fn out_of_balance(in_flight: impl Iterator<Item = u32> + Clone) -> bool {
    let (fewest, busiest) = (in_flight.clone().min().unwrap_or(0), in_flight.max().unwrap_or(0));
    busiest - fewest > BALANCE_ABSOLUTE && f64::from(busiest) > BALANCE_RELATIVE * f64::from(fewest)
}

#[cfg(test)]
mod tests;
