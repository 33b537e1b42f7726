//! State of one scheduling round: work of queued requests that go first, and when any engine is due.

use super::super::ScheduleRound;
use super::local_prefill::has_spare_time;
use super::pricing_budget::PricingBudget;
use crate::decode_step::DecodeBatch;
use crate::estimate::{FETCH_LATENCY, PrefillEstimate};
use crate::fleet::{InstanceIndex, InstanceLoad, InstanceRole, NextPass};
use crate::options::SchedulerOptions;
use crate::prediction::TierHits;
use crate::prefill_time::PrefillTimeModel;
use crate::seconds::Seconds;

/// Reused between rounds to avoid allocations. All lists are by instance.
#[derive(Debug, Default)]
pub(super) struct RoundPlan {
    /// Work of requests that were planned in this round.
    work: Vec<Seconds>,
    /// The last pass of that work, for engines with any.
    next_passes: Vec<Option<NextPass>>,
    /// Sequences of requests that were planned in this round, with which the decodes would be too slow now.
    decodes: Vec<DecodeBatch>,
    /// Number of those requests, and how long the last of them waits.
    waiting_for_decodes: (usize, Seconds),
    /// Number of requests planned in this round.
    requests: usize,
    /// Prices of requests with a choice of an earlier round, and of the others.
    held_prices: PricingBudget,
    other_prices: PricingBudget,
    /// Queued requests at the beginning of the round, and those that have not been decided yet.
    queued: usize,
    remaining: usize,
    /// Largest backlog of any engine without planned work.
    max_backlog: Seconds,
    /// Seconds to fetch a token from a store node in the same zone.
    fetch_per_token: Vec<Seconds>,
    /// A model as fast in every coefficient as the fastest engine, and not slower than usual.
    fastest: PrefillTimeModel,
    /// When each engine could be given the request with the longest fetch and load, without planned work. Never too late: engines
    /// excluded for other requests count as available. Infinite for engines that compute no prompts.
    due_at: Vec<Seconds>,
    /// Seconds until then, with planned work.
    due: Vec<Seconds>,
    /// Minimum of `due`, or one that is not positive, if it has been computed since the last change.
    first_due: Option<Seconds>,
    /// Longest fetch of any request on any engine, after a load of its LoRA adapter.
    longest_fetch: Seconds,
    /// Seconds until each engine has finished its own work and the planned work; infinite if it is not available.
    backlogs: Vec<Seconds>,
    /// When each engine is free, without planned work, as of its latest load; infinite if it is not available.
    free_at: Vec<Seconds>,
    /// Engines that will be free sooner than was expected in the last round, or for the requests that were decided earlier in this one.
    sooner_free: Vec<SoonerFree>,
    /// Engines for which this round has planned or sent anything.
    planned: Vec<InstanceIndex>,
    /// What `due` was computed with: the longest fetch in tokens, and the longest load of an adapter.
    preparation: (f64, Seconds),
}

/// In one round, an engine that becomes free sooner than was expected is compared with the choices of at most this many requests, the
/// first ones for which it may be cheaper.
pub(super) const MAX_COMPARED: usize = 64;

/// What a prompt adds to an engine's work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PlannedPrompt {
    /// Time to compute it, without the constant of a shared pass.
    pub(super) service: Seconds,
    new_tokens: u64,
    shares_pass: bool,
}

impl PlannedPrompt {
    pub(super) fn of(estimate: &PrefillEstimate) -> Self {
        let PrefillEstimate { service, new_tokens, shares_pass, .. } = *estimate;
        Self { service, new_tokens, shares_pass }
    }
}

/// An engine that will be free sooner than was expected.
#[derive(Debug, Clone, Copy)]
struct SoonerFree {
    engine: InstanceIndex,
    earlier: Seconds,
    /// Number of requests with whose choice it has been compared.
    compared: usize,
}

/// Engines whose expected time changes by less are not compared again.
pub(super) const MIN_CHANGE: Seconds = 0.001;

