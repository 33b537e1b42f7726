//! What was found for a request that stays queued, so that the next rounds need not price all engines for it again.

use super::super::{PolicyInput, PolicyVerdict, is_available};
use super::round_plan::{MIN_CHANGE, PlannedPrompt};
use super::{CheapestPair, DecodeChoice, MIN_RECHECK, PredictivePolicy};
use crate::fleet::InstanceIndex;
use crate::seconds::Seconds;

/// How long a choice is kept: prices that change slowly, such as those of decodes, are not compared in the meantime.
const MAX_HELD: Seconds = 5.0;

/// Share of the time until a choice is due by which times may differ from it: it is compared again later.
const MIN_CHANGE_SHARE: f64 = 0.1;

/// A choice is not kept if the price of a second of an engine has changed by more than this share.
const MAX_CONGESTION_CHANGE: f64 = 0.2;

/// The cheapest engine of a request that is queued until that engine is due. Time alone changes the waits of all busy engines alike, so
/// it is compared only with engines that become free sooner than was expected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeldChoice {
    engine: InstanceIndex,
    decode: Option<DecodeChoice>,
    prompt: PlannedPrompt,
    /// Tokens of the prompt that the engine has.
    cached_tokens: u32,
    /// When the request can be sent there, or all engines are to be priced again.
    until: Seconds,
    /// When all engines are to be priced again.
    expires: Seconds,
    /// When the engine has finished its own work and that of queued requests before this one.
    free_at: Seconds,
    /// Time of the choice plus its cost.
    cost_end: Seconds,
    /// Price of a second of an engine when all were priced.
    congestion: f64,
    /// Most tokens of the prompt that any engine has in its memory.
    most_cached: u32,
}

impl PredictivePolicy {
    /// A choice for a request that is not due before `due` seconds have passed.
    pub(super) fn held_choice(
        &self,
        input: &PolicyInput<'_>,
        best: &CheapestPair,
        due: Seconds,
        most_cached: u32,
    ) -> HeldChoice {
        let due = due.max(MIN_RECHECK);
        let expires = input.now + MAX_HELD;
        HeldChoice {
            engine: best.prefill,
            decode: best.decode,
            prompt: PlannedPrompt::of(&best.estimate),
            cached_tokens: best.estimate.cached_tokens,
            until: (input.now + due).min(expires),
            expires,
            free_at: input.now + self.plan.backlog(best.prefill),
            cost_end: input.now + best.cost,
            congestion: self.congestion(input),
            most_cached,
        }
    }

    /// Queues the request by the choice of the last round, or by a cheaper engine that becomes free sooner than was expected. `None` if
    /// all engines are to be priced now.
    pub(super) fn keep_choice(
        &mut self,
        input: &PolicyInput<'_>,
        held: &HeldChoice,
    ) -> Option<PolicyVerdict> {
        if !self.meets_deadline(input) {
            return None;
        }
        let kept = self.update_choice(input, held);
        if kept.until <= input.now && self.plan.takes_price(true) {
            return None;
        }
        if kept.engine != held.engine {
            self.plan.withdraw(held.engine, held.prompt.service);
            self.plan.fill(kept.engine, kept.prompt.service);
        }
        if let Some(load) = input.loads.get(kept.engine.as_usize()).filter(|load| load.available) {
            self.plan.add(kept.engine, kept.prompt, load);
        }
        Some(PolicyVerdict::Defer { until: kept.until.max(input.now + MIN_RECHECK), held: Some(kept) })
    }

    /// The choice as of now. All engines are to be priced if it does not last longer than until now.
    fn update_choice(&mut self, input: &PolicyInput<'_>, held: &HeldChoice) -> HeldChoice {
        let congestion = self.congestion(input);
        let repriced = (congestion - held.congestion).abs() > MAX_CONGESTION_CHANGE * held.congestion;
        let least_change = MIN_CHANGE.max(MIN_CHANGE_SHARE * (held.until - input.now));
        let free_at = input.now + self.plan.backlog(held.engine);
        let is_later = free_at > held.free_at + least_change;
        if input.now >= held.until || is_later || repriced || !is_available(input, held.engine) {
            return HeldChoice { until: held.until.min(input.now), ..*held };
        }
        let is_sooner = free_at + least_change < held.free_at;
        let mut best = if is_sooner { self.price_again(input, held, held.engine) } else { None };
        let most = held.cost_end - input.now - least_change;
        let (second, tokens) = (1.0 + congestion, input.request.total_input_tokens());
        for number in 0..self.plan.sooner_free_len() {
            let Some(engine) = self.plan.sooner_free(number).filter(|engine| *engine != held.engine) else {
                continue;
            };
            let backlog = self.plan.backlog(engine);
            if backlog > most {
                continue;
            }
            self.plan.count_comparison(number);
            // Where no more of the prompt is cached, only less work before it makes it cheaper.
            let is_nearer = input.now + backlog + least_change < free_at;
            if !is_nearer && input.prediction.cached_tokens(engine) <= held.cached_tokens
                || self.least_cost(input, engine, tokens, second) > most
            {
                continue;
            }
            let current = best.or_else(|| self.price_again(input, held, held.engine));
            let other = self.price_again(input, held, engine);
            best = match (current, other) {
                (Some(current), Some(other)) if other.cost + least_change < current.cost => Some(other),
                _ => current,
            };
        }
        let Some(best) = best else { return *held };
        let due = self.due(&best);
        let is_due = due.seconds <= 0.0 || due.waits_for.is_some();
        let until = if is_due { input.now } else { input.now + due.seconds.max(MIN_RECHECK) };
        HeldChoice {
            until: until.min(held.expires),
            expires: held.expires,
            congestion: held.congestion,
            ..self.held_choice(input, &best, due.seconds, held.most_cached)
        }
    }

    /// The price of an engine as of now.
    fn price_again(
        &mut self,
        input: &PolicyInput<'_>,
        held: &HeldChoice,
        engine: InstanceIndex,
    ) -> Option<CheapestPair> {
        self.decodes.start_with(input.cluster.get(held.engine)?, held.decode);
        Some(self.cost_on(input, engine, held.most_cached)?.on(engine))
    }

    /// Records an engine that was chosen by pricing all.
    pub(super) fn replace_choice(&mut self, input: &PolicyInput<'_>, best: &CheapestPair) {
        match input.held {
            Some(held) if held.engine == best.prefill => return,
            Some(held) => self.plan.withdraw(held.engine, held.prompt.service),
            None => {}
        }
        self.plan.fill(best.prefill, best.estimate.service);
    }
}
