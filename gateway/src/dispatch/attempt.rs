//! One attempt on one route: starts the legs in the connector's order and waits for the start of the response.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::Response;
use moongate_scheduler::RoutingDecision;
use moongate_telemetry::SpanContext;
use tokio::time::Instant;

use super::abort::AbortSender;
use super::connector::{self, ConnectorAttempt, LegEngine, LegOrder, PrefillLeg};
use super::pair::{LegPair, PairEvent};
use super::running_leg::{RunningLeg, is_event_stream};
use super::silence::{AttemptSilenceLimits, RedispatchDecider, SilentLegs};
use crate::decide::{ChosenRoute, DecodeTarget, InFlightGuard};
use crate::feedback::{AttemptTrace, ExpectedHits, TtftPrediction};
use crate::fleet::{FleetMember, UpstreamEndpoint};
use crate::request_body::InferenceApi;
use crate::response::{ResponseSummary, SseError, SseFramer, TokenUsage};
use crate::routed_request::RoutedRequest;
use crate::upstream::{LegError, LegExchange, LegKind, LegTimeouts, PreparedRequest};

#[derive(Debug, Clone, Copy)]
pub(crate) struct AttemptLimits {
    /// Time limits of the prefill leg.
    pub(crate) prefill: LegTimeouts,
    /// Time limits of a leg with a streamed response.
    pub(crate) stream: LegTimeouts,
    /// Time limits of a leg with a non-streamed response, which arrives after the whole generation.
    pub(crate) non_stream: LegTimeouts,
    /// Non-streamed responses are buffered up to this size, so that a truncated one can be retried.
    pub(crate) response_buffer_bytes: usize,
}

/// The start of a response.
#[derive(Debug)]
pub(crate) struct ResponseStart {
    pub(crate) head: Response<()>,
    pub(crate) payload: ResponsePayload,
    pub(crate) in_flight: InFlightGuard,
    /// Predicted hits of the engine that computes the prompt.
    pub(crate) expected_hits: Option<ExpectedHits>,
    /// When the first token was predicted to arrive.
    pub(crate) ttft_prediction: Option<TtftPrediction>,
    /// Token counts of the prefill, if it has already ended.
    pub(crate) prefill_usage: Option<TokenUsage>,
}

/// The part of the response that has arrived.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one per request, and taken apart at once")]
pub(crate) enum ResponsePayload {
    /// The complete response, with its token counts.
    Complete(Bytes, Option<TokenUsage>),
    /// The first chunk; the rest is to be relayed. `framer` is set for event streams.
    Streaming { pair: LegPair, first: Bytes, framer: Option<SseFramer> },
}

impl AttemptLimits {
    fn main_timeouts(&self, routed: &RoutedRequest) -> LegTimeouts {
        if routed.routing.stream { self.stream } else { self.non_stream }
    }
}

/// Limits, trace and collaborators of an attempt.
pub(super) struct AttemptContext<'a> {
    pub(super) limits: AttemptLimits,
    pub(super) aborter: &'a Arc<AbortSender>,
    pub(super) attempt: &'a AttemptTrace<'a>,
    pub(super) redispatch: RedispatchDecider<'a>,
}

#[derive(Debug)]
pub(crate) struct AttemptFailure {
    pub(crate) side: LegKind,
    pub(crate) endpoint: Arc<UpstreamEndpoint>,
    pub(crate) error: LegError,
    /// The engine of the other leg, if it is to be avoided too.
    pub(crate) other_engine: Option<Arc<UpstreamEndpoint>>,
    /// A prefill whose facts may be stale.
    pub(crate) stale_prefill: Option<FleetMember>,
    /// Span of the failed leg, to which the next attempt's spans are linked.
    pub(crate) leg: Option<SpanContext>,
    /// Value of the engine's `Retry-After`.
    pub(crate) retry_after: Option<Duration>,
}

/// Runs one attempt until the response has started.
pub(super) async fn attempt(
    routed: &RoutedRequest,
    chosen: ChosenRoute,
    context: &AttemptContext<'_>,
) -> Result<ResponseStart, AttemptFailure> {
    let ChosenRoute { prefill, decode: target, in_flight, decision: fleet_decision } = chosen;
    let decision = fleet_decision.as_ref().map(|fleet_decision| &*fleet_decision.decision);
    let silence_limits = decision.and_then(|decision| {
        let expected = decision.expected_ttft.max(decision.predicted_ttft.unwrap_or(0.0));
        let expected = context.redispatch.admission.to_wall_time(expected);
        AttemptSilenceLimits::new(prefill.endpoint.silence.limits(), expected, routed)
    });
    let (pair, stale_prefill) =
        start_legs(routed, decision, (&prefill, target.as_ref()), silence_limits, context).await?;
    first_bytes(routed, pair.with_silence_limits(silence_limits), in_flight, context).await.map_err(
        |mut failure| {
            if failure.side == LegKind::Decode && failure.error.blames_engine() {
                failure.stale_prefill = stale_prefill.then_some(prefill);
            }
            failure
        },
    )
}

