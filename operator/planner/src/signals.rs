//! Turns the metrics of gateways into the capacity planner's signals.
//!
//! Gateways count tokens when a request ends. In a rising load that is late, so that rates of tokens are those of requests, which are known at once, times the mean
//! tokens of a request, which changes slowly.

mod change;
mod load;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use moongate_capacity::{DecodeSignals, PlannerInput, PrefillSignals};

use self::change::SampleChange;
use self::load::FleetLoad;
use crate::deployments_file::ScaledRole;
use crate::gateway_metrics::GatewaySample;
use crate::scrape::{GatewayAddress, ScrapeRound};

/// Longest time between two samples whose difference is used, in seconds.
const MAX_GAP_S: f64 = 60.0;
/// Shortest time, in seconds: rates over less are noise.
const MIN_GAP_S: f64 = 0.1;
/// Time constant of the mean tokens of a request, in seconds.
const MEAN_WINDOW_S: f64 = 600.0;
/// Requests, or chunks, that the counters of the first sample count for at most.
const MAX_SEED: f64 = 100.0;

/// What signals depend on besides the metrics.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SignalSettings {
    /// Roles of the engines that compute prompts, and of those that generate.
    pub(crate) roles: (ScaledRole, ScaledRole),
    pub(crate) ttft_target_s: f64,
    pub(crate) tpot_target_s: f64,
    /// Share of the requests that must meet a target; its percentile is the latency.
    pub(crate) share: f64,
    /// Tokens per second of one busy prefill replica, until they have been measured.
    pub(crate) first_prefill_tokens_per_s: Option<f64>,
    /// Tokens in the KV cache of one decode replica; without it, the KV cache counts as empty.
    pub(crate) decode_kv_tokens: Option<f64>,
}

/// The last samples, and slowly changing means.
#[derive(Debug, Default)]
pub(crate) struct SignalConverter {
    previous: Option<SampledRound>,
    /// Prompt tokens to compute per completed request.
    computed_per_request: DecayedRatio,
    /// Prompt tokens that a busy engine computes per second.
    busy_tokens_per_s: DecayedRatio,
    /// Generated tokens per chunk of a stream.
    tokens_per_chunk: DecayedRatio,
}

#[derive(Debug)]
struct SampledRound {
    time_s: f64,
    samples: BTreeMap<GatewayAddress, GatewaySample>,
    load: FleetLoad,
}

/// Sums with exponentially decreasing weights, and their ratio.
#[derive(Debug, Clone, Copy, Default)]
struct DecayedRatio {
    numerator: f64,
    denominator: f64,
}

impl DecayedRatio {
    fn seed(&mut self, numerator: f64, denominator: f64) {
        if self.denominator <= 0.0 && denominator > 0.0 {
            let weight = (MAX_SEED / denominator).min(1.0);
            *self = Self { numerator: numerator * weight, denominator: denominator * weight };
        }
    }

    fn add(&mut self, numerator: f64, denominator: f64, after_s: f64) {
        // What is known does not expire while nothing happens.
        if denominator <= 0.0 && numerator <= 0.0 {
            return;
        }
        let remaining = (-after_s / MEAN_WINDOW_S).exp();
        self.numerator = self.numerator * remaining + numerator;
        self.denominator = self.denominator * remaining + denominator;
    }

    fn ratio(&self) -> Option<f64> {
        (self.denominator > 1e-6).then(|| self.numerator / self.denominator)
    }
}

impl SignalConverter {
    /// Signals of the time since the previous round. Without the samples of all gateways of both rounds, there are none.
    pub(crate) fn convert(
        &mut self,
        time_s: f64,
        round: ScrapeRound,
        settings: &SignalSettings,
    ) -> PlannerInput {
        let nothing = PlannerInput::at(time_s);
        let samples = round.into_iter().map(|(address, sample)| Some((address, sample.ok()?)));
        let Some(samples) = samples.collect() else { return nothing };
        let current = SampledRound { time_s, load: FleetLoad::of(&samples), samples };
        let Some(previous) = self.previous.take() else {
            self.seed(&current);
            self.previous = Some(current);
            return nothing;
        };
        let after_s = time_s - previous.time_s;
        if after_s < MIN_GAP_S {
            self.previous = Some(previous);
            return nothing;
        }
        let change =
            SampleChange::between(&previous.samples, &current.samples).filter(|_| after_s <= MAX_GAP_S);
        let input = change.map(|change| self.signals(&previous, &current, &change, settings));
        self.previous = Some(current);
        input.unwrap_or(nothing)
    }

    fn seed(&mut self, first: &SampledRound) {
        let total = SampleChange::since_start(&first.samples);
        if let Some(computed) = total.computed_tokens() {
            self.computed_per_request.seed(computed, total.ended.completed);
        }
        if let Some(tokens) = total.completion_tokens {
            self.tokens_per_chunk.seed(tokens, total.chunks());
        }
    }

