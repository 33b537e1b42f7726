//! What one engine was sent and has not finished, and when it will be done with it.

use crate::estimate::{FETCH_LATENCY, PrefillEstimate};
use crate::fleet::{InstanceLoad, ReportedLoad};
use crate::prefill_queue::{PendingPrefill, PrefillQueue, PrefillStoreRead};
use crate::prefill_time::PrefillTimeModel;
use crate::prefill_time_learner::{PrefillTimeLearner, PrefillWork};
use crate::request::Seconds;
use crate::scheduler::AttemptId;

/// A prompt of unknown length that has been computed for some time is expected to need this share of it longer.
const OVERRUN_SHARE: f64 = 0.3;

/// The book of one engine. Its prefills are one queue, computed one after the other in order of sending.
#[derive(Debug)]
pub(crate) struct EngineLoadTracker {
    pub(crate) available: bool,
    /// How many times slower than others of its kind, as learned.
    pub(crate) speed: f64,
    in_flight: u32,
    decode_tokens: u64,
    queue: PrefillQueue,
    /// When the link to the shared store is free.
    fetch_free_at: Seconds,
    report: Option<EngineLoadReport>,
    /// When a report last told of other gateways' work.
    external_seen_at: Seconds,
}

/// An engine's own words, and what was known here when they came.
#[derive(Debug, Clone, Copy)]
struct EngineLoadReport {
    received_at: Seconds,
    load: ReportedLoad,
    /// Work that other gateways sent there.
    external: ExternalLoad,
    /// Work in the own queue then, and sent since.
    own_work: Seconds,
}

/// What of an engine's queue is not in the book: other gateways sent it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct ExternalLoad {
    /// Waiting tokens.
    tokens: u64,
    /// Time to compute them.
    waiting: Seconds,
    /// Time that is left of the one being computed.
    running: Seconds,
    /// When that one was first seen, and how long it was thought to take.
    started: Option<(Seconds, Seconds)>,
}

/// A prefill that is over.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CompletedPrefill {
    /// What was computed, and read if that could be seen.
    pub(crate) work: PrefillWork,
    /// From when the engine was free for it and its pages were there to its first token, with the reading if that could be seen.
    pub(crate) duration: Seconds,
    /// Whether nothing of other gateways was in between, as far as known.
    pub(crate) exclusive: bool,
}

impl EngineLoadTracker {
    pub(crate) fn new() -> Self {
        Self {
            available: true,
            speed: 1.0,
            in_flight: 0,
            decode_tokens: 0,
            queue: PrefillQueue::default(),
            fetch_free_at: 0.0,
            report: None,
            external_seen_at: f64::NEG_INFINITY,
        }
    }

    pub(crate) fn load(&self, now: Seconds, learned: &PrefillTimeLearner) -> InstanceLoad {
        let (idle_wait, idle_for) = self.idle(now).unwrap_or_default();
        InstanceLoad {
            idle_wait,
            idle_for,
            available: self.available,
            in_flight: self.in_flight,
            pending_prefills: self.queue.len(),
            pending_prefill_tokens: self.queue.tokens(),
            active_decode_tokens: self.decode_tokens,
            reported: self.report.map(|report| ReportedLoad {
                age: report.load.age + (now - report.received_at).max(0.0),
                ..report.load
            }),
            prefill_wait: self.prefill_wait(now, learned.relative_error()),
            fetch_wait: (self.fetch_free_at - now).max(0.0),
            fetch_slowness: Some(learned.fetch_slowness()),
            service: learned.model(self.speed),
            handover_per_token: learned.handover_per_token() * self.speed,
        }
    }

    fn prefill_wait(&self, now: Seconds, spread: f64) -> Seconds {
        let own = self.queue.wait(now, spread);
        match self.report {
            // What others sent stands in the same queue; the engine has worked since the report.
            Some(report) if report.external.work() > 0.0 => {
                own.max(report.external.work() + report.own_work - (now - report.received_at))
            }
            _ => own,
        }
    }

    /// What others sent is not known to wait for pages.
    fn idle(&self, now: Seconds) -> Option<(Seconds, Seconds)> {
        let foreign = self.report.is_some_and(|report| report.external.work() > 0.0);
        self.queue.idle(now).filter(|_| !foreign)
    }

    /// Enters a request that comes to this engine, for prefill or for decode.
    pub(crate) fn start_request(&mut self) {
        self.in_flight += 1;
    }

    /// Strikes a request out that [`EngineLoadTracker::start_request`] entered.
    pub(crate) fn end_request(&mut self) {
        self.in_flight -= 1;
    }

    pub(crate) fn reserve_decode(&mut self, tokens: u64) {
        self.decode_tokens += tokens;
    }

    pub(crate) fn release_decode(&mut self, tokens: u64) {
        self.decode_tokens -= tokens;
    }

