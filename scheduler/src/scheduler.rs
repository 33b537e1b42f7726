//! The state around a policy: held requests, the book of every engine, and what was sent.

mod barred;
mod kinds;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::barred::Barred;
use self::kinds::divide;
use crate::book::{Computed, EngineBook};
use crate::cluster::{Cluster, InstanceIx, Load, Reported, Role};
use crate::decision::{Decision, Refusal};
use crate::estimate::Estimate;
use crate::learn::Learner;
use crate::policy::{Input, Policy, Round, Verdict};
use crate::prediction::Prediction;
use crate::request::{Request, Seconds};
use crate::service_mix::ServiceMix;
use crate::settings::Settings;
use crate::snapshot::Snapshot;

/// Share of what is known of typical requests that a new one replaces.
const TYPICAL_GAIN: f64 = 0.02;

/// The caller's name for one attempt of one request. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A request that wants engines.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// The request.
    pub request: Request,
    /// Where its prompt is cached, in the cluster's order.
    pub prediction: Prediction,
    /// Engines not to be used for it: tried before, or unable.
    pub barred: Vec<InstanceIx>,
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Send it. It is in the books until [`Scheduler::ended`].
    Send {
        /// Which.
        ticket: Ticket,
        /// Where, and why.
        decision: Decision,
    },
    /// Refuse it. It is forgotten.
    Refuse {
        /// Which.
        ticket: Ticket,
        /// Why.
        refusal: Refusal,
    },
}

/// A policy with its state. Time is the caller's and must not run backwards.
///
/// After every change ([`Scheduler::submit`], [`Scheduler::first_token`], [`Scheduler::ended`], a report, a new cluster)
/// and at [`Scheduler::wake_at`], call [`Scheduler::poll`].
#[derive(Debug)]
pub struct Scheduler {
    policy: Box<dyn Policy>,
    settings: Settings,
    cluster: Arc<Cluster>,
    /// In the cluster's order.
    engines: Vec<EngineBook>,
    /// What was learned of engines of one kind, and which kind an engine is.
    learners: Vec<Learner>,
    kinds: Vec<usize>,
    /// In order of rank, then of submission.
    held: Vec<Held>,
    sent: BTreeMap<Ticket, Sent>,
    /// Requests ever submitted.
    submitted: u64,
    /// Decisions ever made.
    decided: u64,
    wake_at: Option<Seconds>,
    /// Share of its computation that a prompt usually needs.
    uncached: f64,
    mix: ServiceMix,
    /// The latest time heard of.
    now: Seconds,
    /// Held requests that this poll has not decided on yet.
    unasked: usize,
    captures: bool,
    captured: Vec<(Ticket, Snapshot)>,
    /// Kept between polls so that a poll allocates nothing.
    loads: Vec<Load>,
}

#[derive(Debug)]
struct Held {
    rank: f64,
    number: u64,
    ticket: Ticket,
    arrived: Seconds,
    /// [`Prediction::stored`] of its prediction.
    stored: f64,
    ask: Ask,
}

/// A request in the books. Its engines are `None` once they left the cluster.
#[derive(Debug)]
struct Sent {
    entry: Option<InstanceIx>,
    exit: Option<InstanceIx>,
    decode_tokens: u64,
    prefilling: bool,
}

impl Scheduler {
    /// A scheduler of an empty cluster.
    #[must_use]
    pub fn new(policy: Box<dyn Policy>, settings: Settings) -> Self {
        Self {
            policy,
            settings,
            cluster: Arc::new(Cluster::default()),
            engines: Vec::new(),
            learners: Vec::new(),
            kinds: Vec::new(),
            held: Vec::new(),
            sent: BTreeMap::new(),
            submitted: 0,
            decided: 0,
            wake_at: None,
            uncached: 1.0,
            mix: ServiceMix::default(),
            now: 0.0,
            unasked: 0,
            captures: false,
            captured: Vec::new(),
            loads: Vec::new(),
        }
    }

