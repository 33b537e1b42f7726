//! The response to a picked request, as far as the proxy shows it.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode};
use moongate_discovery::EngineRole;
use tokio::time::Instant;

use super::picked::main_engine;
use crate::decide::InFlightGuard;
use crate::dispatch::{PickedRoute, RouteChoice};
use crate::error::ApiError;
use crate::feedback::{ExpectedHits, TtftPrediction};
use crate::fleet::UpstreamEndpoint;
use crate::ingress::{GatewayContext, record_stored_response};
use crate::legs::{check_response, failure_code, is_event_stream};
use crate::relay::ResponseFeedback;
use crate::request_body::InferenceApi;
use crate::response::{ResponseEvents, TokenUsage};
use crate::routed_request::RoutedRequest;
use crate::upstream::{LegError, LegKind};

/// Observes the response to one request. Dropped before [`ObservedResponse::complete`], the request counts as abandoned by its client.
#[derive(Debug)]
pub struct ObservedResponse {
    gateway: Arc<GatewayContext>,
    routed: Box<RoutedRequest>,
    feedback: ResponseFeedback,
    /// The engine that answers, and its part.
    engine: Arc<UpstreamEndpoint>,
    side: LegKind,
    /// Whether the engine computes tokens for the request.
    generates: bool,
    expected_hits: Option<ExpectedHits>,
    ttft_prediction: Option<TtftPrediction>,
    status: StatusCode,
    /// The response, unless it is an event stream.
    body: BytesMut,
    /// Whether the response is larger than what is kept of it.
    is_truncated: bool,
    has_started: bool,
    /// Whether the start of the response, which has its id, has been read.
    has_id: bool,
    has_ended: bool,
}

impl ObservedResponse {
    pub(super) fn new(gateway: Arc<GatewayContext>, route: PickedRoute) -> Self {
        let PickedRoute { routed, choice: RouteChoice { chosen, expected_hits, ttft_prediction }, recorder } =
            route;
        let engine = main_engine(&chosen).endpoint.clone();
        let side = if chosen.decode.is_some() { LegKind::Decode } else { LegKind::Worker };
        let generates = chosen.decision.is_some();
        let feedback =
            ResponseFeedback { events: None, in_flight: chosen.in_flight, recorder: Some(recorder) };
        Self {
            gateway,
            routed,
            feedback,
            engine,
            side,
            generates,
            expected_hits,
            ttft_prediction,
            status: StatusCode::OK,
            body: BytesMut::new(),
            is_truncated: false,
            has_started: false,
            has_id: false,
            has_ended: false,
        }
    }

    /// The head of the response has arrived. `served`: `host:port` of the engine that sent it, if the proxy reports it.
    pub fn start(&mut self, status: StatusCode, headers: &HeaderMap, served: Option<&str>) {
        if self.has_ended || self.has_started {
            return;
        }
        self.has_started = true;
        if let Some(served) = served.filter(|served| *served != self.engine.pool.authority()) {
            self.record_fallback(served);
        }
        self.status = status;
        let is_stream = status.is_success() && is_event_stream(headers);
        self.feedback.events = is_stream.then(|| ResponseEvents::new(self.routed.api.stream_end()));
        let Some(recorder) = &mut self.feedback.recorder else { return };
        recorder.set_prefill(self.feedback.in_flight.prefill_endpoint().clone());
        if let (Some(expected), Some(model)) = (self.expected_hits.take(), &self.routed.model) {
            recorder.set_expected_hits(expected, model.clone());
        }
        recorder.span().set_status(status);
        recorder.set_ttft_prediction(self.ttft_prediction.take().filter(|_| is_stream));
    }