    fn signals(
        &mut self,
        previous: &SampledRound,
        current: &SampledRound,
        change: &SampleChange,
        settings: &SignalSettings,
    ) -> PlannerInput {
        let after_s = current.time_s - previous.time_s;
        if let Some(computed) = change.computed_tokens() {
            self.computed_per_request.add(computed, change.ended.completed, after_s);
        }
        if let Some(tokens) = change.completion_tokens {
            self.tokens_per_chunk.add(tokens, change.chunks(), after_s);
        }
        let has_engines =
            current.load.engines(settings.roles.0) + current.load.engines(settings.roles.1) > 0.0;
        let unknown = if has_engines { 0.0 } else { change.ended.unknown_model };
        let accepted = (change.ended.completed + change.ended.failed + change.in_flight).max(0.0);
        let arrived = accepted + change.ended.rejected + unknown;
        PlannerInput {
            requests_per_s: Some(arrived / after_s),
            prefill: self.prefill(previous, current, change, (accepted, arrived), settings),
            decode: self.decode(previous, current, change, settings),
            ..PlannerInput::at(current.time_s)
        }
    }

    fn prefill(
        &mut self,
        previous: &SampledRound,
        current: &SampledRound,
        change: &SampleChange,
        (accepted, arrived): (f64, f64),
        settings: &SignalSettings,
    ) -> PrefillSignals {
        let after_s = current.time_s - previous.time_s;
        let role = settings.roles.0;
        // Without a request there is no demand, whatever its tokens would be.
        let per_request = change.computed_tokens().and_then(|_| self.computed_per_request.ratio());
        let tokens_of = |requests: f64| match per_request {
            Some(tokens) => Some(requests * tokens),
            None => (requests <= 0.0 && change.computed_tokens().is_some()).then_some(0.0),
        };
        let held = |round: &SampledRound| {
            let queued = round.load.queued_for(settings.roles).map(|(prefill, _)| prefill);
            Some(round.load.pending_prefill_tokens(role) + tokens_of(queued?)?)
        };
        let backlog = held(current);
        let computed = tokens_of(accepted)
            .zip(backlog)
            .zip(held(previous))
            .map(|((accepted, now), before)| ((accepted - (now - before)) / after_s).max(0.0));
        let busy = current.load.busy_share(role);
        let busy = match (busy, previous.load.busy_share(role)) {
            (Some(now), Some(before)) => Some((now + before) / 2.0),
            (now, _) => now,
        };
        if let Some((computed, busy)) = computed.zip(busy) {
            let busy_s = busy * current.load.engines(role) * after_s;
            self.busy_tokens_per_s.add(computed * after_s, busy_s, after_s);
        }
        let measured = self.busy_tokens_per_s.ratio().filter(|tokens| *tokens > 0.0);
        let capacity = measured.or(settings.first_prefill_tokens_per_s);
        let cached = change.cached_tokens.zip(change.prompt_tokens).filter(|(_, prompt)| *prompt > 0.0);
        PrefillSignals {
            arriving_tokens_per_s: tokens_of(arrived).map(|tokens| tokens / after_s),
            computed_tokens_per_s: computed,
            busy_share: busy,
            queued_work_s: match backlog {
                Some(tokens) if tokens <= 0.0 => Some(0.0),
                tokens => tokens.zip(capacity).map(|(tokens, capacity)| tokens / capacity),
            },
            cache_hit_share: cached.map(|(cached, prompt)| (cached / prompt).clamp(0.0, 1.0)),
            ttft_s: change.ttft.quantile(settings.share),
            within_target_share: change.ttft.share_within(settings.ttft_target_s),
        }
    }

    fn decode(
        &self,
        previous: &SampledRound,
        current: &SampledRound,
        change: &SampleChange,
        settings: &SignalSettings,
    ) -> DecodeSignals {
        let after_s = current.time_s - previous.time_s;
        let role = settings.roles.1;
        // A chunk has at least one token, also if the engine reports none.
        let per_chunk = self.tokens_per_chunk.ratio().unwrap_or(1.0).max(1.0);
        let streamed = change.chunks() * per_chunk;
        let generated = change.completion_tokens.map(|tokens| match change.chunks() > 0.0 {
            true => streamed / after_s,
            false => tokens / after_s,
        });
        let occupied = current.load.active_decode_tokens(role);
        let kv_occupancy = match settings.decode_kv_tokens.map(|tokens| tokens * current.load.engines(role)) {
            // By configuration, it does not limit the batch.
            None => Some(0.0),
            Some(all) => (all > 0.0).then(|| (occupied / all).clamp(0.0, 1.0)),
        };
        DecodeSignals {
            generated_tokens_per_s: generated,
            running: Some((previous.load.in_flight(role) + current.load.in_flight(role)) / 2.0),
            waiting: current.load.queued_for(settings.roles).map(|(_, decode)| decode),
            kv_occupancy,
            tpot_s: change.itl.quantile(settings.share).map(|itl| itl / per_chunk),
            within_target_share: change.itl.share_within(settings.tpot_target_s * per_chunk),
        }
    }
}