    /// Takes a new fleet over. Engines keep their book by name; held requests keep their predictions.
    pub fn set_cluster(&mut self, now: Seconds, cluster: Arc<Cluster>) {
        let mut new_ix: BTreeMap<&str, InstanceIx> = BTreeMap::new();
        for (ix, instance) in (0_u32..).map(InstanceIx).zip(cluster.instances()) {
            new_ix.insert(&instance.name, ix);
        }
        let moved: Vec<Option<InstanceIx>> =
            self.cluster.instances().iter().map(|old| new_ix.get(&*old.name).copied()).collect();
        let moved = |ix: InstanceIx| moved.get(ix.at()).copied().flatten();

        let mut engines: Vec<Option<(EngineBook, usize)>> =
            cluster.instances().iter().map(|_| None).collect();
        let old_books = self.engines.drain(..).zip(self.kinds.drain(..));
        for (old, book_and_kind) in (0_u32..).map(InstanceIx).zip(old_books) {
            if let Some(new) = moved(old) {
                engines[new.at()] = Some(book_and_kind);
            }
        }
        let (learners, kinds) = divide(&cluster, &engines, &self.learners, &self.settings);
        (self.learners, self.kinds) = (learners, kinds);
        self.engines =
            engines.into_iter().map(|old| old.map_or_else(EngineBook::new, |(book, _)| book)).collect();
        for sent in self.sent.values_mut() {
            sent.entry = sent.entry.and_then(moved);
            sent.exit = sent.exit.and_then(moved);
        }
        for held in &mut self.held {
            held.ask.barred = held.ask.barred.iter().filter_map(|&ix| moved(ix)).collect();
            let hits = std::mem::take(&mut held.ask.prediction.per_instance);
            if !hits.is_empty() {
                let per_instance = &mut held.ask.prediction.per_instance;
                per_instance.resize(cluster.instances().len(), Default::default());
                for (old, hits) in (0_u32..).map(InstanceIx).zip(hits) {
                    if let Some(new) = moved(old) {
                        per_instance[new.at()] = hits;
                    }
                }
            }
        }
        self.cluster = cluster;
        self.wake_at = Some(now);
    }

    /// Whether new requests may be sent to an engine: it is healthy and not draining.
    pub fn set_available(&mut self, ix: InstanceIx, available: bool) {
        if let Some(book) = self.engines.get_mut(ix.at()) {
            book.available = available;
        }
    }

    /// Takes an engine's report of its own load.
    pub fn report(&mut self, now: Seconds, ix: InstanceIx, reported: Reported) {
        if let (Some(book), Some(&kind)) = (self.engines.get_mut(ix.at()), self.kinds.get(ix.at())) {
            let computes_only = self.cluster.get(ix).is_some_and(|instance| instance.role == Role::Prefill);
            let uncached = computes_only.then_some(self.uncached);
            book.reported(now, reported, &self.learners[kind], uncached);
        }
    }

    /// Takes a request. The answer comes from [`Scheduler::poll`].
    pub fn submit(&mut self, now: Seconds, ticket: Ticket, ask: Ask) {
        let number = self.submitted;
        self.submitted += 1;
        let stored = ask.prediction.stored();
        let mut held = Held { rank: 0.0, number, ticket, arrived: now, stored, ask };
        self.read_loads(now);
        held.rank = self.rank(&held);
        self.hold(held);
        self.wake_at = Some(now);
    }

    /// Decides on all held requests: those that leave are in `out`, in order.
    pub fn poll(&mut self, now: Seconds, entropy: u64, out: &mut Vec<Event>) {
        self.wake_at = None;
        if self.held.is_empty() {
            return;
        }
        self.read_loads(now);
        self.policy.begin(&Round {
            cluster: &self.cluster,
            loads: &self.loads,
            held: self.held.len(),
            most_stored: self.held.iter().map(|held| held.stored).fold(0.0, f64::max),
            now,
        });
        let mut held = std::mem::take(&mut self.held);
        self.unasked = held.len();
        if let Some(aged) = self.aged(now, &held) {
            let first = held.remove(aged);
            if self.decide(now, entropy, &first, out) {
                held.insert(aged, first);
            }
        }
        held.retain(|held| self.decide(now, entropy, held, out));
        self.held = held;
    }

    /// Where in `held` the longest held request is, if it is time that it goes first.
    fn aged(&self, now: Seconds, held: &[Held]) -> Option<usize> {
        let (position, oldest) = held.iter().enumerate().min_by_key(|(_, held)| held.number)?;
        self.policy.is_aged(&self.input(now, 0, oldest)).then_some(position)
    }

