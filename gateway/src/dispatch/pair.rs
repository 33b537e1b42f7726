//! The one or two legs of an attempt. Dropping it aborts what still runs.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use http::Response;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use moongate_telemetry::SpanContext;
use tokio::time::Instant;

use super::abort::{AbortSender, EngineRequestId};
use super::silence::{AttemptSilenceLimits, SilentLeg, SilentLegs, abandoned, suspect};
use crate::feedback::LegSpan;
use crate::fleet::{SuspicionReason, UpstreamEndpoint};
use crate::relay::{ResponseSummary, SseFramer, TokenUsage};
use crate::upstream::{LegError, LegEvent, LegExchange};

/// Most of an engine's error answer, or of a prefill's answer, that is kept.
const MAX_BUFFERED_BYTES: usize = 64 << 10;

/// Which leg of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum LegKind {
    Prefill,
    Decode,
    Worker,
}

impl LegKind {
    pub(crate) const ALL: [Self; 3] = [Self::Prefill, Self::Decode, Self::Worker];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            LegKind::Prefill => "prefill",
            LegKind::Decode => "decode",
            LegKind::Worker => "worker",
        }
    }
}

/// A leg with the engine it talks to.
pub(crate) struct RunningLeg {
    leg: LegExchange,
    endpoint: Arc<UpstreamEndpoint>,
    request_id: Option<EngineRequestId>,
    /// Whether it must be let run to its end even if nobody needs it any more.
    run_to_completion: bool,
    /// Whether its output shows that the engine serves requests.
    generates: bool,
    span: LegSpan,
    head: Option<Response<()>>,
    /// The answer's start, of prefills and of error answers.
    buffered: BytesMut,
}

impl RunningLeg {
    pub(crate) fn new(leg: LegExchange, endpoint: Arc<UpstreamEndpoint>, span: LegSpan) -> Self {
        Self {
            leg,
            endpoint,
            request_id: None,
            run_to_completion: false,
            generates: false,
            span,
            head: None,
            buffered: BytesMut::new(),
        }
    }

    /// Marks a request that the engine must compute something for: its output is the engine's progress.
    pub(super) fn generating(mut self) -> Self {
        self.generates = true;
        self
    }

    /// Gives the means to stop it by request id.
    pub(super) fn with_request_id(mut self, ticket: EngineRequestId) -> Self {
        self.request_id = Some(ticket);
        self
    }

    /// Marks a prefill that must never be cancelled. An aborted request of vLLM's MooncakeConnector blocks one of the prefill's few sender
    /// workers for eight minutes (`VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`), and it ends by itself after one token.
    pub(super) fn run_to_completion(mut self) -> Self {
        self.run_to_completion = true;
        self
    }

    fn poll_leg(&mut self, cx: &mut Context<'_>) -> Poll<LegEvent> {
        let event = self.leg.poll_event(cx);
        match &event {
            Poll::Ready(LegEvent::Head(head)) => self.span.set_status(head.status()),
            Poll::Ready(LegEvent::Data(_)) => {
                if let Some(at) = self.leg.last_data_at() {
                    self.span.record_data(at);
                    if self.generates && !self.is_error_answer() {
                        self.endpoint.record_progress(at);
                    }
                }
            }
            Poll::Ready(LegEvent::End) => {
                self.leg.last_data_at().into_iter().for_each(|at| self.span.ended(at));
            }
            _ => {}
        }
        event
    }

    fn is_error_answer(&self) -> bool {
        self.head.as_ref().is_some_and(|head| !head.status().is_success())
    }

    fn buffer(&mut self, data: &[u8]) {
        let room = MAX_BUFFERED_BYTES.saturating_sub(self.buffered.len());
        self.buffered.extend_from_slice(&data[..data.len().min(room)]);
    }

    /// Advances to the end of a leg whose body only matters if it is an error. `Ready(Ok)` at its good end, with the tokens that it has
    /// counted.
    pub(crate) fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<TokenUsage>, LegError>> {
        loop {
            match self.poll_leg(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(LegEvent::Head(head)) => self.head = Some(head),
                // Whoever waits for the pair watches both legs.
                Poll::Ready(LegEvent::Idle) => {}
                Poll::Ready(LegEvent::Data(data)) => self.buffer(&data),
                Poll::Ready(LegEvent::Failed(error)) => return Poll::Ready(Err(error)),
                Poll::Ready(LegEvent::End) => {
                    let kept = self.buffered.split().freeze();
                    let status =
                        self.head.as_ref().map(Response::status).filter(|status| !status.is_success());
                    return Poll::Ready(match status {
                        Some(status) => Err(LegError::Status(status, kept)),
                        None => check_prefill_answer(self.head.as_ref(), kept),
                    });
                }
            }
        }
    }
}

