//! The one or two legs of an attempt. Dropping it aborts running legs.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::Response;
use http::header::RETRY_AFTER;
use moongate_telemetry::SpanContext;
use tokio::time::Instant;

use super::abort::AbortSender;
use super::running_leg::RunningLeg;
use super::silence::{AttemptSilenceLimits, SilentLeg, SilentLegs, abandoned, suspect};
use crate::fleet::{SuspicionReason, UpstreamEndpoint};
use crate::response::TokenUsage;
use crate::upstream::{LegError, LegEvent, LegKind};

/// The legs of one attempt. Large, and passed on from the connector to the relay, so that it is always boxed.
pub(crate) struct LegPair {
    /// `None` for single workers and once the prefill has ended.
    prefill: Option<RunningLeg>,
    main: RunningLeg,
    main_kind: LegKind,
    aborter: Arc<AbortSender>,
    /// Whether the prefill has succeeded, and the token counts that it reported.
    prefilled: bool,
    prefill_usage: Option<TokenUsage>,
    /// When the prefill ended; reset when the decode's first data shows that it has the KV cache.
    handed_over: Option<Instant>,
    /// When the prefill of this pair ended.
    prefilled_at: Option<Instant>,
    /// Silence limits of the engines until the response starts or fails.
    silence_limits: Option<AttemptSilenceLimits>,
    /// Whether the response is to be translated to the client's API.
    translated: bool,
}

/// Next event of a pair of legs.
#[derive(Debug)]
pub(crate) enum PairEvent {
    /// A chunk of the response for the client. [`LegPair::head`] is set before the first.
    Data(Bytes),
    End,
    /// One of the legs failed.
    Failed(LegKind, LegError),
    /// Before the first byte: the engines of these legs produce no output. The pair continues.
    Silent(SilentLegs),
}

impl LegPair {
    pub(crate) fn new(
        prefill: Option<RunningLeg>,
        mut main: RunningLeg,
        main_kind: LegKind,
        aborter: Arc<AbortSender>,
    ) -> Box<Self> {
        if main_kind != LegKind::Prefill {
            main.span.await_first_byte();
        }
        Box::new(Self {
            prefill,
            main,
            main_kind,
            aborter,
            prefilled: false,
            prefill_usage: None,
            handed_over: None,
            prefilled_at: None,
            silence_limits: None,
            translated: false,
        })
    }

    /// Checks for silence until the response starts.
    pub(crate) fn with_silence_limits(
        mut self: Box<Self>,
        limits: Option<AttemptSilenceLimits>,
    ) -> Box<Self> {
        self.silence_limits = limits;
        for (_, endpoint, since, limit) in self.waiting_legs() {
            if let Some(limit) = limit {
                endpoint.silence.expect_silence_until(since, limit);
            }
        }
        self
    }

    /// Legs that wait for their first byte: role, engine, start of the wait, and silence limit.
    fn waiting_legs(
        &self,
    ) -> impl Iterator<Item = (LegKind, &Arc<UpstreamEndpoint>, Instant, Option<Duration>)> {
        let prefilling = self.prefill.is_some();
        let prefill = self.prefill.as_ref().map(|prefill| (LegKind::Prefill, prefill, prefill.leg.started()));
        // A decode that only fetches is silent until the prompt is computed.
        let main = (!self.prefill.as_ref().is_some_and(|prefill| prefill.run_to_completion))
            .then(|| (self.main_kind, &self.main, self.prefilled_at.unwrap_or(self.main.leg.started())));
        let limits = self.silence_limits;
        prefill.into_iter().chain(main).filter_map(move |(side, running, since)| {
            let limit = limits?.limit(prefilling);
            running.leg.last_data_at().is_none().then_some((side, &running.endpoint, since, limit))
        })
    }

    fn silent_legs(&self) -> SilentLegs {
        let now = Instant::now();
        let legs = self.waiting_legs();
        legs.filter_map(|(side, endpoint, since, limit)| SilentLeg::detect(side, endpoint, since, limit, now))
            .collect()
    }

    /// Returns an error if a paused response must not be waited for any longer.
    fn stall_error(&self) -> Option<LegError> {
        let (now, last_data) = (Instant::now(), self.main.leg.last_data_at()?);
        let monitor = &self.main.endpoint.silence;
        if monitor.is_stalled(now, last_data) {
            let metrics = &self.aborter.metrics;
            suspect(self.main_kind, &self.main.endpoint, SuspicionReason::Stalled, now, metrics);
        }
        let stall = monitor.limits().stall;
        let is_over = !stall.is_zero() && now.saturating_duration_since(last_data) >= stall;
        (is_over && monitor.is_unresponsive())
            .then_some(LegError::Timeout("sent no more data and failed its health check", stall))
    }

