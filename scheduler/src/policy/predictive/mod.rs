//! Least predicted time to first token, decided as late as possible.

mod decodes;
mod plan;
mod promises;
mod tenants;

use self::decodes::Decodes;
use self::plan::Plan;
use self::promises::Promises;
use self::tenants::Tenants;
use super::lightest::Lightest;
use super::name_hash::scatter;
use super::{Input, Policy, PolicyName, Round, Verdict, available, conclude};
use crate::cluster::{InstanceIx, Load, Role};
use crate::decision::{Candidate, Decision, Refusal, Term, Terms};
use crate::estimate::{Estimate, FETCH_LATENCY};
use crate::request::Seconds;
use crate::settings::Settings;

/// A held request is not asked about again before this time has passed, if nothing happens.
const SHORTEST_NAP: Seconds = 0.001;

/// A second of an engine never costs more than so many of others' waiting: far behind, it does not matter any more.
const MOST_CONGESTED: f64 = 10.0;

/// Once so many requests are planned for every engine, the rest is only looked at while some engine has nothing to do.
const ENOUGH_PLANNED: usize = 2;

/// How much slower than the first of its kind an engine is thought to be at most, when it is asked whether a request is surely
/// in time.
const SLOWEST: f64 = 2.0;

/// A request that has waited so many times its own expected service is one of the aged.
const AGED_AFTER: f64 = 5.0;

/// Each step of priority makes a request count as if it were so much shorter.
const PRIORITY_STEP: f64 = 0.5;

/// Prices every pair in seconds and takes the cheapest. A request whose cheapest engine is busy is held, because until that
/// engine is free a better one may be, or a shorter request may come; it is handed over early only to let the engine fetch its
/// pages meanwhile. Held requests go shortest first.
///
/// Within a round each held request is planned behind those before it, so that two requests do not both wait for the same
/// engine when only one can have it.
#[derive(Debug)]
pub(super) struct Predictive {
    settings: Settings,
    /// Anew in every round.
    plan: Plan,
    decodes: Decodes,
    tenants: Tenants,
    promises: Promises,
    /// Computation that those who waited longest may still have.
    aged_credit: Seconds,
}

/// The cheapest pair found.
#[derive(Debug, Clone, Copy)]
struct Best {
    entry: InstanceIx,
    decode: Option<InstanceIx>,
    estimate: Estimate,
}

