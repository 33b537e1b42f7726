//! Requests that were sent: their load on the engines, and what is learned from their progress.

use super::{AdapterResidencies, AttemptId, ScheduleRequest, Scheduler};
use crate::decision::RoutingDecision;
use crate::decode_tracker::DecodingRequest;
use crate::estimate::{EngineView, PrefillBacklog, PrefillEstimate};
use crate::fleet::{InstanceIndex, InstanceRole};
use crate::load_tracker::{CompletedPrefill, SentPrefill};
use crate::prediction::CacheHitPrediction;
use crate::request::RequestProfile;
use crate::seconds::Seconds;

/// Weight of a new request in the average uncached share.
const UNCACHED_SHARE_GAIN: f64 = 0.02;

/// Shorter responses say little about the time per token: the first one includes the transfer to the decode.
const MIN_OBSERVED_RESPONSE: u64 = 16;

/// A tracked request. Its engines are `None` after they left the cluster.
#[derive(Debug)]
pub(super) struct InFlightAttempt {
    pub(super) prefill: Option<InstanceIndex>,
    pub(super) decode: Option<InstanceIndex>,
    sequences: u32,
    decode_tokens: u64,
    prefilling: bool,
    is_background: bool,
    /// Whether its decode is an engine whose steps are learned: plain workers compute prompts most of the time.
    tracks_decoding: bool,
    /// Since the first token.
    decoding: Option<DecodingRequest>,
    /// Expected seconds of its read from the store, if an engine has to load its LoRA adapter before.
    pub(super) fetch_after_load: Option<Seconds>,
}

impl InFlightAttempt {
    /// Its engines that are in the cluster.
    fn engines(&self) -> impl Iterator<Item = InstanceIndex> + use<> {
        let decode = self.decode.filter(|decode| Some(*decode) != self.prefill);
        self.prefill.into_iter().chain(decode)
    }
}

impl Scheduler {
    /// Records a decision that another scheduler has made for a request that is not queued here. Its load is tracked until
    /// [`Scheduler::ended`].
    pub fn adopt(
        &mut self,
        now: Seconds,
        attempt: AttemptId,
        submission: &ScheduleRequest,
        decision: &RoutingDecision,
    ) {
        self.refresh_loads(now);
        self.background.submitted(now, &submission.request, (&self.cluster, &self.loads));
        let adapters = self.adapter_residencies(now, &submission.request);
        self.track(now, attempt, (&submission.request, &submission.prediction, &adapters), decision);
    }

    /// Whether a request was sent and has not ended.
    #[must_use]
    pub fn is_in_flight(&self, attempt: AttemptId) -> bool {
        self.in_flight.contains_key(&attempt)
    }

    /// Records that the prompt of a sent request has been computed. `cached_tokens` is the engine's report of cache
    /// hits.
    pub fn first_token(&mut self, now: Seconds, attempt: AttemptId, cached_tokens: Option<u32>) {
        let Some(sent) = self.in_flight.get_mut(&attempt) else { return };
        if !std::mem::take(&mut sent.prefilling) {
            return;
        }
        self.pending.computed(now, attempt);
        sent.engines().for_each(|ix| self.load_refresh.mark(ix));
        if sent.tracks_decoding
            && let Some(book) = sent.decode.and_then(|ix| self.engines.get_mut(ix.as_usize()))
        {
            sent.decoding = Some(book.start_decoding(now, sent.sequences, sent.decode_tokens));
        }
        let Some(entry) = sent.prefill else { return };
        let (Some(book), Some(models)) =
            (self.engines.get_mut(entry.as_usize()), self.groups.models_mut(entry))
        else {
            return;
        };
        let cached = cached_tokens.map(u64::from);
        let Some(CompletedPrefill { work, duration, exclusive: alone }) =
            book.complete_prefill(now, attempt, cached)
        else {
            return;
        };
        if alone {
            book.speed = models.prefill.observe(work, duration, book.speed);
        }
    }

    /// Marks the first token of a sent request as unobservable, because the response arrives in one piece at the end:
    /// the prediction is used instead.
    pub fn first_token_unobserved(&mut self, attempt: AttemptId) {
        let entry = self.in_flight.get(&attempt).and_then(|sent| sent.prefill);
        if let Some(book) = entry.and_then(|ix| self.engines.get_mut(ix.as_usize())) {
            book.mark_unobserved(attempt);
        }
        entry.into_iter().for_each(|ix| self.load_refresh.mark(ix));
    }