    /// A chunk of the response has arrived.
    pub fn push(&mut self, chunk: Bytes) {
        if self.has_ended || chunk.is_empty() {
            return;
        }
        if self.generates && self.status.is_success() {
            self.engine.record_progress(Instant::now());
        }
        let Some(events) = &mut self.feedback.events else { return self.keep(&chunk) };
        let pushed = events.push(chunk);
        let is_in_preamble = events.is_in_preamble();
        match pushed {
            Err(error) => self.fail(&LegError::from(error)),
            // Events that do not depend on the model's output say nothing about the prompt.
            Ok(complete) if complete.is_empty() || is_in_preamble => self.record_response_id(&complete),
            Ok(complete) => {
                self.record_response_id(&complete);
                self.feedback.in_flight.record_prompt_computed(None);
                self.feedback.record_chunk();
            }
        }
    }

    /// The response is complete.
    pub fn complete(mut self) {
        if self.has_ended {
            return;
        }
        let body = std::mem::take(&mut self.body).freeze();
        if !self.status.is_success() {
            return self.fail(&LegError::Status(self.status, body));
        }
        if let Some(events) = &mut self.feedback.events {
            if let Err(error) = events.finish() {
                return self.fail(&LegError::from(error));
            }
            self.feedback.record_stream_complete(None);
        } else if self.is_truncated {
            self.feedback.record_chunk();
            self.feedback.record_stream_complete(None);
        } else {
            let usage = match self.routed.api {
                InferenceApi::Other => Ok(TokenUsage::read(&body)),
                _ => check_response(&body),
            };
            match usage {
                Err(what) => return self.fail(&LegError::ProtocolViolation(what)),
                Ok(usage) => {
                    self.record_response_id(&body);
                    self.feedback.record_body_complete(&body, usage, None);
                }
            }
        }
        self.engine.breaker.record_success();
        self.has_ended = true;
    }

    fn keep(&mut self, chunk: &[u8]) {
        let limit = self.gateway.dispatcher.limits.attempt.response_buffer_bytes;
        self.is_truncated |= self.body.len() + chunk.len() > limit;
        if !self.is_truncated {
            self.body.extend_from_slice(chunk);
        }
    }

    /// The engine's response is an error, or not what its API promises. The client has got it as it is.
    fn fail(&mut self, error: &LegError) {
        self.has_ended = true;
        self.engine.record_failure(error);
        self.gateway.metrics.legs.record_failure(self.side, error);
        let id = self.routed.id.to_str().ok();
        tracing::debug!(side = self.side.as_str(), engine = %self.engine.id, %error, request_id = id, "engine failed a picked request");
        let Some(recorder) = &mut self.feedback.recorder else { return };
        match error {
            LegError::Status(status, _) if status.is_client_error() => recorder.rejected_by_engine(*status),
            error => {
                let message = format!("{} engine {} {error}", self.side.as_str(), self.engine.id);
                recorder.failed(&ApiError::new(failure_code(self.side, error), message));
            }
        }
    }

    /// The proxy could not use the picked engine: another one counts the request as in flight. The scheduler sees it in that engine's count.
    fn record_fallback(&mut self, served: &str) {
        self.engine.record_failure(&LegError::Closed);
        self.gateway.metrics.legs.record_failure(self.side, &LegError::Closed);
        self.gateway.metrics.legs.record_retry(self.side);
        let fleet = self.gateway.dispatcher.fleet.current();
        let is_it = |authority: &str| authority == served;
        let found = fleet.members.iter().find(|member| {
            member.instance.role != EngineRole::Prefill && is_it(member.endpoint.pool.authority())
        });
        let Some(member) = found else {
            tracing::warn!(
                endpoint = served,
                "the proxy sent a request to an endpoint that is no engine of the fleet"
            );
            return;
        };
        self.engine = member.endpoint.clone();
        if self.side == LegKind::Worker {
            self.feedback.in_flight = InFlightGuard::passthrough(member.endpoint.clone());
            let prediction = self.routed.prompt_prediction.as_ref();
            self.expected_hits = prediction.and_then(|predicted| predicted.expected_hits(member));
            self.ttft_prediction = None;
        }
    }

    fn record_response_id(&mut self, start: &[u8]) {
        if start.is_empty() || std::mem::replace(&mut self.has_id, true) {
            return;
        }
        if let Some(recorder) = &mut self.feedback.recorder {
            record_stored_response(&self.gateway, &self.routed, (start, &self.engine), recorder);
        }
    }
}