/// Checks a prefill's complete answer. One that answers 200 without having done its work would leave its decode waiting. Returns the
/// tokens that it has counted.
fn check_prefill_answer(head: Option<&Response<()>>, kept: Bytes) -> Result<Option<TokenUsage>, LegError> {
    if kept.len() >= MAX_BUFFERED_BYTES {
        // Only its start was kept, which is enough to know that the prefill has worked.
        return Ok(None);
    }
    if head.is_some_and(is_event_stream) {
        let mut gate = SseFramer::default();
        let checked = gate.push(kept).and_then(|_| gate.finish(false));
        return checked.map(|_| TokenUsage::read(gate.last_payload())).map_err(LegError::from);
    }
    let said = ResponseSummary::of(&kept);
    let not_json = |_| LegError::ProtocolViolation("answered its prefill with something that is not JSON");
    said.map(|said| said.usage).map_err(not_json)
}

/// Whether the answer is a stream of server-sent events.
pub(super) fn is_event_stream(head: &Response<()>) -> bool {
    let content_type = head.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    content_type.is_some_and(|text| text.starts_with("text/event-stream"))
}

/// The legs of one attempt.
pub(crate) struct LegPair {
    /// `None` for single workers and once the prefill has ended.
    prefill: Option<RunningLeg>,
    main: RunningLeg,
    main_kind: LegKind,
    aborter: Arc<AbortSender>,
    /// Whether the prefill has ended well, and the tokens that it has counted then.
    prefilled: bool,
    prefill_usage: Option<TokenUsage>,
    /// When the prefill ended, until the decode shows that it has the KV cache.
    handed_over: Option<Instant>,
    /// When the prefill of this pair ended.
    prefilled_at: Option<Instant>,
    /// How long the engines may be silent, until the answer begins or fails.
    silence_limits: Option<AttemptSilenceLimits>,
}

/// What a pair reports next.
#[derive(Debug)]
pub(crate) enum PairEvent {
    /// A piece of the answer that goes to the client. The first comes after the head is known.
    Data(Bytes),
    /// The answer is complete.
    End,
    /// One side failed.
    Failed(LegKind, LegError),
    /// Before the first byte: these legs' engines produce nothing. The pair continues.
    Silent(SilentLegs),
}

impl LegPair {
    pub(crate) fn new(
        prefill: Option<RunningLeg>,
        mut main: RunningLeg,
        main_kind: LegKind,
        aborter: Arc<AbortSender>,
    ) -> Self {
        if main_kind != LegKind::Prefill {
            main.span.await_first_byte();
        }
        Self {
            prefill,
            main,
            main_kind,
            aborter,
            prefilled: false,
            prefill_usage: None,
            handed_over: None,
            prefilled_at: None,
            silence_limits: None,
        }
    }

    /// Watches for silence until the answer begins.
    pub(super) fn with_silence_limits(mut self, watch: Option<AttemptSilenceLimits>) -> Self {
        self.silence_limits = watch;
        for (_, endpoint, since, limit) in self.waiting_legs() {
            if let Some(limit) = limit {
                endpoint.silence.expect_silence_until(since, limit);
            }
        }
        self
    }

    /// The legs that wait for their first byte and are watched: side, engine, since when, and how long it may be silent.
    fn waiting_legs(
        &self,
    ) -> impl Iterator<Item = (LegKind, &Arc<UpstreamEndpoint>, Instant, Option<Duration>)> {
        let prefilling = self.prefill.is_some();
        let prefill = self.prefill.as_ref().map(|prefill| (LegKind::Prefill, prefill, prefill.leg.started()));
        // A decode that only fetches waits in silence until the prompt is computed.
        let main = (!self.prefill.as_ref().is_some_and(|prefill| prefill.run_to_completion))
            .then(|| (self.main_kind, &self.main, self.prefilled_at.unwrap_or(self.main.leg.started())));
        let watch = self.silence_limits;
        prefill.into_iter().chain(main).filter_map(move |(side, running, since)| {
            let limit = watch?.limit(prefilling);
            running.leg.last_data_at().is_none().then_some((side, &running.endpoint, since, limit))
        })
    }