    /// Enters a prefill of `input_tokens`, of which `tokens` are booked as uncached.
    pub(crate) fn push_prefill(
        &mut self,
        now: Seconds,
        ticket: AttemptId,
        input_tokens: u64,
        tokens: u64,
        estimate: &PrefillEstimate,
    ) {
        let ready = now + estimate.fetch;
        let reading = (estimate.fetch > 0.0).then(|| PrefillStoreRead {
            from: self.fetch_free_at.max(now) + FETCH_LATENCY,
            tokens: estimate.fetched_tokens.into(),
            per_token: estimate.nominal_fetch_per_token,
            truncates_fetch: estimate.truncates_fetch,
        });
        if estimate.fetched_tokens > 0 {
            self.fetch_free_at = self.fetch_free_at.max(ready);
        }
        if let Some(report) = &mut self.report {
            report.own_work += estimate.service;
        }
        let cached = u64::from(estimate.cached_tokens).min(input_tokens);
        let queued = PendingPrefill {
            attempt: ticket,
            tokens,
            work: PrefillWork {
                computed_tokens: (input_tokens - cached).max(1),
                cached_tokens: cached,
                handover_tokens: estimate.handover_tokens,
                fetch_seconds: 0.0,
            },
            service: estimate.service,
            handover: estimate.handover,
            ready,
            store_read: reading,
            unobserved: false,
        };
        self.queue.push(now, queued);
    }

    /// Takes a prefill out whose first token has come, with what the engine says that it took from caches; `None` if it is not (or no
    /// longer) in the queue.
    pub(crate) fn complete_prefill(
        &mut self,
        now: Seconds,
        ticket: AttemptId,
        cached: Option<u64>,
    ) -> Option<CompletedPrefill> {
        let (work, took) = self.queue.complete(now, ticket, cached)?;
        Some(CompletedPrefill { work, duration: took, exclusive: self.external_seen_at < now - took })
    }

    /// Takes a prefill out that ended without a first token.
    pub(crate) fn abort_prefill(&mut self, now: Seconds, ticket: AttemptId) {
        self.queue.abort(now, ticket);
    }

    /// Takes a report in. `uncached` is the share of a prompt that usually has to be computed; `None` of an engine that also decodes:
    /// what runs there says little of prompts.
    pub(crate) fn apply_report(
        &mut self,
        now: Seconds,
        said: ReportedLoad,
        learned: &PrefillTimeLearner,
        uncached: Option<f64>,
    ) {
        let before = self.report.map_or_else(ExternalLoad::default, |report| report.external);
        let foreign = self.estimate_external(now, &said, &before, &learned.model(self.speed), uncached);
        if foreign.work() > 0.0 {
            self.external_seen_at = now;
        }
        self.report = Some(EngineLoadReport {
            received_at: now,
            load: said,
            external: foreign,
            own_work: self.queue.wait(now, learned.relative_error()),
        });
    }

    pub(crate) fn mark_unobserved(&mut self, ticket: AttemptId) {
        self.queue.mark_unobserved(ticket);
    }

    pub(crate) fn advance(&mut self, now: Seconds) {
        self.queue.advance(now);
    }

    fn estimate_external(
        &self,
        now: Seconds,
        said: &ReportedLoad,
        before: &ExternalLoad,
        model: &PrefillTimeModel,
        uncached: Option<f64>,
    ) -> ExternalLoad {
        let per_token = model.a * model.speed;
        let there = said.running.saturating_add(said.waiting);
        let ours_there = if uncached.is_some() { self.queue.len() } else { self.in_flight };
        if there <= ours_there {
            return ExternalLoad::default();
        }
        let Some(uncached) = uncached else {
            // Which of ours wait is not known: all that might.
            let tokens = said.waiting_uncached_tokens.saturating_sub(self.queue.tokens());
            return ExternalLoad { tokens, waiting: per_token * tokens as f64, ..ExternalLoad::default() };
        };
        let ours_runs = self.queue.head_tokens().is_some_and(|head| {
            // What is in use is the prompt being computed, to a page or so. 0 is not told.
            said.used_tokens == 0 || said.used_tokens.abs_diff(head) <= head / 20
        });
        let running = said.running > 0 && !ours_runs;
        let ours = if running { self.queue.tokens() } else { self.queue.waiting_tokens() };
        let tokens = said.waiting_uncached_tokens.saturating_sub(ours);
        let mut foreign =
            ExternalLoad { tokens, waiting: per_token * tokens as f64, ..ExternalLoad::default() };
        if running {
            let (begun, size) = match before.started {
                // Another one has gone from waiting to running.
                _ if tokens < before.tokens => (now, per_token * (before.tokens - tokens) as f64),
                Some(begun) => begun,
                None => (now, uncached * model.seconds(said.used_tokens, 0)),
            };
            foreign.started = Some((begun, size));
            // Times are spread widely: what has taken long will take long.
            foreign.running = (size - (now - begun)).max(OVERRUN_SHARE * (now - begun));
        }
        foreign
    }

