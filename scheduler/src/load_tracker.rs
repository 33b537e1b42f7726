//! Unfinished requests of one engine, and when it will have finished them.

use crate::attempt::AttemptId;
use crate::decode_step::DecodeBatch;
use crate::decode_tracker::{DecodeTracker, DecodingRequest};
use crate::engine_models::EngineModels;
use crate::estimate::{FETCH_LATENCY, PrefillEstimate};
use crate::fleet::{InstanceLoad, NextPass, PREFILL_SHARE_S, ReportedLoad};
use crate::prefill_queue::{ExpectedIdle, PendingPrefill, PrefillQueue, PrefillStoreRead};
use crate::prefill_time::PrefillTimeModel;
use crate::prefill_time_learner::PrefillWork;
use crate::seconds::Seconds;

/// A prompt of unknown length that is being computed is expected to need at least this share of its elapsed time in
/// addition.
const OVERRUN_SHARE: f64 = 0.3;

/// Load of one engine. Its prefills form one queue, computed one after the other in order of sending.
#[derive(Debug)]
pub(crate) struct EngineLoadTracker {
    pub(crate) available: bool,
    /// Learned slowdown against other engines of the same group.
    pub(crate) speed: f64,
    /// The same for decode steps.
    pub(crate) decode_speed: f64,
    in_flight: u32,
    decode_tokens: u64,
    decode_sequences: u32,
    background_tokens: u64,
    background_sequences: u32,
    decoding: DecodeTracker,
    queue: PrefillQueue,
    /// Computation that was sent recently, as a share of the time, at `advanced_at`.
    prefill_share: f64,
    advanced_at: Seconds,
    /// Time at which the link to the shared store is free.
    fetch_free_at: Seconds,
    report: Option<EngineLoadReport>,
    /// When a report last contained work of other gateways.
    last_external_at: Seconds,
}

/// A load report of the engine, with this gateway's own state when it arrived.
#[derive(Debug, Clone, Copy)]
struct EngineLoadReport {
    received_at: Seconds,
    load: ReportedLoad,
    /// Sequences beyond the gateway's own.
    external_sequences: u32,
    /// Work that other gateways sent there.
    external: ExternalLoad,
    /// Work in the gateway's own queue at that time, plus what was sent since.
    own_work: Seconds,
}

/// The part of an engine's queue that is not tracked here: other gateways sent it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct ExternalLoad {
    tokens: u64,
    /// Time to compute the waiting tokens.
    waiting: Seconds,
    /// Remaining time of the prompt being computed.
    running: Seconds,
    started: Option<RunningPrompt>,
}

/// A prompt that another gateway has sent and that is being computed.
#[derive(Debug, Clone, Copy, PartialEq)]
struct RunningPrompt {
    /// When it was first observed.
    since: Seconds,
    /// Its estimated duration.
    duration: Seconds,
}

/// A prefill that was sent to the engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SentPrefill {
    pub(crate) attempt: AttemptId,
    pub(crate) input_tokens: u64,
    /// Those of them that count as uncached.
    pub(crate) uncached_tokens: u64,
    pub(crate) estimate: PrefillEstimate,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CompletedPrefill {
    /// Computed tokens, and the store read if its duration was observable.
    pub(crate) work: PrefillWork,
    /// From when the engine was free and the blocks were in its memory to the first token; includes the store read if
    /// its duration was observable.
    pub(crate) duration: Seconds,
    /// Whether, as far as known, no work of other gateways was computed in between.
    pub(crate) exclusive: bool,
}

impl EngineLoadTracker {
    pub(crate) fn new() -> Self {
        Self {
            available: true,
            speed: 1.0,
            decode_speed: 1.0,
            in_flight: 0,
            decode_tokens: 0,
            decode_sequences: 0,
            background_tokens: 0,
            background_sequences: 0,
            decoding: DecodeTracker::default(),
            queue: PrefillQueue::default(),
            prefill_share: 0.0,
            advanced_at: 0.0,
            fetch_free_at: 0.0,
            report: None,
            last_external_at: f64::NEG_INFINITY,
        }
    }

