//! Least predicted time to first token, decided as late as possible.

mod decode_choice;
mod due_time;
mod held_choice;
mod local_prefill;
mod pricing_budget;
mod retry_reservations;
mod round_plan;
mod tenant_usage;

pub use self::held_choice::HeldChoice;

use self::decode_choice::{DecodeChoice, DecodeChoiceCache};
use self::local_prefill::local_choice;
use self::retry_reservations::RetryReservations;
use self::round_plan::{PlannedPrompt, RoundPlan};
use self::tenant_usage::TenantUsage;
use super::min_cost::MinCostSampler;
use super::name_hash::splitmix64;
use super::{
    EngineChoice, Policy, PolicyInput, PolicyName, PolicyVerdict, ScheduleRound, build_decision, is_available,
};
use crate::decision::{CandidateEngine, CostBreakdown, CostTerm, RoutingDecision, ScheduleRejection};
use crate::estimate::{EngineView, PrefillBacklog, PrefillEstimate};
use crate::fleet::{InstanceIndex, InstanceRole};
use crate::options::SchedulerOptions;
use crate::seconds::Seconds;

/// Minimum time before a queued request is decided again if nothing happens.
const MIN_RECHECK: Seconds = 0.001;

/// Upper limit of the congestion price of a second of an engine, in seconds.
const MAX_CONGESTION: f64 = 10.0;

/// Once this many requests are planned for every engine, the rest is decided only while some engine is idle; the same
/// for requests that wait for decodes.
const MAX_PLANNED_PER_ENGINE: usize = 2;

/// In a large fleet, about this many of the engines that have nothing of a prompt are priced, evenly spread, and the idlest one: among so
/// many, one is about as good as the best.
const PRICED_ENGINES: usize = 32;

/// From this number of pairs of a queued request and an engine on, what was found for a request is kept between rounds. In small fleets
/// that costs 3 % of the mean time to first token on the synthetic trace, and pricing all engines takes microseconds.
const LARGE_ROUND: usize = 4096;

/// Assumed upper limit of an engine's slowdown against the fastest one, when checking whether a request certainly meets
/// its target.
const MAX_SLOWDOWN: f64 = 2.0;

/// A request can be overtaken by shorter ones for this many times the difference of their computations. A fleet with more
/// load than it can serve falls back to the order of arrival once its backlog is older than that, and then everybody waits:
/// 20 costs three times the mean of 100 at 1.5 times the conversation trace's rate, and at the peak of a tide, and a tenth
/// at 1.2 times the synthetic trace's. Larger values gain nothing, and long requests wait longer.
const OVERTAKING_SERVICES: f64 = 100.0;

/// Price of joining the pass of other prompts, as a share of the pass's constant time and of the prompt that is not cached there:
/// among engines where a first token comes about as early, requests without a common prefix are spread.
const SHARED_PASS_PRICE: f64 = 0.2;

/// Each step of priority scales a request's effective length by this factor.
const PRIORITY_STEP: f64 = 0.5;

/// Prices every pair in seconds and takes the cheapest. A request whose cheapest engine is busy stays queued, because a
/// better engine may become free or a shorter request may arrive before; it is dispatched early only to let the engine
/// fetch its blocks in the meantime. Queued requests go shortest first, among those that arrived within a time in
/// proportion to their computation.
///
/// Within a round each queued request is planned after those before it, so that two requests do not both wait for the
/// same engine when only one can get it.
#[derive(Debug)]
pub(super) struct PredictivePolicy {
    settings: SchedulerOptions,
    plan: RoundPlan,
    decodes: DecodeChoiceCache,
    tenants: TenantUsage,
    retry_reservations: RetryReservations,
    /// [`LARGE_ROUND`], except in tests.
    large_round: usize,
}

#[derive(Debug, Clone, Copy)]
struct CheapestPair {
    prefill: InstanceIndex,
    decode: Option<DecodeChoice>,
    estimate: PrefillEstimate,
    cost: Seconds,
}

/// A request's price on one engine.
struct PricedEngine {
    estimate: PrefillEstimate,
    terms: CostBreakdown,
    /// The decode that would take over.
    decode: Option<DecodeChoice>,
}