    /// Nothing is entered any more.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.in_flight == 0 && self.decode_tokens == 0 && self.queue.is_empty() && self.queue.tokens() == 0
    }
}

impl ExternalLoad {
    fn work(&self) -> Seconds {
        self.waiting + self.running
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_of_other_gateways_comes_from_the_report_and_shrinks() {
        let learned =
            PrefillTimeLearner::new(&PrefillTimeModel { c0: 0.0, a: 0.001, b: 0.0, speed: 1.0 }, 0.0);
        let estimate = PrefillEstimate {
            wait: 0.0,
            fetch: 0.0,
            service: 1.0,
            handover: 0.0,
            handover_tokens: 0,
            cached_tokens: 0,
            fetched_tokens: 0,
            nominal_fetch_per_token: 0.0,
            truncates_fetch: false,
        };
        let mut book = EngineLoadTracker::new();
        let wait = |book: &EngineLoadTracker, now| book.load(now, &learned).prefill_wait;
        book.push_prefill(0.0, AttemptId(1), 1000, 1000, &estimate);
        book.apply_report(
            0.0,
            ReportedLoad { running: 1, waiting: 3, waiting_uncached_tokens: 5000, ..ReportedLoad::default() },
            &learned,
            Some(1.0),
        );
        assert_eq!(wait(&book, 0.0), 6.0);
        assert_eq!(wait(&book, 2.0), 4.0);
        book.push_prefill(2.0, AttemptId(2), 1000, 1000, &estimate);
        assert_eq!(wait(&book, 2.0), 5.0);
        book.apply_report(3.0, ReportedLoad::default(), &learned, Some(1.0));
        assert_eq!(wait(&book, 3.0), 1.0);
        assert_eq!(book.load(4.0, &learned).reported.unwrap().age, 1.0);
    }

    #[test]
    fn prompt_of_another_gateway_loads_the_engine_until_computed() {
        let learned =
            PrefillTimeLearner::new(&PrefillTimeModel { c0: 0.0, a: 0.001, b: 0.0, speed: 1.0 }, 0.0);
        let mut book = EngineLoadTracker::new();
        let busy = ReportedLoad { running: 1, used_tokens: 10_000, ..ReportedLoad::default() };
        // Half of a prompt usually has to be computed.
        book.apply_report(0.0, busy, &learned, Some(0.5));
        assert!((book.load(0.0, &learned).prefill_wait - 5.0).abs() < 1e-9);
        book.apply_report(3.0, busy, &learned, Some(0.5));
        assert!((book.load(3.0, &learned).prefill_wait - 2.0).abs() < 1e-9);
        // It takes longer than thought.
        book.apply_report(10.0, busy, &learned, Some(0.5));
        assert!((book.load(10.0, &learned).prefill_wait - OVERRUN_SHARE * 10.0).abs() < 1e-9);
        book.apply_report(11.0, ReportedLoad::default(), &learned, Some(0.5));
        assert_eq!(book.load(11.0, &learned).prefill_wait, 0.0);
    }

    #[test]
    fn what_an_engine_decodes_is_no_prompt_of_another_gateway() {
        let learned =
            PrefillTimeLearner::new(&PrefillTimeModel { c0: 0.0, a: 0.001, b: 0.0, speed: 1.0 }, 0.0);
        let mut book = EngineLoadTracker::new();
        let wait = |book: &EngineLoadTracker, now| book.load(now, &learned).prefill_wait;
        (0..3).for_each(|_| book.start_request());
        let ours = ReportedLoad { running: 3, used_tokens: 90_000, ..ReportedLoad::default() };
        book.apply_report(0.0, ours, &learned, None);
        assert_eq!(wait(&book, 0.0), 0.0);
        // Others decode there too.
        let running = ReportedLoad { running: 9, ..ours };
        book.apply_report(1.0, running, &learned, None);
        assert_eq!(wait(&book, 1.0), 0.0);
        // Others wait there.
        let waiting = ReportedLoad { waiting: 2, waiting_uncached_tokens: 4000, ..running };
        book.apply_report(2.0, waiting, &learned, None);
        assert_eq!(wait(&book, 2.0), 4.0);
    }

    #[test]
    fn fetches_queue_on_the_link() {
        let learned = PrefillTimeLearner::new(&PrefillTimeModel::default(), 0.0);
        let estimate = PrefillEstimate {
            wait: 0.0,
            fetch: 4.0,
            service: 1.0,
            handover: 0.0,
            handover_tokens: 0,
            cached_tokens: 1000,
            fetched_tokens: 1000,
            nominal_fetch_per_token: 0.001,
            truncates_fetch: false,
        };
        let mut book = EngineLoadTracker::new();
        book.push_prefill(0.0, AttemptId(1), 1100, 100, &estimate);
        assert_eq!(book.load(1.0, &learned).fetch_wait, 3.0);
        assert_eq!(book.load(9.0, &learned).fetch_wait, 0.0);
    }
}