impl RoundPlan {
    pub(super) fn start_round(&mut self, round: &ScheduleRound<'_>, settings: &SchedulerOptions) {
        let preparation = (round.max_store_fetch_tokens, round.max_adapter_load);
        self.waiting_for_decodes = (0, 0.0);
        self.requests = 0;
        self.held_prices.start_round(round.loads.len());
        self.other_prices.start_round(round.loads.len());
        (self.queued, self.remaining) = (round.queued_requests, round.queued_requests);
        self.sooner_free.clear();
        let is_same = self.due.len() == round.loads.len() && self.preparation == preparation;
        self.preparation = preparation;
        self.first_due = None;
        match round.refreshed.filter(|_| is_same) {
            Some(refreshed) => {
                self.remove_planned(round.now);
                refreshed.iter().for_each(|ix| self.set_load(round, settings, *ix));
            }
            None => self.start_with_all(round, settings),
        }
    }

    /// Removes what the last round has planned. The engines' own work is as expected then.
    fn remove_planned(&mut self, now: Seconds) {
        for ix in self.planned.drain(..) {
            let position = ix.as_usize();
            self.work[position] = 0.0;
            self.next_passes[position] = None;
            self.decodes[position] = DecodeBatch::default();
        }
        for (backlog, free_at) in self.backlogs.iter_mut().zip(&self.free_at) {
            *backlog = (free_at - now).max(0.0);
        }
        for (due, due_at) in self.due.iter_mut().zip(&self.due_at) {
            *due = due_at - now;
        }
    }

    fn start_with_all(&mut self, round: &ScheduleRound<'_>, settings: &SchedulerOptions) {
        let engines = round.loads.len();
        self.planned.clear();
        self.work.clear();
        self.work.resize(engines, 0.0);
        self.next_passes.clear();
        self.next_passes.resize(engines, None);
        self.decodes.clear();
        self.decodes.resize(engines, DecodeBatch::default());
        (self.max_backlog, self.longest_fetch, self.fastest) = (0.0, 0.0, SLOWEST);
        self.free_at.resize(engines, f64::INFINITY);
        self.backlogs.resize(engines, 0.0);
        self.fetch_per_token.resize(engines, 0.0);
        self.due_at.resize(engines, f64::INFINITY);
        self.due.resize(engines, f64::INFINITY);
        // In one pass, because the loads of a large fleet do not fit into the processor's nearest cache.
        for ix in InstanceIndex::all().take(engines) {
            self.set_load(round, settings, ix);
        }
    }

    /// Starts the round with an engine's load, without any planned work. What is known of all engines together stays a bound.
    fn set_load(&mut self, round: &ScheduleRound<'_>, settings: &SchedulerOptions, ix: InstanceIndex) {
        let position = ix.as_usize();
        let (Some(instance), Some(load)) = (round.cluster.get(ix), round.loads.get(position)) else { return };
        let age = round.refreshed_at.get(position).map_or(0.0, |at| (round.now - at).max(0.0));
        self.max_backlog = self.max_backlog.max(load.prefill_wait);
        self.fastest = fastest(self.fastest, &load.service);
        self.set_backlog(ix, load, (round.now, age));
        let per_token = load.fetch_per_token(&instance.cache);
        self.fetch_per_token[position] = per_token;
        let computes = match instance.role {
            InstanceRole::Decode => {
                instance.local_prefill
                    && settings.tpot_target.is_some_and(|target| has_spare_time(load, target))
            }
            InstanceRole::Prefill | InstanceRole::Plain => true,
        };
        if !computes || !load.available {
            (self.due_at[position], self.due[position]) = (f64::INFINITY, f64::INFINITY);
            return;
        }
        let fetch = if round.max_store_fetch_tokens > 0.0 {
            load.fetch_wait + FETCH_LATENCY + round.max_store_fetch_tokens * per_token
        } else {
            0.0
        };
        let preparation = fetch + round.max_adapter_load;
        self.longest_fetch = self.longest_fetch.max(preparation);
        let wait = load.min_wait().min(load.prefill_wait - preparation);
        self.due[position] = wait - load.next_pass.work - settings.slack - age;
        self.due_at[position] = round.now + self.due[position];
    }