impl CheapestPair {
    fn ttft(&self) -> Seconds {
        ttft(&self.estimate, self.decode)
    }
}

impl PricedEngine {
    fn on(self, prefill: InstanceIndex) -> CheapestPair {
        CheapestPair { prefill, decode: self.decode, estimate: self.estimate, cost: self.terms.cost() }
    }

    fn ttft(&self) -> Seconds {
        ttft(&self.estimate, self.decode)
    }
}

/// Seconds until the first token, if the prompt is computed while it waits for room on the decode.
fn ttft(estimate: &PrefillEstimate, decode: Option<DecodeChoice>) -> Seconds {
    let room = decode.map_or(0.0, |choice| choice.wait.max(choice.pace_wait));
    estimate.ttft().max(room + estimate.handover)
}

impl PredictivePolicy {
    pub(super) fn new(settings: &SchedulerOptions) -> Self {
        Self {
            settings: settings.clone(),
            plan: RoundPlan::default(),
            decodes: DecodeChoiceCache::default(),
            tenants: TenantUsage::default(),
            retry_reservations: RetryReservations::default(),
            large_round: LARGE_ROUND,
        }
    }

    /// The request's price on one engine; `None` if the engine cannot be used.
    fn cost_on(
        &mut self,
        input: &PolicyInput<'_>,
        ix: InstanceIndex,
        most_cached: u32,
    ) -> Option<PricedEngine> {
        if !is_available(input, ix) {
            return None;
        }
        let (instance, load) = (input.cluster.get(ix)?, input.loads.get(ix.as_usize())?);
        let backlog = PrefillBacklog {
            wait: load.prefill_wait + self.plan.work(ix),
            next_pass: self.plan.next_pass(ix).unwrap_or(load.next_pass),
        };
        let tokens = input.request.total_input_tokens();
        let engine = EngineView { index: ix, instance, load };
        let estimate = PrefillEstimate::new(tokens, input.prediction, engine, backlog)
            .after_load(input.adapters.of(ix).wait());
        let target = self.settings.tpot_target;
        let decode = match instance.role {
            InstanceRole::Prefill => {
                Some(self.decodes.cheapest(input, &self.plan, target, instance, estimate.handover)?)
            }
            InstanceRole::Decode => Some(local_choice(input, &self.plan, target?, ix, &estimate)?),
            InstanceRole::Plain => None,
        };
        // Both engines load at the same time, before either gets the request.
        let adapter_load = decode.map_or(0.0, |choice| choice.adapter_load).max(estimate.adapter_load);
        let estimate = estimate.after_load(adapter_load);
        // While it waits for the decode, the prompt is computed.
        let computed = estimate.wait.max(estimate.ready()) + estimate.service;
        let decode_cost = decode
            .map_or(0.0, |choice| choice.cost + (choice.wait.max(choice.pace_wait) - computed).max(0.0));
        let hits = input.prediction.hits(ix);
        let copied = most_cached.saturating_sub(hits.l1_tokens.saturating_add(hits.l2_tokens));
        let second = self.congestion(input);
        // What the copy evicts comes back in the same way as the copy itself, from the store if that has it.
        let stored = hits.l3_tokens.min(copied);
        let per_stored = load.fetch_per_token(&instance.cache).min(load.service.a);
        let repeated = f64::from(copied - stored);
        let returns = load.service.a * repeated + per_stored * f64::from(stored);
        // Where the copy is, the rest of the prompt shares a pass with others; elsewhere it takes one of its own.
        let own_pass = load.service.c0 * repeated / tokens.max(1) as f64;
        let duplicate = (self.settings.duplicate_price * returns + own_pass) * (1.0 + second);
        // A shared pass is no reason to put many requests on one engine while others have passes of their own: they also decode.
        let shared = if estimate.shares_pass { estimate.pass_constant } else { 0.0 };
        let occupied = estimate.service + shared;
        // A second of a slow engine costs less, because less would be done in it.
        let uncached = estimate.new_tokens as f64 / tokens.max(1) as f64;
        let congestion = second * occupied / load.service.speed + SHARED_PASS_PRICE * uncached * shared;
        let length = self.length_mismatch_price(input, ix, occupied / load.service.speed) * occupied
            / (1.0 + self.congestion(input));
        let PrefillEstimate { wait, fetch, service, handover, cached_tokens, .. } = estimate;
        let terms = CostBreakdown {
            wait,
            fetch,
            service,
            handover,
            adapter_load,
            duplicate,
            congestion,
            length,
            decode: decode_cost,
            cached_tokens,
        };
        Some(PricedEngine { estimate, terms, decode })
    }

