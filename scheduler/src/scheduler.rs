//! The state around a policy: held requests, the book of every engine, and what was sent.

mod engine_groups;
mod excluded;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::engine_groups::group_engines;
use self::excluded::ExcludedEngines;
use crate::decision::{RoutingDecision, ScheduleRejection};
use crate::estimate::PrefillEstimate;
use crate::fleet::{InstanceIndex, InstanceLoad, InstanceRole, ReportedLoad, SchedulableFleet};
use crate::load_tracker::{CompletedPrefill, EngineLoadTracker};
use crate::options::SchedulerOptions;
use crate::policy::{Policy, PolicyInput, PolicyVerdict, ScheduleRound};
use crate::prediction::CacheHitPrediction;
use crate::prefill_time_distribution::PrefillTimeDistribution;
use crate::prefill_time_learner::PrefillTimeLearner;
use crate::request::{RequestProfile, Seconds};
use crate::snapshot::DecisionSnapshot;

/// Share of what is known of typical requests that a new one replaces.
const UNCACHED_SHARE_GAIN: f64 = 0.02;

/// The caller's name for one attempt of one request. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AttemptId(pub u64);

/// A request that wants engines.
#[derive(Debug, Clone, PartialEq)]
pub struct ScheduleRequest {
    /// The request.
    pub request: RequestProfile,
    /// Where its prompt is cached, in the cluster's order.
    pub prediction: CacheHitPrediction,
    /// Engines not to be used for it: tried before, or unable.
    pub excluded: Vec<InstanceIndex>,
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum SchedulerEvent {
    /// Send it. It is in the books until [`Scheduler::ended`].
    Send {
        /// Which.
        attempt: AttemptId,
        /// Where, and why.
        decision: RoutingDecision,
    },
    /// Refuse it. It is forgotten.
    Reject {
        /// Which.
        ticket: AttemptId,
        /// Why.
        rejection: ScheduleRejection,
    },
}

/// A policy with its state. Time is the caller's and must not run backwards.
///
/// After every change ([`Scheduler::submit`], [`Scheduler::first_token`], [`Scheduler::ended`], a report, a new cluster)
/// and at [`Scheduler::next_poll_at`], call [`Scheduler::poll`].
#[derive(Debug)]
pub struct Scheduler {
    policy: Box<dyn Policy>,
    settings: SchedulerOptions,
    cluster: Arc<SchedulableFleet>,
    /// In the cluster's order.
    engines: Vec<EngineLoadTracker>,
    /// What was learned of engines of one kind, and which kind an engine is.
    learners: Vec<PrefillTimeLearner>,
    learner_of: Vec<usize>,
    /// In order of rank, then of submission.
    queued: Vec<QueuedScheduleRequest>,
    in_flight: BTreeMap<AttemptId, InFlightAttempt>,
    /// Requests ever submitted.
    submitted: u64,
    /// Decisions ever made.
    decided: u64,
    next_poll_at: Option<Seconds>,
    /// Share of its computation that a prompt usually needs.
    uncached_share: f64,
    mix: PrefillTimeDistribution,
    /// The latest time heard of.
    now: Seconds,
    /// Held requests that this poll has not decided on yet.
    undecided: usize,
    capturing: bool,
    captured: Vec<(AttemptId, DecisionSnapshot)>,
    /// Kept between polls so that a poll allocates nothing.
    loads: Vec<InstanceLoad>,
}

#[derive(Debug)]
struct QueuedScheduleRequest {
    rank: f64,
    sequence: u64,
    attempt: AttemptId,
    arrived: Seconds,
    /// [`CacheHitPrediction::max_store_fetch_tokens`] of its prediction.
    max_store_fetch_tokens: f64,
    submission: ScheduleRequest,
}

/// A request in the books. Its engines are `None` once they left the cluster.
#[derive(Debug)]
struct InFlightAttempt {
    prefill: Option<InstanceIndex>,
    decode: Option<InstanceIndex>,
    decode_tokens: u64,
    prefilling: bool,
}

impl Scheduler {
    /// A scheduler of an empty cluster.
    #[must_use]
    pub fn new(policy: Box<dyn Policy>, settings: SchedulerOptions) -> Self {
        Self {
            policy,
            settings,
            cluster: Arc::new(SchedulableFleet::default()),
            engines: Vec::new(),
            learners: Vec::new(),
            learner_of: Vec::new(),
            queued: Vec::new(),
            in_flight: BTreeMap::new(),
            submitted: 0,
            decided: 0,
            next_poll_at: None,
            uncached_share: 1.0,
            mix: PrefillTimeDistribution::default(),
            now: 0.0,
            undecided: 0,
            capturing: false,
            captured: Vec::new(),
            loads: Vec::new(),
        }
    }