    fn input<'a>(&'a self, now: Seconds, entropy: u64, held: &'a Held) -> Input<'a> {
        Input {
            request: &held.ask.request,
            cluster: &self.cluster,
            loads: &self.loads,
            prediction: &held.ask.prediction,
            mix: &self.mix,
            now,
            arrived: held.arrived,
            sequence: self.decided,
            entropy,
        }
    }

    /// Decides on one request. Whether it is still held.
    fn decide(&mut self, now: Seconds, entropy: u64, held: &Held, out: &mut Vec<Event>) -> bool {
        let ticket = held.ticket;
        let unasked = self.unasked;
        self.unasked = unasked.saturating_sub(1);
        let barred = Barred::bar(&mut self.loads, &held.ask.barred);
        let input = Input {
            request: &held.ask.request,
            cluster: &self.cluster,
            loads: &self.loads,
            prediction: &held.ask.prediction,
            mix: &self.mix,
            now,
            arrived: held.arrived,
            sequence: self.decided,
            entropy: mixed(entropy, self.decided),
        };
        let verdict = self.policy.decide(&input);
        if let Ok(Verdict::Send(decision)) = &verdict {
            if self.captures {
                let mut snapshot = Snapshot::of(self.policy.name(), &self.settings, unasked, &input);
                for (ix, load) in (0_u32..).map(InstanceIx).zip(&mut snapshot.loads) {
                    load.prefill_wait += self.policy.planned(ix);
                }
                self.captured.push((ticket, snapshot));
            }
            self.policy.sent(&input, decision);
        }
        barred.lift(&mut self.loads);
        match verdict {
            Ok(Verdict::Send(decision)) => {
                self.decided += 1;
                self.book(now, held, &decision);
                out.push(Event::Send { ticket, decision });
                false
            }
            Ok(Verdict::Hold { until }) => {
                if until.is_finite() {
                    self.wake_at = Some(self.wake_at.map_or(until, |first| first.min(until)));
                }
                true
            }
            Err(refusal) => {
                out.push(Event::Refuse { ticket, refusal });
                false
            }
        }
    }

    /// Whether to keep what every decision depended on, for [`Scheduler::take_captured`].
    pub fn capture(&mut self, captures: bool) {
        self.captures = captures;
    }