    /// Cost of a second of an engine for the requests queued behind this one: an engine's share of them waits that much
    /// longer.
    fn congestion(&self, input: &PolicyInput<'_>) -> f64 {
        let engines = input.cluster.prefills(input.request.model).len().max(1);
        (self.settings.congestion_price * self.plan.remaining() as f64 / engines as f64).min(MAX_CONGESTION)
    }

    /// Price of a second of the engine at `ix` for a prompt that takes `service`. Engines form a scale by their index,
    /// from short prompts to long ones, each with the same part of the work. So a long prompt delays few short ones and
    /// evicts few of their blocks.
    fn length_mismatch_price(&self, input: &PolicyInput<'_>, ix: InstanceIndex, service: Seconds) -> f64 {
        let entries = input.cluster.prefills(input.request.model);
        let Ok(position) = entries.binary_search(&ix) else { return 0.0 };
        // Prompts of one length are spread over the engines for that length.
        let chance = splitmix64(input.arrived.to_bits()) as f64 / u64::MAX as f64;
        let Some(shorter) = input.prefill_times.share_below(service, chance) else { return 0.0 };
        let position = (position as f64 + 0.5) / entries.len().max(1) as f64;
        self.settings.length_price * input.uncached_share * (position - shorter).abs()
    }

    /// The cheapest pair. Prices the most promising engines first, so that most others need not be priced: no engine
    /// costs less than its backlog plus the computation of what it cannot have cached. Of a large fleet, engines without any of the
    /// prompt's blocks are sampled.
    fn cheapest(
        &mut self,
        input: &PolicyInput<'_>,
        home: InstanceIndex,
        most_cached: u32,
    ) -> Option<CheapestPair> {
        self.decodes.clear();
        let entries = input.cluster.prefills(input.request.model);
        let idlest = self.plan.idlest(entries)?;
        let tokens = input.request.total_input_tokens();
        let second = 1.0 + self.congestion(input);
        let mut lightest = MinCostSampler::new(input.entropy);
        let mut offer = |policy: &mut Self, entry| {
            if let Some(priced) = policy.cost_on(input, entry, most_cached) {
                let pair = priced.on(entry);
                lightest.offer(pair, pair.cost);
            }
            lightest.least().unwrap_or(f64::INFINITY)
        };
        let mut lowest = offer(self, idlest);
        if home != idlest {
            lowest = offer(self, home);
        }
        let stride = (entries.len() / PRICED_ENGINES).max(1);
        let first = usize::try_from(input.entropy % stride as u64).unwrap_or(0);
        for prices_sample in [true, false] {
            // The others only if none of the sample can be used: few engines may have a decode.
            if !prices_sample && lowest.is_finite() {
                break;
            }
            // Without any hits, the others need not be looked at.
            let is_sample_only = prices_sample && input.prediction.per_instance.is_empty();
            let (skipped, step) = if is_sample_only { (first, stride) } else { (0, 1) };
            let mut next = first;
            for (position, &entry) in entries.iter().enumerate().skip(skipped).step_by(step) {
                let hits = input.prediction.hits(entry);
                let is_next = position == next;
                next += if is_next { stride } else { 0 };
                let is_sampled = is_next || hits.l1_tokens > 0 || hits.l2_tokens > 0;
                if entry == idlest || entry == home || is_sampled != prices_sample {
                    continue;
                }
                if self.least_cost(input, entry, tokens, second) <= lowest {
                    lowest = offer(self, entry);
                }
            }
        }
        for &decode in self.local_prefills(input) {
            offer(self, decode);
        }
        lightest.into_best().map(|(best, _)| best)
    }

