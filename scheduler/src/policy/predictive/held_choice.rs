//! What was found for a request that stays queued, so that the next rounds need not price all engines for it again.

use super::super::{PolicyInput, PolicyVerdict, is_available};
use super::round_plan::MIN_CHANGE;
use super::{CheapestPair, MIN_RECHECK, PredictivePolicy};
use crate::estimate::PrefillEstimate;
use crate::fleet::InstanceIndex;
use crate::seconds::Seconds;

/// How long a choice is kept: prices that change slowly, such as those of decodes, are not compared in the meantime.
const MAX_HELD: Seconds = 5.0;

/// A choice is not kept if the price of a second of an engine has changed by more than this share.
const MAX_CONGESTION_CHANGE: f64 = 0.2;

/// In one round, requests whose choice is not kept by time or price are priced on about this many engines in total, for at least
/// [`MIN_PRICED`] requests; the others a moment later. So a round of a large fleet is short, however many requests are queued.
const PRICES_PER_ROUND: usize = 4096;
const MIN_PRICED: usize = 4;

/// The cheapest engine of a request that is queued until that engine is due. It is kept while no other engine becomes free sooner than
/// it was expected to: time alone changes the waits of all busy engines alike.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeldChoice {
    engine: InstanceIndex,
    /// When the request can be sent there, or all engines are to be priced again.
    until: Seconds,
    /// When the engine has finished its own work and that of queued requests before this one.
    free_at: Seconds,
    /// Time of the choice plus its cost.
    cost_end: Seconds,
    /// Price of a second of an engine then.
    congestion: f64,
    estimate: PrefillEstimate,
}

impl PredictivePolicy {
    /// A choice for a request that is not due before `until`.
    pub(super) fn held_choice(
        &self,
        input: &PolicyInput<'_>,
        best: &CheapestPair,
        until: Seconds,
    ) -> HeldChoice {
        let CheapestPair { prefill, estimate, cost, .. } = *best;
        HeldChoice {
            engine: prefill,
            until: until.min(input.now + MAX_HELD),
            free_at: input.now + self.plan.backlog(prefill),
            cost_end: input.now + cost,
            congestion: self.congestion(input),
            estimate,
        }
    }

    /// Queues the request by the choice of the last round, if that is still the cheapest and not due.
    pub(super) fn keep_choice(&mut self, input: &PolicyInput<'_>, held: HeldChoice) -> Option<PolicyVerdict> {
        if !is_available(input, held.engine) || !self.meets_deadline(input) {
            return None;
        }
        let load = input.loads.get(held.engine.as_usize())?;
        let is_later = input.now + self.plan.backlog(held.engine) > held.free_at + MIN_CHANGE;
        let congestion = self.congestion(input);
        let repriced = (congestion - held.congestion).abs() > MAX_CONGESTION_CHANGE * held.congestion;
        if input.now >= held.until || is_later || repriced {
            let most = (PRICES_PER_ROUND / input.loads.len().max(1)).max(MIN_PRICED);
            if self.plan.priced < most {
                return None;
            }
            self.plan.add(held.engine, &held.estimate, load);
            return Some(PolicyVerdict::Defer { until: input.now + MIN_RECHECK, held: Some(held) });
        }
        let cost = held.cost_end - input.now;
        let (second, tokens) = (1.0 + congestion, input.request.total_input_tokens());
        for &engine in self.plan.sooner_free() {
            if engine == held.engine {
                return None;
            }
            if self.least_cost(input, engine, tokens, second) <= cost && is_available(input, engine) {
                return None;
            }
        }
        self.plan.add(held.engine, &held.estimate, load);
        Some(PolicyVerdict::Defer { until: held.until, held: Some(held) })
    }

    /// Notes what became of the choice of the last round, which was not kept.
    pub(super) fn replace_choice(&mut self, input: &PolicyInput<'_>, engine: InstanceIndex) {
        if let Some(held) = input.held.filter(|held| held.engine != engine) {
            self.plan.withdraw(held.engine);
        }
    }
}