    /// The engines got the request in another API than the client's.
    pub(crate) fn translated(mut self: Box<Self>) -> Box<Self> {
        self.translated = true;
        self
    }

    pub(super) fn is_translated(&self) -> bool {
        self.translated
    }

    /// A prefill with these token counts succeeded before this pair started.
    pub(crate) fn after_prefill(mut self: Box<Self>, usage: Option<TokenUsage>) -> Box<Self> {
        self.record_prefill_ended(usage, None);
        self
    }

    fn record_prefill_ended(&mut self, usage: Option<TokenUsage>, at: Option<Instant>) {
        self.prefilled = true;
        self.prefilled_at = at;
        self.prefill_usage = usage;
        if self.main.span.awaits_first_byte() {
            self.handed_over = Some(at.unwrap_or_else(Instant::now));
        }
    }

    /// The decode has sent data or failed: it no longer waits for the KV cache.
    fn record_transfer_ended(&mut self, at: Option<Instant>) {
        if let Some(since) = self.handed_over.take() {
            self.main.span.set_kv_transfer(since, at.unwrap_or_else(Instant::now));
        }
    }

    /// Records the failure in the span of a leg, and returns that span.
    pub(crate) fn record_failure(&mut self, side: LegKind, error: &LegError) -> Option<SpanContext> {
        self.silence_limits = None;
        if side == self.main_kind {
            self.record_transfer_ended(None);
            return self.main.span.failed(error);
        }
        self.prefill.as_mut()?.span.failed(error)
    }

    /// Status and headers of the response, once the first event has arrived.
    pub(crate) fn head(&self) -> Option<&Response<()>> {
        self.main.head.as_ref()
    }

    /// Whether the prefill has succeeded.
    pub(crate) fn is_prefilled(&self) -> bool {
        self.prefilled
    }

    /// Token counts of the prefill, if it has succeeded.
    pub(crate) fn prefill_usage(&self) -> Option<TokenUsage> {
        self.prefill_usage
    }

    /// The leg whose response goes to the client.
    pub(crate) fn main_kind(&self) -> LegKind {
        self.main_kind
    }

    /// The engine whose response goes to the client.
    pub(crate) fn main_endpoint(&self) -> &Arc<UpstreamEndpoint> {
        &self.main.endpoint
    }

    /// The next event. A failed prefill is an event too: the decode would wait for a KV cache that never arrives.
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
                Poll::Ready(LegEvent::Data(data)) if self.main.is_error_response() => self.main.buffer(&data),
                Poll::Ready(LegEvent::Data(data)) => {
                    self.record_transfer_ended(self.main.leg.last_data_at());
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
                self.record_prefill_ended(usage, at);
                Poll::Ready(Ok(()))
            }
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    /// The client has the first token: a prefill that fails from now on no longer matters and is only logged.
    pub(crate) fn poll_after_first_token(&mut self, cx: &mut Context<'_>) -> Poll<PairEvent> {
        if let Poll::Ready(Err(error)) = self.poll_prefill(cx)
            && let Some(mut prefill) = self.prefill.take()
        {
            prefill.endpoint.record_failure(&error);
            prefill.span.failed(&error);
            let trace_id = prefill.span.trace_id().map(tracing::field::display);
            tracing::debug!(engine = %prefill.endpoint.id, %error, trace_id, "prefill failed after the first token");
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

    /// After a complete response: reads a prefill that is about to finish to its end, instead of aborting it.
    pub(crate) fn detach_prefill(&mut self) {
        if let Some(prefill) = self.prefill.take() {
            self.aborter.drain(prefill);
        }
    }

    /// An engine's `Retry-After`, relative to now.
    pub(crate) fn retry_after(&self, side: LegKind) -> Option<Duration> {
        let running = match (side, &self.prefill) {
            (LegKind::Prefill, Some(prefill)) => prefill,
            _ => &self.main,
        };
        let value = running.head.as_ref()?.headers().get(RETRY_AFTER)?.to_str().ok()?.trim();
        let date = || httpdate::parse_http_date(value).ok()?.duration_since(SystemTime::now()).ok();
        value.parse().map(Duration::from_secs).ok().or_else(date)
    }

    /// The engine of the leg `side`.
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
        // Closing the connection is the abort; SGLang also gets an abort request, because it notices a closed connection only at
        // its next check.
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
        f.debug_struct("LegPair")
            .field("prefill", &self.prefill.as_ref().map(|prefill| &prefill.leg))
            .field("main", &self.main.leg)
            .finish_non_exhaustive()
    }
}