    // Inlined, so that it is built where it is stored: all engines are refreshed for each decision.
    #[inline]
    pub(crate) fn load(&self, now: Seconds, models: &EngineModels) -> InstanceLoad {
        let EngineModels { prefill: learned, decode } = models;
        let idle = self.idle(now).unwrap_or_default();
        InstanceLoad {
            idle_wait: idle.wait,
            idle_for: idle.duration,
            available: self.available,
            in_flight: self.in_flight,
            pending_prefills: self.queue.len(),
            pending_prefill_tokens: self.queue.tokens(),
            active_decode_tokens: self.decode_tokens,
            decode_sequences: self.decode_sequences,
            background_sequences: self.background_sequences,
            background_tokens: self.background_tokens,
            decode_step: decode.model(self.decode_speed),
            response_tokens: decode.response_tokens(),
            reported: self.report.map(|report| ReportedLoad {
                age: report.load.age + (now - report.received_at).max(0.0),
                ..report.load
            }),
            external_sequences: self.report.map_or(0, |report| report.external_sequences),
            prefill_wait: self.prefill_wait(now, learned.relative_error()),
            next_pass: self.next_pass(&learned.model(self.speed)),
            prefill_share: self.prefill_share,
            fetch_wait: (self.fetch_free_at - now).max(0.0),
            fetch_slowness: Some(learned.fetch_slowness()),
            service: learned.model(self.speed),
            handover_per_token: learned.handover_per_token() * self.speed,
        }
    }

    fn prefill_wait(&self, now: Seconds, spread: f64) -> Seconds {
        let own = self.queue.wait(now, spread);
        match self.report {
            // External work is in the same queue; the engine has worked since the report.
            Some(report) if report.external.work() > 0.0 => {
                own.max(report.external.work() + report.own_work - (now - report.received_at))
            }
            _ => own,
        }
    }

    /// Passes are not known to begin with prompts of other gateways.
    fn next_pass(&self, service: &PrefillTimeModel) -> NextPass {
        if self.report.is_some_and(|report| report.external.work() > 0.0) {
            return NextPass::default();
        }
        self.queue.next_pass(|new, work| NextPass::begin(service, new, work)).unwrap_or_default()
    }

    /// External work is not known to wait for blocks.
    fn idle(&self, now: Seconds) -> Option<ExpectedIdle> {
        let external = self.report.is_some_and(|report| report.external.work() > 0.0);
        self.queue.idle(now).filter(|_| !external)
    }

    /// Counts a request on this engine, for prefill or for decode.
    pub(crate) fn start_request(&mut self) {
        self.in_flight += 1;
    }

    pub(crate) fn end_request(&mut self) {
        self.in_flight -= 1;
    }

    pub(crate) fn reserve_decode(&mut self, sequences: u32, tokens: u64) {
        self.decode_tokens += tokens;
        self.decode_sequences += sequences;
    }

    pub(crate) fn release_decode(&mut self, sequences: u32, tokens: u64) {
        self.decode_tokens -= tokens;
        self.decode_sequences -= sequences;
    }

    /// Marks a reservation as that of a background request.
    pub(crate) fn reserve_background(&mut self, sequences: u32, tokens: u64) {
        self.background_tokens += tokens;
        self.background_sequences += sequences;
    }

    pub(crate) fn release_background(&mut self, sequences: u32, tokens: u64) {
        self.background_tokens -= tokens;
        self.background_sequences -= sequences;
    }

    /// A request with a reservation has its first token.
    pub(crate) fn start_decoding(&mut self, now: Seconds, sequences: u32, tokens: u64) -> DecodingRequest {
        self.decoding.start(now, sequences, tokens)
    }

    /// Ends a request that generated, and returns for how long, and with which mean batch.
    pub(crate) fn end_decoding(
        &mut self,
        now: Seconds,
        request: DecodingRequest,
    ) -> Option<(Seconds, DecodeBatch)> {
        self.decoding.end(now, request)
    }