    /// Decodes that may compute prompts, too: only a target bounds what that costs their sequences.
    fn local_prefills<'a>(&self, input: &PolicyInput<'a>) -> &'a [InstanceIndex] {
        if self.settings.tpot_target.is_none() {
            return &[];
        }
        input.cluster.local_prefills(input.request.model)
    }

    /// Lower limit of the request's price on an engine: its backlog and the computation of what it cannot have cached.
    fn least_cost(&self, input: &PolicyInput<'_>, ix: InstanceIndex, tokens: u64, second: f64) -> Seconds {
        let computation = self.plan.min_service(tokens, input.prediction.hits(ix));
        self.plan.backlog(ix) + second * computation - self.shareable(input, ix)
    }

    /// Upper limit of what a prompt saves on the engine by joining a pass.
    fn shareable(&self, input: &PolicyInput<'_>, ix: InstanceIndex) -> Seconds {
        let Some(load) = input.loads.get(ix.as_usize()) else { return 0.0 };
        let pass = self.plan.next_pass(ix).unwrap_or(load.next_pass);
        if pass.room > 0 { load.service.c0 * load.service.speed } else { 0.0 }
    }

    /// The decision with all candidates and their costs, or with the chosen one if it is not kept.
    fn explain(
        &mut self,
        input: &PolicyInput<'_>,
        best: &CheapestPair,
        most_cached: u32,
        reason: &'static str,
    ) -> PolicyVerdict {
        let (mut candidates, mut all_terms) = (Vec::new(), Vec::new());
        let all =
            input.cluster.prefills(input.request.model).iter().chain(self.local_prefills(input)).copied();
        let chosen = std::iter::once(best.prefill);
        let explained: Vec<InstanceIndex> = if input.is_explained { all.collect() } else { chosen.collect() };
        for instance in explained {
            let Some(PricedEngine { terms, .. }) = self.cost_on(input, instance, most_cached) else {
                continue;
            };
            candidates.push(CandidateEngine { instance, cost: terms.cost(), leading_term: terms.leading() });
            all_terms.push(terms);
        }
        let mut verdict = build_decision(
            input,
            self.name(),
            EngineChoice {
                reason,
                entry: best.prefill,
                decode: best.decode.map(|choice| choice.decode).filter(|&decode| decode != best.prefill),
                candidates,
            },
        );
        if let PolicyVerdict::Send(decision) = &mut verdict {
            let order = best.estimate.service + self.settings.engine_ageing * input.arrived;
            decision.engine_priority = Some((order * 1000.0) as i64);
            decision.predicted_ttft = Some(best.ttft());
            decision.explanation.terms = all_terms;
        }
        verdict
    }

    /// Latest time of the first token that meets the target.
    fn deadline(&self, input: &PolicyInput<'_>) -> Option<Seconds> {
        let target = input.request.ttft_target.or_else(|| {
            let target = self.settings.ttft_target?;
            let entries = input.cluster.prefills(input.request.model);
            let cold = entries
                .iter()
                .filter_map(|ix| input.loads.get(ix.as_usize()))
                .map(|load| load.service.seconds(input.request.total_input_tokens(), 0) / load.service.speed);
            Some(target.base.max(target.cold_factor * cold.fold(f64::INFINITY, f64::min)))
        })?;
        Some(input.arrived + target)
    }

    /// The earliest possible first token, if the request were next on every engine.
    fn earliest_first_token(&mut self, input: &PolicyInput<'_>) -> Seconds {
        let plan = std::mem::take(&mut self.plan);
        let entries = input.cluster.prefills(input.request.model).iter();
        let engines = entries.chain(self.local_prefills(input));
        let times = engines.filter_map(|&ix| self.cost_on(input, ix, 0));
        let soonest = times.map(|priced| priced.ttft()).fold(f64::INFINITY, f64::min);
        self.plan = plan;
        input.now + soonest
    }

    fn meets_deadline(&self, input: &PolicyInput<'_>) -> bool {
        let Some(latest) = self.deadline(input) else { return true };
        let first = input.cluster.prefills(input.request.model).first();
        let cold = first
            .and_then(|ix| input.loads.get(ix.as_usize()))
            .map_or(f64::INFINITY, |load| load.service.seconds(input.request.total_input_tokens(), 0));
        input.now + self.plan.max_wait() + MAX_SLOWDOWN * cold < latest
    }

    /// Expected computation, with the caches of the engine where it is cheapest.
    fn min_service(input: &PolicyInput<'_>) -> Seconds {
        let tokens = input.request.total_input_tokens();
        let entries = input.cluster.prefills(input.request.model);
        let stride = (entries.len() / PRICED_ENGINES).max(1);
        let step = if input.prediction.per_instance.is_empty() { stride } else { 1 };
        let services = entries.iter().enumerate().step_by(step).filter_map(|(position, &ix)| {
            let cached = u64::from(input.prediction.hits(ix).total());
            // Engines that have nothing of it differ only in their speed.
            let load = input.loads.get(ix.as_usize()).filter(|_| cached > 0 || position % stride == 0)?;
            Some(load.service.seconds(tokens.saturating_sub(cached).max(1), cached))
        });
        services.fold(f64::INFINITY, f64::min)
    }

    fn send_or_defer(&mut self, input: &PolicyInput<'_>) -> Result<PolicyVerdict, ScheduleRejection> {
        self.plan.next_request();
        let (waiting, due) = self.plan.waiting_for_decodes();
        if waiting >= MAX_PLANNED_PER_ENGINE * input.cluster.decodes(input.request.model).len().max(1)
            && self.meets_deadline(input)
        {
            return Ok(defer(input, due));
        }
        if let Some(held) = input.held
            && let Some(verdict) = self.keep_choice(input, held)
        {
            return Ok(verdict);
        }
        let entries = input.cluster.prefills(input.request.model);
        if let Some(due) = self.recheck_after(input) {
            return Ok(defer(input, due));
        }
        let is_large = self.plan.queued() * entries.len() >= self.large_round;
        if is_large && input.held.is_none() && !self.plan.takes_price(false) {
            return Ok(defer(input, MIN_RECHECK));
        }
        let home = most_cached(input);
        let best = home.and_then(|(home, cached)| Some((self.cheapest(input, home, cached)?, cached)));
        let Some((best, most_cached)) = best else {
            // Returns the reason if there is no candidate.
            super::available_prefills(input)?;
            return Err(ScheduleRejection::UnknownModel);
        };
        if let Some(latest) = self.deadline(input)
            && input.now + best.ttft() > latest
            && self.earliest_first_token(input) > latest
        {
            let service = Self::min_service(input);
            let share = self.settings.reserved_share;
            let retry_after = self.retry_reservations.reserve(input, service, entries.len(), share);
            return Err(ScheduleRejection::Overloaded { retry_after });
        }
        self.replace_choice(input, &best);
        let due = self.due(&best);
        if let Some(choice) = due.waits_for {
            self.plan.add_decode(choice.decode, input.expected_batch(), due.seconds);
        }
        if due.seconds <= 0.0 {
            let is_local = best.decode.is_some_and(|choice| choice.decode == best.prefill);
            let reason = if is_local {
                "least predicted TTFT, with the prompt computed by the decode"
            } else if best.estimate.pass_wait <= self.settings.slack {
                "least predicted TTFT"
            } else if best.estimate.adapter_load > 0.0 {
                "early, to load its adapter"
            } else {
                "early, to fetch its blocks"
            };
            return Ok(self.explain(input, &best, most_cached, reason));
        }
        let after = due.seconds.max(MIN_RECHECK);
        let held = self.held_choice(input, &best, after, most_cached);
        if let Some(load) = input.loads.get(best.prefill.as_usize()) {
            self.plan.add(best.prefill, PlannedPrompt::of(&best.estimate), load);
        }
        // How fast decodes will be is not compared between rounds.
        let keeps = is_large && due.waits_for.is_none();
        Ok(PolicyVerdict::Defer { until: input.now + after, held: keeps.then_some(held) })
    }
}