    fn silent_legs(&self) -> SilentLegs {
        let now = Instant::now();
        let legs = self.waiting_legs();
        legs.filter_map(|(side, endpoint, since, limit)| SilentLeg::detect(side, endpoint, since, limit, now))
            .collect()
    }

    /// Why a begun answer that has paused is not waited for any longer.
    fn stall_error(&self) -> Option<LegError> {
        let (now, heard) = (Instant::now(), self.main.leg.last_data_at()?);
        let monitor = &self.main.endpoint.silence;
        if monitor.is_stalled(now, heard) {
            let metrics = &self.aborter.metrics;
            suspect(self.main_kind, &self.main.endpoint, SuspicionReason::Stalled, now, metrics);
        }
        let stall = monitor.limits().stall;
        let is_over = !stall.is_zero() && now.saturating_duration_since(heard) >= stall;
        (is_over && monitor.is_unresponsive())
            .then_some(LegError::Timeout("sent no more data and failed its health check", stall))
    }

    /// A prefill has ended well before this pair began, and has counted these tokens.
    pub(super) fn after_prefill(mut self, usage: Option<TokenUsage>) -> Self {
        self.prefill_has_ended(usage, None);
        self
    }

    fn prefill_has_ended(&mut self, usage: Option<TokenUsage>, at: Option<Instant>) {
        self.prefilled = true;
        self.prefilled_at = at;
        self.prefill_usage = usage;
        if self.main.span.awaits_first_byte() {
            self.handed_over = Some(at.unwrap_or_else(Instant::now));
        }
    }

    /// The decode answers, or has failed: it waits for the KV cache no longer.
    fn transfer_has_ended(&mut self, at: Option<Instant>) {
        if let Some(since) = self.handed_over.take() {
            self.main.span.set_kv_transfer(since, at.unwrap_or_else(Instant::now));
        }
    }

    /// Notes on the span of a leg how it failed, and tells which span that is.
    pub(crate) fn record_failure(&mut self, side: LegKind, error: &LegError) -> Option<SpanContext> {
        self.silence_limits = None;
        if side == self.main_kind {
            self.transfer_has_ended(None);
            return self.main.span.failed(error);
        }
        self.prefill.as_mut()?.span.failed(error)
    }

    /// Status and headers of the answer, once the first event has come.
    pub(crate) fn head(&self) -> Option<&Response<()>> {
        self.main.head.as_ref()
    }

    /// Whether the prefill has ended well.
    pub(crate) fn is_prefilled(&self) -> bool {
        self.prefilled
    }

    /// The tokens that the prefill has counted, if it has ended well.
    pub(crate) fn prefill_usage(&self) -> Option<TokenUsage> {
        self.prefill_usage
    }

    /// Which side answers the client.
    pub(crate) fn main_kind(&self) -> LegKind {
        self.main_kind
    }

    /// The engine that answers the client.
    pub(crate) fn main_endpoint(&self) -> &Arc<UpstreamEndpoint> {
        &self.main.endpoint
    }

    /// The next event. A failed prefill is an event too: the decode would wait for its KV cache in vain.
    pub(crate) fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<PairEvent> {
        let event = self.poll_legs(cx);
        if let Poll::Ready(PairEvent::Data(_) | PairEvent::End | PairEvent::Failed(..)) = event {
            self.silence_limits = None;
        }
        event
    }

    fn poll_legs(&mut self, cx: &mut Context<'_>) -> Poll<PairEvent> {
        if let Poll::Ready(Err(error)) = self.poll_prefill(cx) {
            return Poll::Ready(PairEvent::Failed(LegKind::Prefill, error));
        }
        loop {
            match self.main.poll_leg(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(LegEvent::Head(head)) => self.main.head = Some(head),
                Poll::Ready(LegEvent::Idle) => {
                    let silent = self.silent_legs();
                    if !silent.is_empty() {
                        return Poll::Ready(PairEvent::Silent(silent));
                    }
                }
                Poll::Ready(LegEvent::Data(data)) if self.main.is_error_answer() => self.main.buffer(&data),
                Poll::Ready(LegEvent::Data(data)) => {
                    self.transfer_has_ended(self.main.leg.last_data_at());
                    return Poll::Ready(PairEvent::Data(data));
                }
                Poll::Ready(LegEvent::Failed(error)) => {
                    return Poll::Ready(PairEvent::Failed(self.main_kind, error));
                }
                Poll::Ready(LegEvent::End) => {
                    let status = self.main.head.as_ref().map(Response::status).filter(|s| !s.is_success());
                    return Poll::Ready(match status {
                        Some(status) => {
                            let body = self.main.buffered.split().freeze();
                            PairEvent::Failed(self.main_kind, LegError::Status(status, body))
                        }
                        None => PairEvent::End,
                    });
                }
            }
        }
    }