impl Predictive {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            settings: settings.clone(),
            plan: Plan::default(),
            decodes: Decodes::default(),
            tenants: Tenants::default(),
            promises: Promises::default(),
            aged_credit: 0.0,
        }
    }

    /// The request's terms on one engine, with the decode that would take over; `None` if it cannot be used.
    fn price(
        &mut self,
        input: &Input<'_>,
        ix: InstanceIx,
        most_cached: u32,
    ) -> Option<(Estimate, Terms, Option<InstanceIx>)> {
        if !available(input, ix) {
            return None;
        }
        let (instance, load) = (input.cluster.get(ix)?, input.loads.get(ix.at())?);
        let wait = load.prefill_wait + self.plan.work(ix);
        let tokens = input.request.total_input_tokens();
        let estimate = Estimate::of(tokens, input.prediction, (ix, instance), load, wait);
        let (decode, decode_cost) = if instance.role == Role::Prefill {
            let (decode, cost) = self.decodes.cheapest(input, instance, estimate.handover)?;
            (Some(decode), cost)
        } else {
            (None, 0.0)
        };
        let hits = input.prediction.hits(ix);
        let copied = most_cached.saturating_sub(hits.l1_tokens.saturating_add(hits.l2_tokens));
        let second = self.congestion(input);
        let recomputed = load.service.a * f64::from(copied);
        let duplicate = self.settings.duplicate_price * recomputed * (1.0 + second);
        // A second of a slow engine is worth less, because less would be done in it.
        let congestion = second * estimate.service / load.service.speed;
        let length = self.out_of_place(input, ix, estimate.service / load.service.speed) * estimate.service
            / (1.0 + self.congestion(input));
        let Estimate { wait, fetch, service, handover, cached_tokens, .. } = estimate;
        let terms = Terms {
            wait,
            fetch,
            service,
            handover,
            duplicate,
            congestion,
            length,
            decode: decode_cost,
            cached_tokens,
        };
        Some((estimate, terms, decode))
    }

    /// What a second of an engine costs those who are held behind this request: each of an engine's share of them waits so
    /// much longer.
    fn congestion(&self, input: &Input<'_>) -> f64 {
        let engines = input.cluster.entries(input.request.model).len().max(1);
        (self.settings.congestion_price * self.plan.behind() as f64 / engines as f64).min(MOST_CONGESTED)
    }

    /// Price of a second of the engine at `ix` for a prompt that takes `service`. Engines are thought of as a row, by their index, from
    /// those for the shortest prompts to those for the longest, each with the same part of the work. So a long prompt makes few
    /// short ones wait or look for another engine, and drives few of their pages out.
    fn out_of_place(&self, input: &Input<'_>, ix: InstanceIx, service: Seconds) -> f64 {
        let entries = input.cluster.entries(input.request.model);
        let place = entries.partition_point(|entry| entry.at() < ix.at());
        // Prompts of one length are spread over the engines of that length.
        let chance = scatter(input.arrived.to_bits()) as f64 / u64::MAX as f64;
        let Some(shorter) = input.mix.shorter(service, chance) else { return 0.0 };
        let place = (place as f64 + 0.5) / entries.len().max(1) as f64;
        self.settings.length_price * (place - shorter).abs()
    }

    /// The cheapest pair. Looks first at the engines that are likeliest to be it, so that most others need no price: no engine costs
    /// less than its backlog and the computation of what it cannot have cached.
    fn cheapest(&mut self, input: &Input<'_>, (home, most_cached): (InstanceIx, u32)) -> Option<Best> {
        self.decodes.begin();
        let entries = input.cluster.entries(input.request.model);
        let idlest = entries
            .iter()
            .copied()
            .min_by(|&a, &b| self.backlog(input, a).total_cmp(&self.backlog(input, b)))?;
        let tokens = input.request.total_input_tokens();
        let second = 1.0 + self.congestion(input);
        let mut lightest = Lightest::new(input.entropy);
        let mut offer = |policy: &mut Self, entry| {
            if let Some((estimate, terms, decode)) = policy.price(input, entry, most_cached) {
                lightest.offer(Best { entry, decode, estimate }, terms.cost());
            }
            lightest.least().unwrap_or(f64::INFINITY)
        };
        let mut least = offer(self, idlest);
        if home != idlest {
            least = offer(self, home);
        }
        for &entry in entries {
            if entry == idlest || entry == home {
                continue;
            }
            let computation = self.plan.shortest(tokens, input.prediction.hits(entry));
            if self.backlog(input, entry) + second * computation <= least {
                least = offer(self, entry);
            }
        }
        lightest.found().map(|(best, _)| best)
    }

    /// Until the engine is done with what it has and what held requests before this one will give it.
    fn backlog(&self, input: &Input<'_>, ix: InstanceIx) -> Seconds {
        input.loads.get(ix.at()).map_or(0.0, Load::least_wait) + self.plan.work(ix)
    }

    /// The decision with all candidates and what they would have cost.
    fn explained(
        &mut self,
        input: &Input<'_>,
        best: &Best,
        most_cached: u32,
        reason: &'static str,
    ) -> Verdict {
        let (mut candidates, mut all_terms) = (Vec::new(), Vec::new());
        for &instance in input.cluster.entries(input.request.model) {
            let Some((_, terms, _)) = self.price(input, instance, most_cached) else { continue };
            candidates.push(Candidate { instance, cost: terms.cost(), leading_term: terms.leading() });
            all_terms.push(terms);
        }
        let mut verdict = conclude(input, self.name(), reason, best.entry, best.decode, candidates);
        if let Verdict::Send(decision) = &mut verdict {
            let order = best.estimate.service + self.settings.engine_ageing * input.arrived;
            decision.engine_priority = Some((order * 1000.0) as i64);
            decision.predicted_ttft = Some(best.estimate.ttft());
            decision.explanation.terms = all_terms;
        }
        verdict
    }

    /// Until when the first token must be there.
    fn latest(&self, input: &Input<'_>) -> Option<Seconds> {
        let target = input.request.ttft_target.or_else(|| {
            let target = self.settings.ttft_target?;
            let entries = input.cluster.entries(input.request.model);
            let cold = entries
                .iter()
                .filter_map(|ix| input.loads.get(ix.at()))
                .map(|load| load.service.seconds(input.request.total_input_tokens(), 0) / load.service.speed);
            Some(target.base.max(target.cold_factor * cold.fold(f64::INFINITY, f64::min)))
        })?;
        Some(input.arrived + target)
    }

    /// The soonest possible first token, if the request were next on every engine.
    fn soonest(&mut self, input: &Input<'_>) -> Seconds {
        let plan = std::mem::take(&mut self.plan);
        let entries = input.cluster.entries(input.request.model);
        let times = entries.iter().filter_map(|&ix| self.price(input, ix, 0));
        let soonest = times.map(|(estimate, ..)| estimate.ttft()).fold(f64::INFINITY, f64::min);
        self.plan = plan;
        input.now + soonest
    }

    /// How long to hold a request that no engine is ready for, whatever its price there; `None` if it must be looked at.
    fn too_early(&self, input: &Input<'_>) -> Option<Seconds> {
        let due = match self.plan.first_due() {
            None if self.plan.requests()
                < ENOUGH_PLANNED * input.cluster.entries(input.request.model).len() =>
            {
                return None;
            }
            None => self.own_due(input)?,
            Some(due) => due,
        };
        // Without any engine it is refused in the usual way.
        (due.is_finite() && self.is_surely_in_time(input)).then_some(due)
    }

    /// How long until any engine could be given this request, if that is not now.
    fn own_due(&self, input: &Input<'_>) -> Option<Seconds> {
        let mut due = f64::INFINITY;
        for &ix in input.cluster.entries(input.request.model) {
            let Some(load) = input.loads.get(ix.at()).filter(|load| load.available) else { continue };
            let stored = f64::from(input.prediction.hits(ix).l3_tokens);
            let fetch = if stored > 0.0 {
                let farness = input.prediction.farness(ix);
                load.fetch_wait + FETCH_LATENCY + farness * stored * self.plan.fetch_per_token(ix)
            } else {
                0.0
            };
            let wait = load.least_wait().min(load.prefill_wait - fetch);
            due = due.min(wait + self.plan.work(ix) - self.settings.slack);
            if due <= 0.0 {
                return None;
            }
        }
        Some(due)
    }

    fn is_surely_in_time(&self, input: &Input<'_>) -> bool {
        let Some(latest) = self.latest(input) else { return true };
        let first = input.cluster.entries(input.request.model).first();
        let cold = first
            .and_then(|ix| input.loads.get(ix.at()))
            .map_or(f64::INFINITY, |load| load.service.seconds(input.request.total_input_tokens(), 0));
        input.now + self.plan.longest_wait() + SLOWEST * cold < latest
    }

    /// Expected computation, with what the caches hold wherever it is cheapest.
    fn least_service(input: &Input<'_>) -> Seconds {
        let tokens = input.request.total_input_tokens();
        let services = input.cluster.entries(input.request.model).iter().filter_map(|&ix| {
            let load = input.loads.get(ix.at())?;
            let cached = u64::from(input.prediction.hits(ix).total());
            Some(load.service.seconds(tokens.saturating_sub(cached).max(1), cached))
        });
        services.fold(f64::INFINITY, f64::min)
    }
}

