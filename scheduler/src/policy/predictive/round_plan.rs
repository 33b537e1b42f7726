//! What a round of questions knows of the engines: the work of held requests that go first, and when any engine is due at all.

use super::super::ScheduleRound;
use crate::estimate::FETCH_LATENCY;
use crate::fleet::{InstanceIndex, InstanceRole};
use crate::prediction::TierHits;
use crate::prefill_time::PrefillTimeModel;
use crate::request::Seconds;

/// Kept between rounds so that a round allocates nothing. All lists are by instance.
#[derive(Debug, Default)]
pub(super) struct RoundPlan {
    /// Work of requests that were planned in this round.
    work: Vec<Seconds>,
    /// How many they are.
    requests: usize,
    /// Held requests that have not been asked about.
    remaining: usize,
    /// Most backlog of any engine without planned work.
    max_backlog: Seconds,
    /// Time to fetch a token from a near store.
    fetch_per_token: Vec<Seconds>,
    /// An engine that is as fast in everything as the fastest, and not slower than usual.
    fastest: PrefillTimeModel,
    /// How long from now until the engine could be given a request, if that is the one with the longest fetch. Never too late:
    /// what other requests are barred from counts as open.
    due: Vec<Seconds>,
    /// The least of them.
    first_due: Seconds,
    /// Longest fetch of any request on any engine.
    longest_fetch: Seconds,
}

impl RoundPlan {
    pub(super) fn begin(&mut self, round: &ScheduleRound<'_>, slack: Seconds) {
        self.work.clear();
        self.work.resize(round.loads.len(), 0.0);
        self.requests = 0;
        self.remaining = round.queued_requests;
        self.max_backlog = round.loads.iter().map(|load| load.prefill_wait).fold(0.0, f64::max);
        self.longest_fetch = 0.0;
        self.fastest = fastest(round.loads.iter().map(|load| &load.service));
        self.fetch_per_token.clear();
        self.due.clear();
        for (instance, load) in round.cluster.instances().iter().zip(round.loads) {
            let per_token = load.fetch_per_token(&instance.cache);
            self.fetch_per_token.push(per_token);
            if instance.role == InstanceRole::Decode || !load.available {
                self.due.push(f64::INFINITY);
                continue;
            }
            let fetch = if round.max_store_fetch_tokens > 0.0 {
                load.fetch_wait + FETCH_LATENCY + round.max_store_fetch_tokens * per_token
            } else {
                0.0
            };
            self.longest_fetch = self.longest_fetch.max(fetch);
            self.due.push(load.min_wait().min(load.prefill_wait - fetch) - slack);
        }
        self.update_first_due();
    }

    /// Another request is asked about.
    pub(super) fn next_request(&mut self) {
        self.remaining = self.remaining.saturating_sub(1);
    }

    /// Work before a request that is asked about now, beyond the engine's own backlog.
    pub(super) fn work(&self, ix: InstanceIndex) -> Seconds {
        self.work.get(ix.as_usize()).copied().unwrap_or(0.0)
    }

    pub(super) fn requests(&self) -> usize {
        self.requests
    }

    pub(super) fn remaining(&self) -> usize {
        self.remaining
    }

    /// A held request will have the engine before those that are asked about later.
    pub(super) fn add(&mut self, ix: InstanceIndex, service: Seconds) {
        self.requests += 1;
        if let Some(work) = self.work.get_mut(ix.as_usize()) {
            *work += service;
        }
        self.add_dispatched(ix, service);
    }

    /// The engine has so much more to do.
    pub(super) fn add_dispatched(&mut self, ix: InstanceIndex, service: Seconds) {
        if let Some(due) = self.due.get_mut(ix.as_usize()) {
            *due += service;
        }
        self.update_first_due();
    }

    /// How long until any engine could be given any request, if that is not now. Infinite if there is no engine.
    pub(super) fn first_due(&self) -> Option<Seconds> {
        (self.first_due > 0.0).then_some(self.first_due)
    }

    /// An engine that holds so much of a prompt computes it in no less time, nor does one of usual speed.
    pub(super) fn min_service(&self, input_tokens: u64, hits: TierHits) -> Seconds {
        let cached = u64::from(hits.total()).min(input_tokens);
        self.fastest.seconds(input_tokens.saturating_sub(cached).max(1), cached)
    }

    /// Time to fetch a token to this engine from a near store.
    pub(super) fn fetch_per_token(&self, ix: InstanceIndex) -> Seconds {
        self.fetch_per_token.get(ix.as_usize()).copied().unwrap_or(0.0)
    }

    /// No request has its turn later than this, whichever engine it goes to next.
    pub(super) fn max_wait(&self) -> Seconds {
        self.max_backlog.max(self.longest_fetch)
    }

    fn update_first_due(&mut self) {
        self.first_due = self.due.iter().copied().fold(f64::INFINITY, f64::min);
    }
}

fn fastest<'a>(models: impl Iterator<Item = &'a PrefillTimeModel>) -> PrefillTimeModel {
    let none = PrefillTimeModel { c0: f64::INFINITY, a: f64::INFINITY, b: f64::INFINITY, speed: 1.0 };
    let least = |least: PrefillTimeModel, model: &PrefillTimeModel| PrefillTimeModel {
        c0: least.c0.min(model.c0 * model.speed.min(1.0)),
        a: least.a.min(model.a * model.speed.min(1.0)),
        b: least.b.min(model.b * model.speed.min(1.0)),
        speed: 1.0,
    };
    models.fold(none, least)
}