    /// What the decisions since the last call depended on.
    pub fn take_captured(&mut self) -> impl Iterator<Item = (Ticket, Snapshot)> + '_ {
        self.captured.drain(..)
    }

    /// When to poll again if nothing else happens; `None` if only an event can change something.
    #[must_use]
    pub fn wake_at(&self) -> Option<Seconds> {
        self.wake_at
    }

    /// Replaces the prediction of a held request.
    pub fn refresh(&mut self, ticket: Ticket, prediction: Prediction) {
        let Some(position) = self.held.iter().position(|held| held.ticket == ticket) else { return };
        let mut held = self.held.remove(position);
        held.stored = prediction.stored();
        held.ask.prediction = prediction;
        self.read_loads(self.now);
        held.rank = self.rank(&held);
        self.hold(held);
    }

    /// Replaces the engines that a held request may not be sent to.
    pub fn bar(&mut self, ticket: Ticket, barred: Vec<InstanceIx>) {
        if let Some(held) = self.held.iter_mut().find(|held| held.ticket == ticket) {
            held.ask.barred = barred;
        }
    }

    /// The load of every engine, in the cluster's order.
    pub fn loads(&mut self, now: Seconds) -> &[Load] {
        self.read_loads(now);
        &self.loads
    }

    /// The held requests, the first submitted first.
    pub fn held(&self) -> impl Iterator<Item = Ticket> {
        let mut held: Vec<(u64, Ticket)> = self.held.iter().map(|held| (held.number, held.ticket)).collect();
        held.sort_unstable();
        held.into_iter().map(|(_, ticket)| ticket)
    }

    /// The prompt of a sent request has been computed. `cached_tokens` is what the engine says it took from caches.
    pub fn first_token(&mut self, now: Seconds, ticket: Ticket, cached_tokens: Option<u32>) {
        let Some(sent) = self.sent.get_mut(&ticket) else { return };
        if !std::mem::take(&mut sent.prefilling) {
            return;
        }
        let Some(entry) = sent.entry else { return };
        let (Some(book), Some(&kind)) = (self.engines.get_mut(entry.at()), self.kinds.get(entry.at())) else {
            return;
        };
        let cached = cached_tokens.map(u64::from);
        let Some(Computed { work, took, alone }) = book.computed(now, ticket, cached) else { return };
        if alone {
            book.speed = self.learners[kind].observe(work, took, book.speed);
        }
    }

    /// Nobody will tell when the prompt of a sent request has been computed, because its answer comes in one piece at the end: then
    /// the prediction is believed.
    pub fn first_token_unseen(&mut self, ticket: Ticket) {
        let entry = self.sent.get(&ticket).and_then(|sent| sent.entry);
        if let Some(book) = entry.and_then(|ix| self.engines.get_mut(ix.at())) {
            book.unseen(ticket);
        }
    }

    /// A request is over, whatever its end: it leaves the books, or is no longer held.
    pub fn ended(&mut self, now: Seconds, ticket: Ticket) {
        let Some(sent) = self.sent.remove(&ticket) else {
            self.held.retain(|held| held.ticket != ticket);
            return;
        };
        if let Some(book) = sent.entry.and_then(|ix| self.engines.get_mut(ix.at())) {
            book.leave();
            if sent.prefilling {
                book.abandoned(now, ticket);
            }
        }
        if let Some(book) = sent.exit.and_then(|ix| self.engines.get_mut(ix.at())) {
            book.release_decode(sent.decode_tokens);
            if sent.entry != sent.exit {
                book.leave();
            }
        }
    }

    fn read_loads(&mut self, now: Seconds) {
        self.now = now;
        self.engines.iter_mut().for_each(|engine| engine.advance(now));
        self.loads.clear();
        let kinds = self.kinds.iter().map(|&kind| &self.learners[kind]);
        self.loads.extend(self.engines.iter().zip(kinds).map(|(engine, learned)| engine.load(now, learned)));
    }

    fn rank(&self, held: &Held) -> f64 {
        self.policy.rank(&self.input(self.now, 0, held))
    }

    fn hold(&mut self, held: Held) {
        let after = |other: &Held| {
            other.rank.total_cmp(&held.rank).then(other.number.cmp(&held.number)) == std::cmp::Ordering::Less
        };
        let position = self.held.partition_point(after);
        self.held.insert(position, held);
    }

    /// Enters a sent request into the books of its engines, and their loads anew.
    fn book(&mut self, now: Seconds, held: &Held, decision: &Decision) {
        let (entry, exit) = (decision.route.entry(), decision.route.exit());
        if let (Some(book), Some(load), Some(instance)) =
            (self.engines.get_mut(entry.at()), self.loads.get(entry.at()), self.cluster.get(entry))
        {
            let input_tokens = held.ask.request.total_input_tokens();
            let prediction = &held.ask.prediction;
            let estimate = Estimate::of(input_tokens, prediction, (entry, instance), load, load.prefill_wait);
            let share = estimate.service / load.service.seconds(input_tokens, 0);
            self.uncached += TYPICAL_GAIN * (share - self.uncached);
            self.mix.add(estimate.service / load.service.speed);
            book.enter();
            book.push_prefill(now, held.ticket, input_tokens, decision.booking.prefill_tokens, &estimate);
        }
        if let Some(book) = self.engines.get_mut(exit.at()) {
            book.hold_decode(decision.booking.decode_tokens);
            if entry != exit {
                book.enter();
            }
        }
        for ix in [entry, exit] {
            if let (Some(load), Some(book)) = (self.loads.get_mut(ix.at()), self.engines.get(ix.at())) {
                *load = book.load(now, &self.learners[self.kinds[ix.at()]]);
            }
        }
        let sent = Sent {
            entry: Some(entry),
            exit: Some(exit),
            decode_tokens: decision.booking.decode_tokens,
            prefilling: true,
        };
        self.sent.insert(held.ticket, sent);
    }
}

/// Fresh random bits for each decision of one poll (SplitMix64).
fn mixed(entropy: u64, number: u64) -> u64 {
    let mut bits = entropy.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests;
