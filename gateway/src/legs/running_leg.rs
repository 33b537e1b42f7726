//! One running leg with its engine.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Response};

use super::abort::EngineRequestId;
use crate::feedback::LegSpan;
use crate::fleet::UpstreamEndpoint;
use crate::request_body::StreamEnd;
use crate::response::{ResponseSummary, SseFramer, TokenUsage};
use crate::upstream::{LegError, LegEvent, LegExchange};

/// Bytes that are buffered of an engine's error response, or of a prefill's response.
const MAX_BUFFERED_BYTES: usize = 64 << 10;

/// A running leg with its engine.
pub(crate) struct RunningLeg {
    pub(super) leg: LegExchange,
    pub(super) endpoint: Arc<UpstreamEndpoint>,
    pub(super) request_id: Option<EngineRequestId>,
    /// Whether the leg must never be aborted, even if its response is no longer needed.
    pub(super) run_to_completion: bool,
    /// Whether its output counts as progress of the engine.
    generates: bool,
    pub(super) span: LegSpan,
    pub(super) head: Option<Response<()>>,
    /// Start of the response, for prefills and error responses.
    pub(super) buffered: BytesMut,
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

    /// Marks a request for which the engine computes tokens: its output counts as the engine's progress.
    pub(crate) fn generating(mut self) -> Self {
        self.generates = true;
        self
    }

    /// Sets the request id by which the engine can abort the leg, if there is one.
    pub(crate) fn with_request_id(mut self, request_id: Option<EngineRequestId>) -> Self {
        self.request_id = request_id;
        self
    }

    /// Marks a prefill that must never be cancelled.
    pub(crate) fn run_to_completion(mut self) -> Self {
        self.run_to_completion = true;
        self
    }

    pub(super) fn poll_leg(&mut self, cx: &mut Context<'_>) -> Poll<LegEvent> {
        let event = self.leg.poll_event(cx);
        match &event {
            Poll::Ready(LegEvent::Head(head)) => self.span.set_status(head.status()),
            Poll::Ready(LegEvent::Data(_)) => {
                if let Some(at) = self.leg.last_data_at() {
                    self.span.record_data(at);
                    if self.generates && !self.is_error_response() {
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

    pub(super) fn is_error_response(&self) -> bool {
        self.head.as_ref().is_some_and(|head| !head.status().is_success())
    }

    pub(super) fn buffer(&mut self, data: &[u8]) {
        let remaining = MAX_BUFFERED_BYTES.saturating_sub(self.buffered.len());
        self.buffered.extend_from_slice(&data[..data.len().min(remaining)]);
    }

    /// Reads a leg whose body only matters if it is an error. `Ready(Ok)` at a successful end, with its token counts.
    pub(super) fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<TokenUsage>, LegError>> {
        loop {
            match self.poll_leg(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(LegEvent::Head(head)) => self.head = Some(head),
                // [`LegPair::poll_event`] checks both legs for silence.
                Poll::Ready(LegEvent::Idle) => {}
                Poll::Ready(LegEvent::Data(data)) => self.buffer(&data),
                Poll::Ready(LegEvent::Failed(error)) => return Poll::Ready(Err(error)),
                Poll::Ready(LegEvent::End) => {
                    let body = self.buffered.split().freeze();
                    let status =
                        self.head.as_ref().map(Response::status).filter(|status| !status.is_success());
                    return Poll::Ready(match status {
                        Some(status) => Err(LegError::Status(status, body)),
                        None => check_prefill_response(self.head.as_ref(), body),
                    });
                }
            }
        }
    }
}

/// Checks a prefill's complete response. A prefill that answers 200 without having computed the prompt would leave its decode
/// waiting. Returns its token counts.
fn check_prefill_response(head: Option<&Response<()>>, body: Bytes) -> Result<Option<TokenUsage>, LegError> {
    if body.len() >= MAX_BUFFERED_BYTES {
        // Only the start was buffered; a response of this size shows that the prefill has run.
        return Ok(None);
    }
    if head.is_some_and(|head| is_event_stream(head.headers())) {
        let mut framer = SseFramer::new(StreamEnd::Body);
        let checked = framer.push(body).and_then(|_| framer.finish());
        return checked.map(|_| TokenUsage::read(framer.last_payload())).map_err(LegError::from);
    }
    let summary = ResponseSummary::of(&body);
    let not_json = |_| LegError::ProtocolViolation("returned a prefill response that is not JSON");
    summary.map(|summary| summary.usage).map_err(not_json)
}

/// Whether the response is a stream of server-sent events.
pub(crate) fn is_event_stream(headers: &HeaderMap) -> bool {
    let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    content_type.is_some_and(|text| text.starts_with("text/event-stream"))
}