    fn poll_prefill(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LegError>> {
        let Some(prefill) = self.prefill.as_mut() else { return Poll::Pending };
        let Poll::Ready(outcome) = prefill.poll_drain(cx) else { return Poll::Pending };
        match outcome {
            Ok(usage) => {
                prefill.endpoint.breaker.record_success();
                let at = prefill.leg.last_data_at();
                self.prefill = None;
                self.prefill_has_ended(usage, at);
                Poll::Ready(Ok(()))
            }
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    /// The first token is with the client: from here on a failing prefill harms nobody and is not reported.
    pub(crate) fn poll_after_first_token(&mut self, cx: &mut Context<'_>) -> Poll<PairEvent> {
        if let Poll::Ready(Err(error)) = self.poll_prefill(cx)
            && let Some(mut prefill) = self.prefill.take()
        {
            prefill.endpoint.record_failure(&error);
            prefill.span.failed(&error);
            let trace_id = prefill.span.trace_id().map(tracing::field::display);
            tracing::debug!(instance = %prefill.endpoint.id, %error, trace_id, "prefill failed after hand-over");
        }
        loop {
            return match self.main.poll_leg(cx) {
                Poll::Pending => Poll::Pending,
                Poll::Ready(LegEvent::Head(_)) => continue,
                Poll::Ready(LegEvent::Idle) => match self.stall_error() {
                    Some(error) => Poll::Ready(PairEvent::Failed(self.main_kind, error)),
                    None => continue,
                },
                Poll::Ready(LegEvent::Data(data)) => Poll::Ready(PairEvent::Data(data)),
                Poll::Ready(LegEvent::End) => Poll::Ready(PairEvent::End),
                Poll::Ready(LegEvent::Failed(error)) => Poll::Ready(PairEvent::Failed(self.main_kind, error)),
            };
        }
    }

    /// After the answer's good end: lets a prefill that is about to finish do so, instead of aborting it.
    pub(crate) fn detach_prefill(&mut self) {
        if let Some(prefill) = self.prefill.take() {
            self.aborter.drain(prefill);
        }
    }

    /// An engine's `Retry-After`, from now on.
    pub(crate) fn retry_after(&self, side: LegKind) -> Option<Duration> {
        let running = match (side, &self.prefill) {
            (LegKind::Prefill, Some(prefill)) => prefill,
            _ => &self.main,
        };
        let value = running.head.as_ref()?.headers().get(RETRY_AFTER)?.to_str().ok()?.trim();
        let date = || httpdate::parse_http_date(value).ok()?.duration_since(SystemTime::now()).ok();
        value.parse().map(Duration::from_secs).ok().or_else(date)
    }

    /// Tells who is to blame for a failure of `side`.
    pub(crate) fn endpoint(&self, side: LegKind) -> Arc<UpstreamEndpoint> {
        match (side, &self.prefill) {
            (LegKind::Prefill, Some(prefill)) => prefill.endpoint.clone(),
            _ => self.main.endpoint.clone(),
        }
    }
}

impl Drop for LegPair {
    fn drop(&mut self) {
        // Still watched: the client has left before the first byte.
        for (side, endpoint, since, limit) in self.waiting_legs() {
            if let Some(limit) = limit {
                abandoned(side, endpoint, (since, limit), &self.aborter.metrics);
            }
        }
        // Closing the connections is the abort itself; the tickets tell SGLang as well, which notices a closed
        // connection only when it next looks.
        if let Some(prefill) =
            self.prefill.take_if(|prefill| prefill.run_to_completion && prefill.leg.is_open())
        {
            self.aborter.drain_in_background(prefill);
        }
        if let Some(mut prefill) = self.prefill.take().filter(|prefill| prefill.leg.is_running()) {
            prefill.span.aborted();
            self.aborter.abort(LegKind::Prefill, &prefill.endpoint, prefill.request_id.as_ref());
        }
        if self.main.leg.is_running() {
            self.main.span.aborted();
            self.aborter.abort(self.main_kind, &self.main.endpoint, self.main.request_id.as_ref());
        }
    }
}

impl fmt::Debug for LegPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pair")
            .field("prefill", &self.prefill.as_ref().map(|prefill| &prefill.leg))
            .field("main", &self.main.leg)
            .finish_non_exhaustive()
    }
}