impl Policy for Predictive {
    fn name(&self) -> PolicyName {
        PolicyName::Predictive
    }

    fn rank(&self, input: &Input<'_>) -> f64 {
        if self.promises.holds(input) {
            return f64::NEG_INFINITY;
        }
        let share = self.tenants.factor(input.request.tenant, input.now);
        Self::least_service(input) * share * PRIORITY_STEP.powi(input.request.priority.clamp(-16, 16))
    }

    fn begin(&mut self, round: &Round<'_>) {
        self.plan.begin(round, self.settings.slack);
    }

    fn planned(&self, engine: InstanceIx) -> Seconds {
        self.plan.work(engine)
    }

    fn is_aged(&self, input: &Input<'_>) -> bool {
        self.aged_credit > 0.0 && input.now - input.arrived > AGED_AFTER * Self::least_service(input)
    }

    fn decide(&mut self, input: &Input<'_>) -> Result<Verdict, Refusal> {
        self.plan.asked();
        let entries = input.cluster.entries(input.request.model);
        if let Some(due) = self.too_early(input) {
            return Ok(Verdict::Hold { until: input.now + due.max(SHORTEST_NAP) });
        }
        let own = entries.iter().filter(|&&ix| available(input, ix)).map(|&ix| {
            let hits = input.prediction.hits(ix);
            (ix, hits.l1_tokens.saturating_add(hits.l2_tokens))
        });
        let home = own.max_by_key(|&(_, tokens)| tokens);
        let best = home.and_then(|home| Some((self.cheapest(input, home)?, home.1)));
        let Some((best, most_cached)) = best else {
            // Says why.
            super::open_entries(input)?;
            return Err(Refusal::UnknownModel);
        };
        if let Some(latest) = self.latest(input)
            && input.now + best.estimate.ttft() > latest
            && self.soonest(input) > latest
        {
            let service = Self::least_service(input);
            let share = self.settings.promised_share;
            let retry_after = self.promises.make(input, service, entries.len(), share);
            return Err(Refusal::Overloaded { retry_after });
        }
        let Estimate { wait, fetch, .. } = best.estimate;
        let due = wait - fetch - self.settings.slack;
        if due <= 0.0 {
            let reason = if wait <= self.settings.slack {
                "least predicted TTFT"
            } else {
                "early, to fetch its pages"
            };
            return Ok(self.explained(input, &best, most_cached, reason));
        }
        self.plan.add(best.entry, best.estimate.service);
        Ok(Verdict::Hold { until: input.now + due.max(SHORTEST_NAP) })
    }