    pub(crate) fn push_prefill(&mut self, now: Seconds, prefill: &SentPrefill) {
        let SentPrefill { attempt, input_tokens, uncached_tokens: tokens, estimate } = *prefill;
        let ready = now + estimate.ready();
        // After a load, the time of the read is not known well enough to learn from it.
        let store_read = (estimate.fetch > 0.0 && estimate.adapter_load == 0.0).then(|| PrefillStoreRead {
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
        self.prefill_share += estimate.service / PREFILL_SHARE_S;
        let cached = u64::from(estimate.cached_tokens).min(input_tokens);
        let queued = PendingPrefill {
            attempt,
            tokens,
            work: PrefillWork {
                computed_tokens: (input_tokens - cached).max(1),
                cached_tokens: cached,
                handover_tokens: estimate.handover_tokens,
                fetch_seconds: 0.0,
                shares_pass: false,
            },
            shares_pass: estimate.shares_pass,
            pass_constant: estimate.pass_constant,
            service: estimate.service,
            handover: estimate.handover,
            ready,
            store_read,
            unobserved: false,
        };
        self.queue.push(now, queued);
    }

    /// Removes a prefill whose first token has arrived, with the number of cached tokens that the engine reported;
    /// `None` if it is not (or no longer) in the queue.
    pub(crate) fn complete_prefill(
        &mut self,
        now: Seconds,
        attempt: AttemptId,
        cached: Option<u64>,
    ) -> Option<CompletedPrefill> {
        let (work, duration) = self.queue.complete(now, attempt, cached)?;
        Some(CompletedPrefill { work, duration, exclusive: self.last_external_at < now - duration })
    }

    /// Removes a prefill that ended without a first token.
    pub(crate) fn abort_prefill(&mut self, now: Seconds, attempt: AttemptId) {
        self.queue.abort(now, attempt);
    }

    /// Applies a load report. `uncached` is the share of a prompt that usually has to be computed; `None` for an engine
    /// that also decodes, because its running requests say little about prompts.
    pub(crate) fn apply_report(
        &mut self,
        now: Seconds,
        reported: ReportedLoad,
        models: &EngineModels,
        uncached: Option<f64>,
    ) {
        self.decoding.apply_report(now, &reported);
        let learned = &models.prefill;
        let external = self.estimate_external(now, &reported, &learned.model(self.speed), uncached);
        if external.work() > 0.0 {
            self.last_external_at = now;
        }
        self.report = Some(EngineLoadReport {
            received_at: now,
            load: reported,
            external_sequences: reported
                .running
                .saturating_add(reported.waiting)
                .saturating_sub(self.decode_sequences),
            external,
            own_work: self.queue.wait(now, learned.relative_error()),
        });
    }

    /// The adapter of a prefill has been loaded: its read from the store, of `fetch` seconds, can start.
    pub(crate) fn end_adapter_load(&mut self, now: Seconds, attempt: AttemptId, fetch: Seconds) {
        self.queue.set_ready(now, attempt, now + fetch);
    }

    pub(crate) fn mark_unobserved(&mut self, attempt: AttemptId) {
        self.queue.mark_unobserved(attempt);
    }

    pub(crate) fn advance(&mut self, now: Seconds) {
        self.queue.advance(now);
        if self.prefill_share > 0.0 {
            // Nearly exponential for the short times between two calls, and much cheaper: this is done for all engines.
            self.prefill_share /= 1.0 + (now - self.advanced_at).max(0.0) / PREFILL_SHARE_S;
        }
        self.advanced_at = now;
    }

    fn estimate_external(
        &self,
        now: Seconds,
        reported: &ReportedLoad,
        model: &PrefillTimeModel,
        uncached: Option<f64>,
    ) -> ExternalLoad {
        let before = self.report.map_or_else(ExternalLoad::default, |report| report.external);
        let per_token = model.a * model.speed;
        let reported_requests = reported.running.saturating_add(reported.waiting);
        let own_requests = if uncached.is_some() { self.queue.len() } else { self.in_flight };
        if reported_requests <= own_requests {
            return ExternalLoad::default();
        }
        let Some(uncached) = uncached else {
            // Which of this gateway's prompts wait is unknown: assume all that may.
            let tokens = reported.waiting_uncached_tokens.saturating_sub(self.queue.tokens());
            return ExternalLoad { tokens, waiting: per_token * tokens as f64, ..ExternalLoad::default() };
        };
        let own_running = self.queue.head_tokens().is_some_and(|head| {
            // The tokens in use are those of the prompt being computed, rounded to a block. 0 means not reported.
            reported.used_tokens == 0 || reported.used_tokens.abs_diff(head) <= head / 20
        });
        let running = reported.running > 0 && !own_running;
        let own_tokens = if running { self.queue.tokens() } else { self.queue.waiting_tokens() };
        let tokens = reported.waiting_uncached_tokens.saturating_sub(own_tokens);
        let mut external =
            ExternalLoad { tokens, waiting: per_token * tokens as f64, ..ExternalLoad::default() };
        if running {
            let started = |duration| RunningPrompt { since: now, duration };
            let prompt = match before.started {
                // Another prompt has started running.
                _ if tokens < before.tokens => started(per_token * (before.tokens - tokens) as f64),
                Some(prompt) => prompt,
                None => started(uncached * model.seconds(reported.used_tokens, 0)),
            };
            external.started = Some(prompt);
            let elapsed = now - prompt.since;
            // Durations vary widely: the longer a prompt has run, the longer it is expected to run.
            external.running = (prompt.duration - elapsed).max(OVERRUN_SHARE * elapsed);
        }
        external
    }

    /// Whether nothing is tracked any more.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        let decodes = self.decode_tokens > 0 || self.decode_sequences > 0 || !self.decoding.is_empty();
        self.in_flight == 0 && !decodes && self.queue.is_empty() && self.queue.tokens() == 0
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
    use crate::options::SchedulerOptions;

    /// A millisecond per token.
    fn models() -> EngineModels {
        EngineModels::new(&SchedulerOptions {
            service_prior: PrefillTimeModel { c0: 0.0, a: 0.001, b: 0.0, speed: 1.0 },
            handover_prior_s_per_token: 0.0,
            ..SchedulerOptions::default()
        })
    }

    fn sent(attempt: u64, input_tokens: u64, uncached_tokens: u64, estimate: PrefillEstimate) -> SentPrefill {
        SentPrefill { attempt: AttemptId(attempt), input_tokens, uncached_tokens, estimate }
    }

    #[test]
    fn work_of_other_gateways_comes_from_the_report_and_shrinks() {
        let learned = models();
        let estimate = PrefillEstimate {
            adapter_load: 0.0,
            wait: 0.0,
            pass_wait: 0.0,
            shares_pass: false,
            pass_constant: 0.0,
            new_tokens: 0,
            fetch: 0.0,
            service: 1.0,
            handover: 0.0,
            handover_tokens: 0,
            cached_tokens: 0,
            fetched_tokens: 0,
            nominal_fetch_per_token: 0.0,
            truncates_fetch: false,
        };
        let mut tracker = EngineLoadTracker::new();
        let wait = |tracker: &EngineLoadTracker, now| tracker.load(now, &learned).prefill_wait;
        tracker.push_prefill(0.0, &sent(1, 1000, 1000, estimate));
        tracker.apply_report(
            0.0,
            ReportedLoad { running: 1, waiting: 3, waiting_uncached_tokens: 5000, ..ReportedLoad::default() },
            &learned,
            Some(1.0),
        );
        assert_eq!(wait(&tracker, 0.0), 6.0);
        assert_eq!(wait(&tracker, 2.0), 4.0);
        tracker.push_prefill(2.0, &sent(2, 1000, 1000, estimate));
        assert_eq!(wait(&tracker, 2.0), 5.0);
        tracker.apply_report(3.0, ReportedLoad::default(), &learned, Some(1.0));
        assert_eq!(wait(&tracker, 3.0), 1.0);
        assert_eq!(tracker.load(4.0, &learned).reported.unwrap().age, 1.0);
    }

    #[test]
    fn prompt_of_another_gateway_loads_the_engine_until_computed() {
        let learned = models();
        let mut tracker = EngineLoadTracker::new();
        let busy = ReportedLoad { running: 1, used_tokens: 10_000, ..ReportedLoad::default() };
        // Usually half of a prompt has to be computed.
        tracker.apply_report(0.0, busy, &learned, Some(0.5));
        assert!((tracker.load(0.0, &learned).prefill_wait - 5.0).abs() < 1e-9);
        tracker.apply_report(3.0, busy, &learned, Some(0.5));
        assert!((tracker.load(3.0, &learned).prefill_wait - 2.0).abs() < 1e-9);
        // It takes longer than estimated.
        tracker.apply_report(10.0, busy, &learned, Some(0.5));
        assert!((tracker.load(10.0, &learned).prefill_wait - OVERRUN_SHARE * 10.0).abs() < 1e-9);
        tracker.apply_report(11.0, ReportedLoad::default(), &learned, Some(0.5));
        assert_eq!(tracker.load(11.0, &learned).prefill_wait, 0.0);
    }

    #[test]
    fn own_decodes_are_not_external_prompts() {
        let learned = models();
        let mut tracker = EngineLoadTracker::new();
        let wait = |tracker: &EngineLoadTracker, now| tracker.load(now, &learned).prefill_wait;
        (0..3).for_each(|_| tracker.start_request());
        let own = ReportedLoad { running: 3, used_tokens: 90_000, ..ReportedLoad::default() };
        tracker.apply_report(0.0, own, &learned, None);
        assert_eq!(wait(&tracker, 0.0), 0.0);
        // Other gateways' requests decode there too.
        let running = ReportedLoad { running: 9, ..own };
        tracker.apply_report(1.0, running, &learned, None);
        assert_eq!(wait(&tracker, 1.0), 0.0);
        // Other gateways' requests wait there.
        let waiting = ReportedLoad { waiting: 2, waiting_uncached_tokens: 4000, ..running };
        tracker.apply_report(2.0, waiting, &learned, None);
        assert_eq!(wait(&tracker, 2.0), 4.0);
    }

    #[test]
    fn sequences_that_ended_since_the_report_do_not_count() {
        let learned = models();
        let mut tracker = EngineLoadTracker::new();
        let sequences = |tracker: &EngineLoadTracker| tracker.load(0.0, &learned).decode_batch().sequences;
        tracker.reserve_decode(3, 30);
        tracker.apply_report(0.0, ReportedLoad { running: 2, ..ReportedLoad::default() }, &learned, None);
        assert_eq!(sequences(&tracker), 3.0);
        // Two are another gateway's.
        tracker.apply_report(
            0.0,
            ReportedLoad { running: 4, waiting: 1, ..ReportedLoad::default() },
            &learned,
            None,
        );
        assert_eq!(sequences(&tracker), 5.0);
        tracker.release_decode(3, 30);
        assert_eq!(sequences(&tracker), 2.0);
    }

    #[test]
    fn fetches_queue_on_the_link() {
        let learned = models();
        let estimate = PrefillEstimate {
            adapter_load: 0.0,
            wait: 0.0,
            pass_wait: 0.0,
            shares_pass: false,
            pass_constant: 0.0,
            new_tokens: 0,
            fetch: 4.0,
            service: 1.0,
            handover: 0.0,
            handover_tokens: 0,
            cached_tokens: 1000,
            fetched_tokens: 1000,
            nominal_fetch_per_token: 0.001,
            truncates_fetch: false,
        };
        let mut tracker = EngineLoadTracker::new();
        tracker.push_prefill(0.0, &sent(1, 1100, 100, estimate));
        assert_eq!(tracker.load(1.0, &learned).fetch_wait, 3.0);
        assert_eq!(tracker.load(9.0, &learned).fetch_wait, 0.0);
    }
}