fn start_leg(
    side: LegKind,
    member: &FleetMember,
    mut request: PreparedRequest,
    limits: LegTimeouts,
    trace: &AttemptTrace<'_>,
) -> RunningLeg {
    let now = Instant::now();
    let span = trace.leg(side, member, now);
    request.extra_headers.extend(span.headers());
    let endpoint = &member.endpoint;
    RunningLeg::new(LegExchange::start(endpoint.pool.clone(), request, limits, now), endpoint.clone(), span)
}

/// Starts the legs of a route in their connector's order. Also returns whether they depend on the prefill's facts.
async fn start_legs(
    routed: &RoutedRequest,
    decision: Option<&RoutingDecision>,
    (prefill, target): (&FleetMember, Option<&DecodeTarget>),
    silence_limits: Option<AttemptSilenceLimits>,
    context: &AttemptContext<'_>,
) -> Result<(LegPair, bool), AttemptFailure> {
    let AttemptContext { limits, aborter, attempt: trace, .. } = *context;
    let fail = |what| unusable_prefill(prefill, what);
    let attempt = connector_attempt(routed, trace.number, decision, (prefill, target));
    let connector = connector::for_attempt(&attempt).map_err(fail)?;
    let (main_kind, main_member) = match target {
        Some(target) => (LegKind::Decode, &target.decode),
        None => (LegKind::Worker, prefill),
    };
    let start_prefill = |request| {
        let leg = start_leg(LegKind::Prefill, prefill, request, limits.prefill, trace);
        leg.generating().with_request_id(connector.abort_id())
    };
    let start_main = |request| {
        let leg = start_leg(main_kind, main_member, request, limits.main_timeouts(routed), trace);
        let leg = leg.with_request_id(connector.abort_id());
        // Without a decision, the engine may compute no tokens.
        if decision.is_some() { leg.generating() } else { leg }
    };
    let pair = |prefill, main| LegPair::new(prefill, main, main_kind, aborter.clone());
    let legs = match connector.prefill(&attempt) {
        None => {
            let main = connector.main(&attempt, None).map_err(fail)?;
            pair(None, start_main(main))
        }
        Some(PrefillLeg { request, order: LegOrder::Together { may_cancel } }) => {
            let main = connector.main(&attempt, None).map_err(fail)?;
            let leg = start_prefill(request);
            let leg = if may_cancel { leg } else { leg.run_to_completion() };
            pair(Some(leg), start_main(main))
        }
        Some(PrefillLeg { request, order: LegOrder::PrefillFirst }) => {
            let leg = start_prefill(request);
            let response = prefill_first(routed, leg, silence_limits, context).await?;
            prefill.endpoint.breaker.record_success();
            let main = connector.main(&attempt, Some(&response)).map_err(fail)?;
            pair(None, start_main(main)).after_prefill(TokenUsage::read(&response))
        }
    };
    Ok((legs, connector.depends_on_prefill_facts()))
}

fn connector_attempt<'a>(
    routed: &'a RoutedRequest,
    number: u32,
    decision: Option<&'a RoutingDecision>,
    (prefill, target): (&'a FleetMember, Option<&'a DecodeTarget>),
) -> ConnectorAttempt<'a> {
    let prefill = LegEngine { facts: prefill.facts(), rank: target.map_or(0, |target| target.prefill_rank) };
    let decode = target.map(|target| LegEngine { facts: target.decode.facts(), rank: target.decode_rank });
    ConnectorAttempt { routed, number, decision, prefill, decode }
}

/// The failure of an attempt whose prefill engine cannot serve it.
fn unusable_prefill(prefill: &FleetMember, what: &'static str) -> AttemptFailure {
    AttemptFailure {
        side: LegKind::Prefill,
        endpoint: prefill.endpoint.clone(),
        error: LegError::ProtocolViolation(what),
        other_engine: None,
        stale_prefill: None,
        leg: None,
        retry_after: None,
    }
}

/// Runs a prefill leg to its end and returns its response.
async fn prefill_first(
    routed: &RoutedRequest,
    running: RunningLeg,
    silence_limits: Option<AttemptSilenceLimits>,
    context: &AttemptContext<'_>,
) -> Result<Bytes, AttemptFailure> {
    let limits = context.limits;
    let mut pair = LegPair::new(None, running, LegKind::Prefill, context.aborter.clone())
        .with_silence_limits(silence_limits.map(AttemptSilenceLimits::prefill_only));
    let mut response = BytesMut::new();
    loop {
        match poll_fn(|cx| pair.poll_event(cx)).await {
            PairEvent::Data(data) if response.len() + data.len() > limits.response_buffer_bytes => {
                let error = LegError::ProtocolViolation("returned a prefill response that is too large");
                return Err(failure(&mut pair, LegKind::Prefill, error));
            }
            PairEvent::Data(data) => response.extend_from_slice(&data),
            PairEvent::End => return Ok(response.freeze()),
            PairEvent::Failed(side, error) => return Err(failure(&mut pair, side, error)),
            PairEvent::Silent(legs) => {
                if let Some(legs) = context.redispatch.should_redispatch(routed, legs) {
                    return Err(silence_failure(&mut pair, legs));
                }
            }
        }
    }
}