    /// Takes a new fleet over. Engines keep their book by name; held requests keep their predictions.
    pub fn set_cluster(&mut self, now: Seconds, cluster: Arc<SchedulableFleet>) {
        let mut new_ix: BTreeMap<&str, InstanceIndex> = BTreeMap::new();
        for (ix, instance) in (0_u32..).map(InstanceIndex).zip(cluster.instances()) {
            new_ix.insert(&instance.name, ix);
        }
        let moved: Vec<Option<InstanceIndex>> =
            self.cluster.instances().iter().map(|old| new_ix.get(&*old.name).copied()).collect();
        let moved = |ix: InstanceIndex| moved.get(ix.as_usize()).copied().flatten();

        let mut engines: Vec<Option<(EngineLoadTracker, usize)>> =
            cluster.instances().iter().map(|_| None).collect();
        let old_books = self.engines.drain(..).zip(self.learner_of.drain(..));
        for (old, book_and_kind) in (0_u32..).map(InstanceIndex).zip(old_books) {
            if let Some(new) = moved(old) {
                engines[new.as_usize()] = Some(book_and_kind);
            }
        }
        let (learners, kinds) = group_engines(&cluster, &engines, &self.learners, &self.settings);
        (self.learners, self.learner_of) = (learners, kinds);
        self.engines = engines
            .into_iter()
            .map(|old| old.map_or_else(EngineLoadTracker::new, |(book, _)| book))
            .collect();
        for sent in self.in_flight.values_mut() {
            sent.prefill = sent.prefill.and_then(moved);
            sent.decode = sent.decode.and_then(moved);
        }
        for held in &mut self.queued {
            held.submission.excluded = held.submission.excluded.iter().filter_map(|&ix| moved(ix)).collect();
            let hits = std::mem::take(&mut held.submission.prediction.per_instance);
            if !hits.is_empty() {
                let per_instance = &mut held.submission.prediction.per_instance;
                per_instance.resize(cluster.instances().len(), Default::default());
                for (old, hits) in (0_u32..).map(InstanceIndex).zip(hits) {
                    if let Some(new) = moved(old) {
                        per_instance[new.as_usize()] = hits;
                    }
                }
            }
        }
        self.cluster = cluster;
        self.next_poll_at = Some(now);
    }

    /// Whether new requests may be sent to an engine: it is healthy and not draining.
    pub fn set_available(&mut self, ix: InstanceIndex, available: bool) {
        if let Some(book) = self.engines.get_mut(ix.as_usize()) {
            book.available = available;
        }
    }

    /// Takes an engine's report of its own load.
    pub fn report(&mut self, now: Seconds, ix: InstanceIndex, reported: ReportedLoad) {
        if let (Some(book), Some(&kind)) =
            (self.engines.get_mut(ix.as_usize()), self.learner_of.get(ix.as_usize()))
        {
            let computes_only =
                self.cluster.get(ix).is_some_and(|instance| instance.role == InstanceRole::Prefill);
            let uncached = computes_only.then_some(self.uncached_share);
            book.apply_report(now, reported, &self.learners[kind], uncached);
        }
    }

    /// Takes a request. The answer comes from [`Scheduler::poll`].
    pub fn submit(&mut self, now: Seconds, ticket: AttemptId, ask: ScheduleRequest) {
        let number = self.submitted;
        self.submitted += 1;
        let stored = ask.prediction.max_store_fetch_tokens();
        let mut held = QueuedScheduleRequest {
            rank: 0.0,
            sequence: number,
            attempt: ticket,
            arrived: now,
            max_store_fetch_tokens: stored,
            submission: ask,
        };
        self.refresh_loads(now);
        held.rank = self.rank(&held);
        self.enqueue(held);
        self.next_poll_at = Some(now);
    }

    /// Decides on all held requests: those that leave are in `out`, in order.
    pub fn poll(&mut self, now: Seconds, entropy: u64, out: &mut Vec<SchedulerEvent>) {
        self.next_poll_at = None;
        if self.queued.is_empty() {
            return;
        }
        self.refresh_loads(now);
        self.policy.begin_round(&ScheduleRound {
            cluster: &self.cluster,
            loads: &self.loads,
            queued_requests: self.queued.len(),
            max_store_fetch_tokens: self
                .queued
                .iter()
                .map(|held| held.max_store_fetch_tokens)
                .fold(0.0, f64::max),
            now,
        });
        let mut held = std::mem::take(&mut self.queued);
        self.undecided = held.len();
        if let Some(aged) = self.find_starving(now, &held) {
            let first = held.remove(aged);
            if self.decide(now, entropy, &first, out) {
                held.insert(aged, first);
            }
        }
        held.retain(|held| self.decide(now, entropy, held, out));
        self.queued = held;
    }