/// The available engine with the most of the prompt in its memory, and how many tokens that are.
fn most_cached(input: &PolicyInput<'_>) -> Option<(InstanceIndex, u32)> {
    let entries = input.cluster.prefills(input.request.model);
    let mut most: Option<(InstanceIndex, u32)> = None;
    let searched = if input.prediction.per_instance.is_empty() { &[][..] } else { entries };
    for &ix in searched {
        let hits = input.prediction.hits(ix);
        let tokens = hits.l1_tokens.saturating_add(hits.l2_tokens);
        if tokens >= most.map_or(1, |(_, most)| most) && is_available(input, ix) {
            most = Some((ix, tokens));
        }
    }
    most.or_else(|| entries.iter().rev().find(|&&ix| is_available(input, ix)).map(|&ix| (ix, 0)))
}

/// Queues a request without a choice.
fn defer(input: &PolicyInput<'_>, due: Seconds) -> PolicyVerdict {
    PolicyVerdict::Defer { until: input.now + due.max(MIN_RECHECK), held: None }
}

impl Policy for PredictivePolicy {
    fn name(&self) -> PolicyName {
        PolicyName::Predictive
    }

    /// Arrival plus a multiple of the effective computation: a request overtakes another one only if it arrived less
    /// than that multiple of the difference later, so that none starves, however many shorter ones arrive. The tenant's
    /// factor on that multiple is bounded for the same reason.
    fn rank(&self, input: &PolicyInput<'_>) -> f64 {
        if self.retry_reservations.has_reservation(input) {
            return f64::NEG_INFINITY;
        }
        let priority = PRIORITY_STEP.powi(input.request.priority.clamp(-16, 16));
        input.arrived + OVERTAKING_SERVICES * Self::min_service(input) * priority
    }