    fn set_backlog(&mut self, ix: InstanceIndex, load: &InstanceLoad, (now, age): (Seconds, Seconds)) {
        let position = ix.as_usize();
        let backlog = if load.available { (load.min_wait() - age).max(0.0) } else { f64::INFINITY };
        self.backlogs[position] = backlog;
        let earlier = self.free_at[position] - (now + backlog);
        if earlier > MIN_CHANGE {
            self.sooner_free.push(SoonerFree { engine: ix, earlier, compared: 0 });
        }
        self.free_at[position] = now + backlog;
    }

    /// Starts the next request of the round.
    pub(super) fn next_request(&mut self) {
        self.remaining = self.remaining.saturating_sub(1);
    }

    /// Whether all engines may be priced for the current request in this round. `has_choice` if there is one of an earlier round.
    pub(super) fn takes_price(&mut self, has_choice: bool) -> bool {
        let position = self.queued - self.remaining;
        if has_choice { self.held_prices.take(position) } else { self.other_prices.take(position) }
    }

    /// Number of engines with which a choice of the last round has to be compared.
    pub(super) fn sooner_free_len(&self) -> usize {
        self.sooner_free.len()
    }

    /// One of them; `None` if it has been compared with enough requests.
    pub(super) fn sooner_free(&self, number: usize) -> Option<InstanceIndex> {
        self.sooner_free.get(number).filter(|free| free.compared < MAX_COMPARED).map(|free| free.engine)
    }

    /// One of them is compared with a request.
    pub(super) fn count_comparison(&mut self, number: usize) {
        if let Some(free) = self.sooner_free.get_mut(number) {
            free.compared += 1;
        }
    }

    /// A request that was planned on this engine is not any more.
    pub(super) fn withdraw(&mut self, engine: InstanceIndex, service: Seconds) {
        self.sooner_free.push(SoonerFree { engine, earlier: service, compared: 0 });
    }

    /// A request is on this engine that was not planned there before.
    pub(super) fn fill(&mut self, engine: InstanceIndex, service: Seconds) {
        if let Some(position) = self.sooner_free.iter().position(|free| free.engine == engine) {
            self.sooner_free[position].earlier -= service;
            if self.sooner_free[position].earlier <= MIN_CHANGE {
                self.sooner_free.swap_remove(position);
            }
        }
    }

    /// Seconds until the engine has finished its own work and that of queued requests before the current one. Infinite if it is not
    /// available.
    pub(super) fn backlog(&self, ix: InstanceIndex) -> Seconds {
        self.backlogs.get(ix.as_usize()).copied().unwrap_or(0.0)
    }

    #[cfg(test)]
    pub(super) fn with_backlogs(backlogs: Vec<Seconds>) -> Self {
        Self { backlogs, ..Self::default() }
    }

    /// The first of these engines with the smallest backlog.
    pub(super) fn idlest(&self, engines: &[InstanceIndex]) -> Option<InstanceIndex> {
        let mut idlest: Option<(InstanceIndex, Seconds)> = None;
        for &ix in engines {
            let backlog = self.backlog(ix);
            if backlog <= 0.0 {
                return Some(ix);
            }
            if idlest.is_none_or(|(_, least)| backlog < least) {
                idlest = Some((ix, backlog));
            }
        }
        idlest.map(|(ix, _)| ix)
    }

    /// Planned work before the current request, beyond the engine's own backlog.
    pub(super) fn work(&self, ix: InstanceIndex) -> Seconds {
        self.work.get(ix.as_usize()).copied().unwrap_or(0.0)
    }

    /// Sequences of queued requests before the current request that wait until the decode is fast enough.
    pub(super) fn decode_batch(&self, ix: InstanceIndex) -> DecodeBatch {
        self.decodes.get(ix.as_usize()).copied().unwrap_or_default()
    }

    /// How many requests of the round wait until a decode is fast enough, and how long the last of them.
    pub(super) fn waiting_for_decodes(&self) -> (usize, Seconds) {
        self.waiting_for_decodes
    }