/// Waits for output that may be sent to the client: the first complete event of a stream, or a whole response.
async fn first_bytes(
    routed: &RoutedRequest,
    mut pair: LegPair,
    mut in_flight: InFlightGuard,
    context: &AttemptContext<'_>,
) -> Result<ResponseStart, AttemptFailure> {
    let buffer_limit = context.limits.response_buffer_bytes;
    let mut buffered = BytesMut::new();
    let mut framer: Option<SseFramer> = None;
    loop {
        let event = poll_fn(|cx| {
            let event = pair.poll_event(cx);
            if pair.is_prefilled() {
                in_flight.record_prompt_computed(pair.prefill_usage());
            }
            event
        });
        match event.await {
            PairEvent::Failed(side, error) => {
                return Err(failure(&mut pair, side, error));
            }
            PairEvent::Silent(legs) => {
                if let Some(legs) = context.redispatch.should_redispatch(routed, legs) {
                    return Err(silence_failure(&mut pair, legs));
                }
            }
            PairEvent::Data(data) => {
                if framer.is_none() && buffered.is_empty() && pair.head().is_some_and(is_event_stream) {
                    framer = Some(SseFramer::default());
                }
                let first = match &mut framer {
                    // A non-streamed response does not reveal its first token.
                    Some(framer) => framer.push(data).map_err(|error| sse_failure(&mut pair, error))?,
                    None => {
                        buffered.extend_from_slice(&data);
                        if buffered.len() <= buffer_limit && routed.api != InferenceApi::Other {
                            continue;
                        }
                        buffered.split().freeze()
                    }
                };
                if !first.is_empty() {
                    if framer.is_some() {
                        in_flight.record_prompt_computed(None);
                    }
                    return Ok(response_start(pair, first, framer, in_flight));
                }
            }
            PairEvent::End => {
                let (mut complete, mut usage) = (buffered.freeze(), None);
                if let Some(mut framer) = framer {
                    complete = framer
                        .finish(routed.api != InferenceApi::Other)
                        .map_err(|error| sse_failure(&mut pair, error))?;
                } else if routed.api == InferenceApi::Other {
                    usage = TokenUsage::read(&complete);
                } else {
                    let violation = |what| main_failure(&mut pair, LegError::ProtocolViolation(what));
                    usage = check_response(&complete).map_err(violation)?;
                }
                pair.main_endpoint().breaker.record_success();
                pair.detach_prefill();
                let (head, prefill_usage) = (take_head(&pair), pair.prefill_usage());
                let payload = ResponsePayload::Complete(complete, usage);
                return Ok(ResponseStart {
                    head,
                    payload,
                    in_flight,
                    expected_hits: None,
                    ttft_prediction: None,
                    prefill_usage,
                });
            }
        }
    }
}

fn response_start(
    pair: LegPair,
    first: Bytes,
    framer: Option<SseFramer>,
    in_flight: InFlightGuard,
) -> ResponseStart {
    let (head, prefill_usage) = (take_head(&pair), pair.prefill_usage());
    let payload = ResponsePayload::Streaming { pair, first, framer };
    ResponseStart { head, payload, in_flight, expected_hits: None, ttft_prediction: None, prefill_usage }
}

fn take_head(pair: &LegPair) -> Response<()> {
    let mut head = Response::new(());
    if let Some(from) = pair.head() {
        *head.status_mut() = from.status();
        *head.headers_mut() = from.headers().clone();
    }
    head
}

fn failure(pair: &mut LegPair, side: LegKind, error: LegError) -> AttemptFailure {
    let leg = pair.record_failure(side, &error);
    let retry_after = pair.retry_after(side);
    AttemptFailure {
        side,
        endpoint: pair.endpoint(side),
        error,
        other_engine: None,
        stale_prefill: None,
        leg,
        retry_after,
    }
}

/// The failure of an attempt that gives up these legs; there is at least one.
fn silence_failure(pair: &mut LegPair, legs: SilentLegs) -> AttemptFailure {
    let silence = legs.first().map_or(Duration::ZERO, |leg| leg.silence());
    let mut failure = match legs.first() {
        Some(leg) => failure(pair, leg.side, LegError::Silent(silence)),
        None => main_failure(pair, LegError::Silent(silence)),
    };
    failure.other_engine = legs.get(1).map(|leg| leg.endpoint.clone());
    failure
}

fn main_failure(pair: &mut LegPair, error: LegError) -> AttemptFailure {
    failure(pair, pair.main_kind(), error)
}

fn sse_failure(pair: &mut LegPair, error: SseError) -> AttemptFailure {
    main_failure(pair, LegError::from(error))
}

/// The response to a generation request must be JSON: an object, or an array for SGLang's batches. Returns its token counts.
fn check_response(body: &[u8]) -> Result<Option<TokenUsage>, &'static str> {
    let summary = match body.trim_ascii_start().first() {
        None => return Err("returned an empty body"),
        Some(b'{' | b'[') => ResponseSummary::of(body).ok(),
        Some(_) => None,
    };
    summary.map(|summary| summary.usage).ok_or("returned a response that is not JSON")
}