    fn tenant_factor(&self, tenant: Option<u64>) -> f64 {
        self.tenants.factor(tenant)
    }

    fn begin_round(&mut self, round: &ScheduleRound<'_>) {
        self.plan.start_round(round, &self.settings);
        self.tenants.start_round();
    }

    fn planned_work(&self, engine: InstanceIndex) -> Seconds {
        self.plan.work(engine)
    }

    fn decide(&mut self, input: &PolicyInput<'_>) -> Result<PolicyVerdict, ScheduleRejection> {
        let verdict = self.send_or_defer(input);
        if let Ok(PolicyVerdict::Defer { .. }) = verdict {
            self.tenants.record_queued(input.request.tenant);
        }
        verdict
    }

    fn on_sent(&mut self, input: &PolicyInput<'_>, decision: &RoutingDecision) {
        let entry = decision.route.prefill_instance();
        let (Some(instance), Some(load)) = (input.cluster.get(entry), input.loads.get(entry.as_usize()))
        else {
            return;
        };
        let tokens = input.request.total_input_tokens();
        let estimate = PrefillEstimate::new(
            tokens,
            input.prediction,
            EngineView { index: entry, instance, load },
            PrefillBacklog::of(load),
        );
        self.plan.add_dispatched(entry, PlannedPrompt::of(&estimate), load);
        self.retry_reservations.redeem(input);
        let engines = input.cluster.prefills(input.request.model).len().max(1);
        self.tenants.record_sent(input.request.tenant, estimate.service / engines as f64);
    }
}

impl CostBreakdown {
    /// Sum of the terms, in seconds.
    fn cost(&self) -> f64 {
        let own = self.wait.max(self.fetch) + self.service + self.handover;
        own + self.adapter_load + self.duplicate + self.congestion + self.length + self.decode
    }

    fn leading(&self) -> CostTerm {
        if self.adapter_load > self.wait.max(self.fetch).max(self.service) {
            CostTerm::AdapterLoad
        } else if self.wait.max(self.fetch) < self.service {
            CostTerm::Service
        } else if self.wait < self.fetch {
            CostTerm::Fetch
        } else {
            CostTerm::Backlog
        }
    }
}

#[cfg(test)]
mod tests;