    /// Plans a queued request's sequences on a decode that is too slow for it before `due`.
    pub(super) fn add_decode(&mut self, ix: InstanceIndex, batch: DecodeBatch, due: Seconds) {
        self.planned.push(ix);
        if let Some(planned) = self.decodes.get_mut(ix.as_usize()) {
            *planned = *planned + batch;
        }
        self.waiting_for_decodes = (self.waiting_for_decodes.0 + 1, due);
    }

    pub(super) fn requests(&self) -> usize {
        self.requests
    }

    pub(super) fn queued(&self) -> usize {
        self.queued
    }

    pub(super) fn remaining(&self) -> usize {
        self.remaining
    }

    /// The last pass of the planned work; `None` without any.
    pub(super) fn next_pass(&self, ix: InstanceIndex) -> Option<NextPass> {
        self.next_passes.get(ix.as_usize()).copied().flatten()
    }

    /// Plans a queued request on the engine, before those that are decided later.
    pub(super) fn add(&mut self, ix: InstanceIndex, prompt: PlannedPrompt, load: &InstanceLoad) {
        self.requests += 1;
        if let Some(work) = self.work.get_mut(ix.as_usize()) {
            *work += prompt.service;
        }
        let before = self.next_pass(ix).unwrap_or(load.next_pass);
        if let Some(next_pass) = self.next_passes.get_mut(ix.as_usize()) {
            *next_pass = Some(if prompt.shares_pass {
                before.with(prompt.new_tokens, prompt.service)
            } else {
                NextPass::begin(&load.service, prompt.new_tokens, prompt.service)
            });
        }
        self.add_dispatched(ix, prompt, load);
    }

    /// Adds dispatched work to the engine's backlog.
    pub(super) fn add_dispatched(&mut self, ix: InstanceIndex, prompt: PlannedPrompt, load: &InstanceLoad) {
        self.planned.push(ix);
        if let Some(backlog) = self.backlogs.get_mut(ix.as_usize()) {
            *backlog += prompt.service;
        }
        // Others may join its pass until that starts.
        let leaves_room = NextPass::begin(&load.service, prompt.new_tokens, 0.0).room > 0;
        if let Some(due) = self.due.get_mut(ix.as_usize()).filter(|_| !leaves_room) {
            self.first_due = self.first_due.filter(|first_due| *due > *first_due);
            *due += prompt.service;
        }
    }

    /// How long until any engine could be given any request, if that is not now. Infinite if there is no engine.
    pub(super) fn first_due(&mut self) -> Option<Seconds> {
        let first_due = *self.first_due.get_or_insert_with(|| {
            let mut times = self.due.iter().copied();
            let mut least = f64::INFINITY;
            // One that is due now is enough.
            while least > 0.0
                && let Some(due) = times.next()
            {
                least = least.min(due);
            }
            least
        });
        (first_due > 0.0).then_some(first_due)
    }

    /// Lower bound of the computation on an engine with these hits.
    pub(super) fn min_service(&self, input_tokens: u64, hits: TierHits) -> Seconds {
        let cached = u64::from(hits.total()).min(input_tokens);
        self.fastest.seconds(input_tokens.saturating_sub(cached).max(1), cached)
    }

    /// Seconds to fetch a token to this engine from a store node in the same zone.
    pub(super) fn fetch_per_token(&self, ix: InstanceIndex) -> Seconds {
        self.fetch_per_token.get(ix.as_usize()).copied().unwrap_or(0.0)
    }

    /// Upper bound of a request's wait, whichever engine is chosen next.
    pub(super) fn max_wait(&self) -> Seconds {
        self.max_backlog.max(self.longest_fetch)
    }
}

/// Slower than any engine.
const SLOWEST: PrefillTimeModel =
    PrefillTimeModel { c0: f64::INFINITY, a: f64::INFINITY, b: f64::INFINITY, speed: 1.0 };

/// A model as fast as both, and not slower than usual.
fn fastest(fastest: PrefillTimeModel, model: &PrefillTimeModel) -> PrefillTimeModel {
    let speed = model.speed.min(1.0);
    PrefillTimeModel {
        c0: fastest.c0.min(model.c0 * speed),
        a: fastest.a.min(model.a * speed),
        b: fastest.b.min(model.b * speed),
        speed: 1.0,
    }
}
