//! State of one scheduling round: work of queued requests that go first, and when any engine is due.

use super::super::ScheduleRound;
use super::local_prefill::has_spare_time;
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
    /// Number of requests for which all engines were priced in this round.
    pub(super) priced: usize,
    /// Queued requests at the beginning of the round, and those that have not been decided yet.
    queued: usize,
    remaining: usize,
    /// Largest backlog of any engine without planned work.
    max_backlog: Seconds,
    /// Seconds to fetch a token from a store node in the same zone.
    fetch_per_token: Vec<Seconds>,
    /// A model as fast in every coefficient as the fastest engine, and not slower than usual.
    fastest: PrefillTimeModel,
    /// Seconds until the engine could be given the request with the longest fetch and load. Never too late: engines excluded for
    /// other requests count as available.
    due: Vec<Seconds>,
    /// Minimum of `due`.
    first_due: Seconds,
    /// Longest fetch of any request on any engine, after a load of its LoRA adapter.
    longest_fetch: Seconds,
    /// Seconds until each engine has finished its own work and the planned work; infinite if it is not available.
    backlogs: Vec<Seconds>,
    /// When each engine is free, without planned work, as expected in the last round; infinite if it is not available.
    free_at: Vec<Seconds>,
    /// Engines that will be free sooner than was expected in the last round, or for the requests that were decided earlier in this one.
    sooner_free: Vec<InstanceIndex>,
    /// Engines for which this round has planned or sent anything.
    planned: Vec<InstanceIndex>,
    /// What `due` was computed with: the longest fetch in tokens, and the longest load of an adapter.
    preparation: (f64, Seconds),
}

/// Engines whose expected time changes by less are not compared again.
pub(super) const MIN_CHANGE: Seconds = 0.001;

impl RoundPlan {
    pub(super) fn start_round(&mut self, round: &ScheduleRound<'_>, settings: &SchedulerOptions) {
        let preparation = (round.max_store_fetch_tokens, round.max_adapter_load);
        self.waiting_for_decodes = (0, 0.0);
        (self.requests, self.priced) = (0, 0);
        (self.queued, self.remaining) = (round.queued_requests, round.queued_requests);
        self.sooner_free.clear();
        let is_same = self.due.len() == round.loads.len() && self.preparation == preparation;
        self.preparation = preparation;
        let mut changed = std::mem::take(&mut self.planned);
        changed.extend_from_slice(round.refreshed.unwrap_or_default());
        if is_same && round.refreshed.is_some() && changed.len() < round.loads.len() {
            changed.iter().for_each(|ix| self.set_load(round, settings, *ix));
        } else {
            self.start_with_all(round, settings);
        }
        changed.clear();
        self.planned = changed;
        self.update_first_due();
    }

    fn start_with_all(&mut self, round: &ScheduleRound<'_>, settings: &SchedulerOptions) {
        let engines = round.loads.len();
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
        self.work[position] = 0.0;
        self.next_passes[position] = None;
        self.decodes[position] = DecodeBatch::default();
        self.max_backlog = self.max_backlog.max(load.prefill_wait);
        self.fastest = fastest(self.fastest, &load.service);
        self.set_backlog(ix, load, round.now);
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
            self.due[position] = f64::INFINITY;
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
        self.due[position] = wait - load.next_pass.work - settings.slack;
    }

    fn set_backlog(&mut self, ix: InstanceIndex, load: &InstanceLoad, now: Seconds) {
        let position = ix.as_usize();
        let backlog = if load.available { load.min_wait() } else { f64::INFINITY };
        self.backlogs[position] = backlog;
        if now + backlog + MIN_CHANGE < self.free_at[position] {
            self.sooner_free.push(ix);
        }
        self.free_at[position] = now + backlog;
    }

    /// Starts the next request of the round.
    pub(super) fn next_request(&mut self) {
        self.remaining = self.remaining.saturating_sub(1);
    }

    /// Engines with which a choice of the last round has to be compared.
    pub(super) fn sooner_free(&self) -> &[InstanceIndex] {
        &self.sooner_free
    }

    /// A request that was planned on this engine is not any more.
    pub(super) fn withdraw(&mut self, ix: InstanceIndex) {
        self.sooner_free.push(ix);
    }

    /// Seconds until the engine has finished its own work and that of queued requests before the current one. Infinite if it is not
    /// available.
    pub(super) fn backlog(&self, ix: InstanceIndex) -> Seconds {
        self.backlogs.get(ix.as_usize()).copied().unwrap_or(0.0)
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
    pub(super) fn add(&mut self, ix: InstanceIndex, estimate: &PrefillEstimate, load: &InstanceLoad) {
        self.requests += 1;
        if let Some(work) = self.work.get_mut(ix.as_usize()) {
            *work += estimate.service;
        }
        let before = self.next_pass(ix).unwrap_or(load.next_pass);
        if let Some(next_pass) = self.next_passes.get_mut(ix.as_usize()) {
            *next_pass = Some(if estimate.shares_pass {
                before.with(estimate.new_tokens, estimate.service)
            } else {
                NextPass::begin(&load.service, estimate.new_tokens, estimate.service)
            });
        }
        self.add_dispatched(ix, estimate, load);
    }

    /// Adds dispatched work to the engine's backlog.
    pub(super) fn add_dispatched(
        &mut self,
        ix: InstanceIndex,
        estimate: &PrefillEstimate,
        load: &InstanceLoad,
    ) {
        self.planned.push(ix);
        if let Some(backlog) = self.backlogs.get_mut(ix.as_usize()) {
            *backlog += estimate.service;
        }
        // Others may join its pass until that starts.
        let leaves_room = NextPass::begin(&load.service, estimate.new_tokens, 0.0).room > 0;
        if let Some(due) = self.due.get_mut(ix.as_usize()).filter(|_| !leaves_room) {
            let was_first = *due <= self.first_due;
            *due += estimate.service;
            if was_first {
                self.update_first_due();
            }
        }
    }

    /// How long until any engine could be given any request, if that is not now. Infinite if there is no engine.
    pub(super) fn first_due(&self) -> Option<Seconds> {
        (self.first_due > 0.0).then_some(self.first_due)
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

    fn update_first_due(&mut self) {
        self.first_due = self.due.iter().copied().fold(f64::INFINITY, f64::min);
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