    /// Records that the response of a sent request is complete, before [`Scheduler::ended`]. `output_tokens` is the
    /// number of generated tokens of all its sequences.
    pub fn response_complete(&mut self, now: Seconds, attempt: AttemptId, output_tokens: u64) {
        let Some(sent) = self.in_flight.get_mut(&attempt) else { return };
        self.pending.computed(now, attempt);
        let Some(ix) = sent.decode else { return };
        let (Some(book), Some(models)) = (self.engines.get_mut(ix.as_usize()), self.groups.models_mut(ix))
        else {
            return;
        };
        models.decode.observe_response(output_tokens / u64::from(sent.sequences.max(1)));
        let Some((duration, batch)) =
            sent.decoding.take().and_then(|decoding| book.end_decoding(now, decoding))
        else {
            return;
        };
        // The sequences of one request have different lengths, of which only the sum is known.
        if sent.sequences == 1 && output_tokens >= MIN_OBSERVED_RESPONSE {
            let step = duration / (output_tokens - 1) as f64;
            book.decode_speed = models.decode.observe_step(batch, step, book.decode_speed);
        }
    }

    /// Records the end of a request, whatever its outcome: its load is removed, or it leaves the queue.
    pub fn ended(&mut self, now: Seconds, attempt: AttemptId) {
        let Some(sent) = self.in_flight.remove(&attempt) else {
            self.queued.retain(|queued| queued.attempt != attempt);
            return;
        };
        self.pending.ended(attempt);
        sent.engines().for_each(|ix| self.load_refresh.mark(ix));
        if let Some(book) = sent.prefill.and_then(|ix| self.engines.get_mut(ix.as_usize())) {
            book.end_request();
            if sent.prefilling {
                book.abort_prefill(now, attempt);
            }
        }
        if let Some(book) = sent.decode.and_then(|ix| self.engines.get_mut(ix.as_usize())) {
            if let Some(decoding) = sent.decoding {
                book.end_decoding(now, decoding);
            }
            book.release_decode(sent.sequences, sent.decode_tokens);
            if sent.is_background {
                book.release_background(sent.sequences, sent.decode_tokens);
            }
            if sent.prefill != sent.decode {
                book.end_request();
            }
        }
    }

    /// Sequences wait at the decode `ix`, so a late first token does not mean that the prompt is still being computed.
    pub(super) fn expect_late_first_tokens(&mut self, ix: InstanceIndex) {
        for (&attempt, sent) in &self.in_flight {
            if sent.prefilling
                && sent.decode == Some(ix)
                && sent.prefill != Some(ix)
                && let Some(prefill) = sent.prefill
                && let Some(book) = self.engines.get_mut(prefill.as_usize())
            {
                book.mark_unobserved(attempt);
                self.load_refresh.mark(prefill);
            }
        }
    }

    /// Adds a sent request to the load of its engines, and refreshes their entries in `loads`.
    pub(super) fn track(
        &mut self,
        now: Seconds,
        attempt: AttemptId,
        (request, prediction, adapters): (&RequestProfile, &CacheHitPrediction, &AdapterResidencies),
        decision: &RoutingDecision,
    ) {
        let (entry, exit) = (decision.route.prefill_instance(), decision.route.decode_instance());
        // Both engines load at the same time, before either gets the request.
        let adapter_load = adapters.of(entry).wait().max(adapters.of(exit).wait());
        let mut fetch_after_load = None;
        for ix in [entry, exit] {
            self.adapter_loads.start(now, &self.cluster, ix, request.model);
        }
        self.pending.add(attempt, entry, prediction);
        let sequences = request.sequences.max(1);
        if let (Some(book), Some(load), Some(instance)) = (
            self.engines.get_mut(entry.as_usize()),
            self.loads.get(entry.as_usize()),
            self.cluster.get(entry),
        ) {
            let input_tokens = request.total_input_tokens();
            let estimate = PrefillEstimate::new(
                input_tokens,
                prediction,
                EngineView { index: entry, instance, load },
                PrefillBacklog::of(load),
            )
            .after_load(adapter_load);
            fetch_after_load = (adapter_load > 0.0).then_some(estimate.fetch);
            let share = estimate.service / load.service.seconds(input_tokens, 0);
            self.uncached_share += UNCACHED_SHARE_GAIN * (share - self.uncached_share);
            self.prefill_times.add(estimate.service / load.service.speed);
            self.background.sent(now, request, estimate.service);
            book.start_request();
            let prefill = SentPrefill {
                attempt,
                input_tokens,
                uncached_tokens: decision.reservation.prefill_tokens,
                estimate,
            };
            book.push_prefill(now, &prefill);
        }
        if let Some(book) = self.engines.get_mut(exit.as_usize()) {
            book.reserve_decode(sequences, decision.reservation.decode_tokens);
            if request.is_background() {
                book.reserve_background(sequences, decision.reservation.decode_tokens);
            }
            if entry != exit {
                book.start_request();
            }
        }
        for ix in [entry, exit] {
            self.refresh_load(now, ix);
        }
        let sent = InFlightAttempt {
            prefill: Some(entry),
            decode: Some(exit),
            sequences,
            decode_tokens: decision.reservation.decode_tokens,
            prefilling: true,
            is_background: request.is_background(),
            tracks_decoding: self
                .cluster
                .get(exit)
                .is_some_and(|instance| instance.role == InstanceRole::Decode),
            decoding: None,
            fetch_after_load,
        };
        self.in_flight.insert(attempt, sent);
    }
}