    /// Where in `held` the longest held request is, if it is time that it goes first.
    fn find_starving(&self, now: Seconds, held: &[QueuedScheduleRequest]) -> Option<usize> {
        let (position, oldest) = held.iter().enumerate().min_by_key(|(_, held)| held.sequence)?;
        self.policy.is_starving(&self.input(now, 0, oldest)).then_some(position)
    }

    fn input<'a>(&'a self, now: Seconds, entropy: u64, held: &'a QueuedScheduleRequest) -> PolicyInput<'a> {
        PolicyInput {
            request: &held.submission.request,
            cluster: &self.cluster,
            loads: &self.loads,
            prediction: &held.submission.prediction,
            mix: &self.mix,
            now,
            arrived: held.arrived,
            sequence: self.decided,
            entropy,
        }
    }

    /// Decides on one request. Whether it is still held.
    fn decide(
        &mut self,
        now: Seconds,
        entropy: u64,
        held: &QueuedScheduleRequest,
        out: &mut Vec<SchedulerEvent>,
    ) -> bool {
        let ticket = held.attempt;
        let unasked = self.undecided;
        self.undecided = unasked.saturating_sub(1);
        let barred = ExcludedEngines::apply(&mut self.loads, &held.submission.excluded);
        let input = PolicyInput {
            request: &held.submission.request,
            cluster: &self.cluster,
            loads: &self.loads,
            prediction: &held.submission.prediction,
            mix: &self.mix,
            now,
            arrived: held.arrived,
            sequence: self.decided,
            entropy: mix_entropy(entropy, self.decided),
        };
        let verdict = self.policy.decide(&input);
        if let Ok(PolicyVerdict::Send(decision)) = &verdict {
            if self.capturing {
                let mut snapshot =
                    DecisionSnapshot::capture(self.policy.name(), &self.settings, unasked, &input);
                for (ix, load) in (0_u32..).map(InstanceIndex).zip(&mut snapshot.loads) {
                    load.prefill_wait += self.policy.planned_work(ix);
                }
                self.captured.push((ticket, snapshot));
            }
            self.policy.on_sent(&input, decision);
        }
        barred.restore(&mut self.loads);
        match verdict {
            Ok(PolicyVerdict::Send(decision)) => {
                self.decided += 1;
                self.track(now, held, &decision);
                out.push(SchedulerEvent::Send { attempt: ticket, decision });
                false
            }
            Ok(PolicyVerdict::Defer { until }) => {
                if until.is_finite() {
                    self.next_poll_at = Some(self.next_poll_at.map_or(until, |first| first.min(until)));
                }
                true
            }
            Err(refusal) => {
                out.push(SchedulerEvent::Reject { ticket, rejection: refusal });
                false
            }
        }
    }

    /// Whether to keep what every decision depended on, for [`Scheduler::take_captured`].
    pub fn set_capture(&mut self, captures: bool) {
        self.capturing = captures;
    }

    /// What the decisions since the last call depended on.
    pub fn take_captured(&mut self) -> impl Iterator<Item = (AttemptId, DecisionSnapshot)> + '_ {
        self.captured.drain(..)
    }

    /// When to poll again if nothing else happens; `None` if only an event can change something.
    #[must_use]
    pub fn next_poll_at(&self) -> Option<Seconds> {
        self.next_poll_at
    }

    /// Replaces the prediction of a held request.
    pub fn update_prediction(&mut self, ticket: AttemptId, prediction: CacheHitPrediction) {
        let Some(position) = self.queued.iter().position(|held| held.attempt == ticket) else { return };
        let mut held = self.queued.remove(position);
        held.max_store_fetch_tokens = prediction.max_store_fetch_tokens();
        held.submission.prediction = prediction;
        self.refresh_loads(self.now);
        held.rank = self.rank(&held);
        self.enqueue(held);
    }

    /// Replaces the engines that a held request may not be sent to.
    pub fn exclude(&mut self, ticket: AttemptId, barred: Vec<InstanceIndex>) {
        if let Some(held) = self.queued.iter_mut().find(|held| held.attempt == ticket) {
            held.submission.excluded = barred;
        }
    }

    /// The load of every engine, in the cluster's order.
    pub fn loads(&mut self, now: Seconds) -> &[InstanceLoad] {
        self.refresh_loads(now);
        &self.loads
    }

    /// The held requests, the first submitted first.
    pub fn queued(&self) -> impl Iterator<Item = AttemptId> {
        let mut held: Vec<(u64, AttemptId)> =
            self.queued.iter().map(|held| (held.sequence, held.attempt)).collect();
        held.sort_unstable();
        held.into_iter().map(|(_, ticket)| ticket)
    }