    fn sent(&mut self, input: &Input<'_>, decision: &Decision) {
        let entry = decision.route.entry();
        let (Some(instance), Some(load)) = (input.cluster.get(entry), input.loads.get(entry.at())) else {
            return;
        };
        let tokens = input.request.total_input_tokens();
        let estimate = Estimate::of(tokens, input.prediction, (entry, instance), load, load.prefill_wait);
        self.plan.occupy(entry, estimate.service);
        let waited = input.now - input.arrived;
        let aged = waited > AGED_AFTER * Self::least_service(input);
        self.promises.keep(input);
        self.aged_credit += self.settings.aged_share * estimate.service;
        if aged {
            self.aged_credit -= estimate.service;
        }
        self.tenants.used(input.request.tenant, input.now, estimate.service);
    }
}

impl Terms {
    /// The sum, in seconds.
    fn cost(&self) -> f64 {
        let own = self.wait.max(self.fetch) + self.service + self.handover;
        own + self.duplicate + self.congestion + self.length + self.decode
    }

    fn leading(&self) -> Term {
        if self.wait.max(self.fetch) < self.service {
            Term::Service
        } else if self.wait < self.fetch {
            Term::Fetch
        } else {
            Term::Backlog
        }
    }
}

#[cfg(test)]
mod tests;