    /// The prompt of a sent request has been computed. `cached_tokens` is what the engine says it took from caches.
    pub fn first_token(&mut self, now: Seconds, ticket: AttemptId, cached_tokens: Option<u32>) {
        let Some(sent) = self.in_flight.get_mut(&ticket) else { return };
        if !std::mem::take(&mut sent.prefilling) {
            return;
        }
        let Some(entry) = sent.prefill else { return };
        let (Some(book), Some(&kind)) =
            (self.engines.get_mut(entry.as_usize()), self.learner_of.get(entry.as_usize()))
        else {
            return;
        };
        let cached = cached_tokens.map(u64::from);
        let Some(CompletedPrefill { work, duration: took, exclusive: alone }) =
            book.complete_prefill(now, ticket, cached)
        else {
            return;
        };
        if alone {
            book.speed = self.learners[kind].observe(work, took, book.speed);
        }
    }

    /// Nobody will tell when the prompt of a sent request has been computed, because its answer comes in one piece at the end: then
    /// the prediction is believed.
    pub fn first_token_unobserved(&mut self, ticket: AttemptId) {
        let entry = self.in_flight.get(&ticket).and_then(|sent| sent.prefill);
        if let Some(book) = entry.and_then(|ix| self.engines.get_mut(ix.as_usize())) {
            book.mark_unobserved(ticket);
        }
    }

    /// A request is over, whatever its end: it leaves the books, or is no longer held.
    pub fn ended(&mut self, now: Seconds, ticket: AttemptId) {
        let Some(sent) = self.in_flight.remove(&ticket) else {
            self.queued.retain(|held| held.attempt != ticket);
            return;
        };
        if let Some(book) = sent.prefill.and_then(|ix| self.engines.get_mut(ix.as_usize())) {
            book.end_request();
            if sent.prefilling {
                book.abort_prefill(now, ticket);
            }
        }
        if let Some(book) = sent.decode.and_then(|ix| self.engines.get_mut(ix.as_usize())) {
            book.release_decode(sent.decode_tokens);
            if sent.prefill != sent.decode {
                book.end_request();
            }
        }
    }

    fn refresh_loads(&mut self, now: Seconds) {
        self.now = now;
        self.engines.iter_mut().for_each(|engine| engine.advance(now));
        self.loads.clear();
        let kinds = self.learner_of.iter().map(|&kind| &self.learners[kind]);
        self.loads.extend(self.engines.iter().zip(kinds).map(|(engine, learned)| engine.load(now, learned)));
    }

    fn rank(&self, held: &QueuedScheduleRequest) -> f64 {
        self.policy.rank(&self.input(self.now, 0, held))
    }

    fn enqueue(&mut self, held: QueuedScheduleRequest) {
        let after = |other: &QueuedScheduleRequest| {
            other.rank.total_cmp(&held.rank).then(other.sequence.cmp(&held.sequence))
                == std::cmp::Ordering::Less
        };
        let position = self.queued.partition_point(after);
        self.queued.insert(position, held);
    }

    /// Enters a sent request into the books of its engines, and their loads anew.
    fn track(&mut self, now: Seconds, held: &QueuedScheduleRequest, decision: &RoutingDecision) {
        let (entry, exit) = (decision.route.prefill_instance(), decision.route.decode_instance());
        if let (Some(book), Some(load), Some(instance)) = (
            self.engines.get_mut(entry.as_usize()),
            self.loads.get(entry.as_usize()),
            self.cluster.get(entry),
        ) {
            let input_tokens = held.submission.request.total_input_tokens();
            let prediction = &held.submission.prediction;
            let estimate =
                PrefillEstimate::new(input_tokens, prediction, (entry, instance), load, load.prefill_wait);
            let share = estimate.service / load.service.seconds(input_tokens, 0);
            self.uncached_share += UNCACHED_SHARE_GAIN * (share - self.uncached_share);
            self.mix.add(estimate.service / load.service.speed);
            book.start_request();
            book.push_prefill(
                now,
                held.attempt,
                input_tokens,
                decision.reservation.prefill_tokens,
                &estimate,
            );
        }
        if let Some(book) = self.engines.get_mut(exit.as_usize()) {
            book.reserve_decode(decision.reservation.decode_tokens);
            if entry != exit {
                book.start_request();
            }
        }
        for ix in [entry, exit] {
            if let (Some(load), Some(book)) =
                (self.loads.get_mut(ix.as_usize()), self.engines.get(ix.as_usize()))
            {
                *load = book.load(now, &self.learners[self.learner_of[ix.as_usize()]]);
            }
        }
        let sent = InFlightAttempt {
            prefill: Some(entry),
            decode: Some(exit),
            decode_tokens: decision.reservation.decode_tokens,
            prefilling: true,
        };
        self.in_flight.insert(held.attempt, sent);
    }
}

/// Fresh random bits for each decision of one poll (SplitMix64).
fn mix_entropy(entropy: u64, number: u64) -> u64 {
    let mut bits = entropy.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests;
