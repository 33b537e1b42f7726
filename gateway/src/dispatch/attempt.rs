//! One attempt on one route: starts the legs in the protocol's order and waits until the answer has begun.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::Response;
use moongate_discovery::KvTransferMethod;
use moongate_scheduler::RoutingDecision;
use moongate_telemetry::SpanContext;
use tokio::time::Instant;

use super::abort::{AbortSender, EngineRequestId};
use super::eligibility::{ChosenRoute, DecodeTarget};
use super::in_flight::InFlightGuard;
use super::pair::{LegKind, LegPair, PairEvent, RunningLeg, is_event_stream};
use super::protocol::HandoverProtocol;
use super::routed_request::{RoutedRequest, random_uuid};
use super::silence::{AttemptSilenceLimits, RedispatchDecider, SilentLegs};
use super::{sglang, vllm};
use crate::feedback::{AttemptTrace, ExpectedHits, TtftPrediction};
use crate::fleet::{FleetMember, UpstreamEndpoint};
use crate::relay::{ResponseSummary, SseError, SseFramer, TokenUsage};
use crate::request_body::{InferenceApi, SplicedBody};
use crate::upstream::{LegError, LegExchange, LegTimeouts, PreparedRequest};

/// Limits of an attempt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttemptLimits {
    /// Time limits of the prefill leg.
    pub(crate) prefill: LegTimeouts,
    /// Time limits of the leg that answers with a stream.
    pub(crate) stream: LegTimeouts,
    /// Time limits of the leg that answers in one piece, after the whole generation.
    pub(crate) non_stream: LegTimeouts,
    /// Answers that are not streams are held up to this size, so that one that breaks off can still be retried.
    pub(crate) held_answer_bytes: usize,
}

/// An answer that has begun.
#[derive(Debug)]
pub(crate) struct ResponseStart {
    pub(crate) head: Response<()>,
    pub(crate) payload: ResponsePayload,
    pub(crate) in_flight: InFlightGuard,
    /// What was predicted for the engine that computes the prompt.
    pub(crate) expected_hits: Option<ExpectedHits>,
    /// When the first token was predicted to come.
    pub(crate) ttft_prediction: Option<TtftPrediction>,
    /// What the prefill said of its cache, if it has ended already.
    pub(crate) prefill_usage: Option<TokenUsage>,
}

/// What of the answer is there.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one per request, and taken apart at once")]
pub(crate) enum ResponsePayload {
    /// All of it, with the tokens that it counts.
    Complete(Bytes, Option<TokenUsage>),
    /// Its first piece; the rest is to be relayed. The gate is there for event streams.
    Streaming { pair: LegPair, first: Bytes, gate: Option<SseFramer> },
}

impl AttemptLimits {
    fn main_timeouts(&self, ask: &RoutedRequest) -> LegTimeouts {
        if ask.routing.stream { self.stream } else { self.non_stream }
    }
}

/// What an attempt works with.
pub(super) struct AttemptContext<'a> {
    pub(super) limits: AttemptLimits,
    pub(super) aborter: &'a Arc<AbortSender>,
    pub(super) attempt: &'a AttemptTrace<'a>,
    pub(super) redispatch: RedispatchDecider<'a>,
}

/// A failed attempt.
#[derive(Debug)]
pub(crate) struct AttemptFailure {
    pub(crate) side: LegKind,
    pub(crate) endpoint: Arc<UpstreamEndpoint>,
    pub(crate) error: LegError,
    /// The engine of the other leg, if it is to be avoided too.
    pub(crate) other_engine: Option<Arc<UpstreamEndpoint>>,
    /// A prefill whose facts may be out of date: a restarted MooncakeConnector prefill has a new engine id, and it is the
    /// decode that answers 500 to the old one.
    pub(crate) stale_prefill: Option<FleetMember>,
    /// The span of the leg that failed, for those that follow from it.
    pub(crate) leg: Option<SpanContext>,
    /// The engine's `Retry-After`.
    pub(crate) retry_after: Option<Duration>,
}

/// Runs one attempt until the answer has begun.
pub(super) async fn attempt(
    ask: &RoutedRequest,
    chosen: ChosenRoute,
    context: &AttemptContext<'_>,
) -> Result<ResponseStart, AttemptFailure> {
    let ChosenRoute { prefill: entry, decode: exit, in_flight: booked, decision: reasons } = chosen;
    let decision = reasons.as_ref().map(|reasons| &*reasons.decision);
    let watch = decision.and_then(|decision| {
        let expected = decision.expected_ttft.max(decision.predicted_ttft.unwrap_or(0.0));
        let expected = context.redispatch.admission.to_wall_time(expected);
        AttemptSilenceLimits::new(entry.endpoint.silence.limits(), expected, ask)
    });
    let mut suspect = None;
    let pair = match exit {
        Some(exit) => {
            let facts = entry.facts();
            if facts
                .is_some_and(|facts| matches!(facts.transfer, Some(KvTransferMethod::VllmMooncake { .. })))
            {
                suspect = Some(entry.clone());
            }
            start_pair(ask, decision, (&entry, &exit), watch, context).await?
        }
        None => {
            let body = sglang::worker_body(ask, sglang::priority(decision, entry.facts()));
            let request = ask.prepare(body, Vec::new());
            let main = start_leg(
                LegKind::Worker,
                &entry,
                request,
                context.limits.main_timeouts(ask),
                context.attempt,
            );
            let main = if decision.is_some() { main.generating() } else { main };
            LegPair::new(None, main, LegKind::Worker, context.aborter.clone())
        }
    };
    first_bytes(ask, pair.with_silence_limits(watch), booked, context).await.map_err(|mut failure| {
        if failure.side == LegKind::Decode && failure.error.blames_engine() {
            failure.stale_prefill = suspect;
        }
        failure
    })
}

fn start_leg(
    side: LegKind,
    member: &FleetMember,
    mut request: PreparedRequest,
    limits: LegTimeouts,
    number: &AttemptTrace<'_>,
) -> RunningLeg {
    let now = Instant::now();
    let span = number.leg(side, member, now);
    request.extra_headers.extend(span.headers());
    let endpoint = &member.endpoint;
    RunningLeg::new(LegExchange::start(endpoint.pool.clone(), request, limits, now), endpoint.clone(), span)
}

async fn start_pair(
    ask: &RoutedRequest,
    decision: Option<&RoutingDecision>,
    (prefill, exit): (&FleetMember, &DecodeTarget),
    watch: Option<AttemptSilenceLimits>,
    context: &AttemptContext<'_>,
) -> Result<LegPair, AttemptFailure> {
    let AttemptContext { limits, aborter, attempt: number, .. } = *context;
    let fail = |what: &'static str| AttemptFailure {
        side: LegKind::Prefill,
        endpoint: prefill.endpoint.clone(),
        error: LegError::ProtocolViolation(what),
        other_engine: None,
        stale_prefill: None,
        leg: None,
        retry_after: None,
    };
    let facts = prefill.facts().ok_or_else(|| fail("has not been probed"))?;
    let decode_dp = exit.decode.facts().map_or(1, |facts| facts.dp_size);
    let id = random_uuid();
    let ranks = sglang::PairRanks {
        prefill: (exit.prefill_rank, facts.dp_size),
        decode: (exit.decode_rank, decode_dp),
    };
    let (mut p_headers, mut d_headers) = (Vec::new(), Vec::new());
    if !prefill.is_sglang() {
        p_headers = vllm::headers(&ask.id, number.number, (exit.prefill_rank, facts.dp_size));
        d_headers = vllm::headers(&ask.id, number.number, (exit.decode_rank, decode_dp));
    }
    let alone = |body: SplicedBody, headers| {
        let main = start_leg(
            LegKind::Decode,
            &exit.decode,
            ask.prepare(body, headers),
            limits.main_timeouts(ask),
            number,
        );
        LegPair::new(None, main.generating(), LegKind::Decode, aborter.clone())
    };
    let protocol = HandoverProtocol::from_facts(facts, exit.prefill_rank).map_err(fail)?;
    if !matches!(protocol, HandoverProtocol::Sglang(_)) && ask.routing.sequences() > 1 {
        // One hand-over serves one sequence: for several, the decode computes the prompt itself.
        return Ok(alone(vllm::nixl_decode(ask, None), d_headers));
    }
    match protocol {
        HandoverProtocol::Sglang(bootstrap) => {
            let rid: Arc<str> = id.into();
            let tie = sglang::PairBootstrap { bootstrap, ranks, rid: &rid, entropy: fastrand::u64(..) };
            let body = |facts| sglang::body(ask, tie, sglang::priority(decision, facts));
            let (p_body, d_body) = (body(Some(facts)), body(exit.decode.facts()));
            let prefill =
                start_leg(LegKind::Prefill, prefill, ask.prepare(p_body, p_headers), limits.prefill, number);
            let main = start_leg(
                LegKind::Decode,
                &exit.decode,
                ask.prepare(d_body, d_headers),
                limits.main_timeouts(ask),
                number,
            );
            let ticket = EngineRequestId { rid };
            let (prefill, main) = (prefill.with_request_id(ticket.clone()), main.with_request_id(ticket));
            let (prefill, main) = (prefill.generating(), main.generating());
            Ok(LegPair::new(Some(prefill), main, LegKind::Decode, aborter.clone()))
        }
        HandoverProtocol::Mooncake { bootstrap, engine_id } => {
            let transfer = format!("xfer-{id}");
            let body = vllm::mooncake_prefill(ask, &transfer);
            let prefill =
                start_leg(LegKind::Prefill, prefill, ask.prepare(body, p_headers), limits.prefill, number);
            let body = vllm::mooncake_decode(ask, &transfer, bootstrap, engine_id);
            let main = start_leg(
                LegKind::Decode,
                &exit.decode,
                ask.prepare(body, d_headers),
                limits.main_timeouts(ask),
                number,
            );
            let prefill = prefill.generating().run_to_completion();
            Ok(LegPair::new(Some(prefill), main.generating(), LegKind::Decode, aborter.clone()))
        }
        HandoverProtocol::Nixl => {
            let request = ask.prepare(vllm::nixl_prefill(ask), p_headers);
            let answer = prefill_first(ask, prefill, request, watch, context).await?;
            let params = vllm::parse_transfer_params(&answer)
                .map_err(|_| fail("answered its prefill with something that is not JSON"))?;
            let decode = alone(vllm::nixl_decode(ask, params.as_deref()), d_headers);
            Ok(decode.after_prefill(TokenUsage::read(&answer)))
        }
        HandoverProtocol::Store => {
            let request = ask.prepare(vllm::store_prefill(ask), p_headers);
            let answer = prefill_first(ask, prefill, request, watch, context).await?;
            Ok(alone(vllm::nixl_decode(ask, None), d_headers).after_prefill(TokenUsage::read(&answer)))
        }
    }
}

/// Runs a prefill leg to its end and returns its answer.
async fn prefill_first(
    ask: &RoutedRequest,
    prefill: &FleetMember,
    request: PreparedRequest,
    watch: Option<AttemptSilenceLimits>,
    context: &AttemptContext<'_>,
) -> Result<Bytes, AttemptFailure> {
    let limits = context.limits;
    let running = start_leg(LegKind::Prefill, prefill, request, limits.prefill, context.attempt).generating();
    let mut pair = LegPair::new(None, running, LegKind::Prefill, context.aborter.clone())
        .with_silence_limits(watch.map(AttemptSilenceLimits::prefill_only));
    let mut answer = BytesMut::new();
    loop {
        match poll_fn(|cx| pair.poll_event(cx)).await {
            PairEvent::Data(data) if answer.len() + data.len() > limits.held_answer_bytes => {
                let error =
                    LegError::ProtocolViolation("answered its prefill with more data than is ever needed");
                return Err(failure(&mut pair, LegKind::Prefill, error));
            }
            PairEvent::Data(data) => answer.extend_from_slice(&data),
            PairEvent::End => {
                prefill.endpoint.breaker.record_success();
                return Ok(answer.freeze());
            }
            PairEvent::Failed(side, error) => return Err(failure(&mut pair, side, error)),
            PairEvent::Silent(legs) => {
                if let Some(legs) = context.redispatch.should_redispatch(ask, legs) {
                    return Err(silence_failure(&mut pair, legs));
                }
            }
        }
    }
}

/// Waits until there is something that may be shown to the client: the first complete event of a stream, or a
/// whole answer.
async fn first_bytes(
    ask: &RoutedRequest,
    mut pair: LegPair,
    mut booked: InFlightGuard,
    context: &AttemptContext<'_>,
) -> Result<ResponseStart, AttemptFailure> {
    let held_bytes = context.limits.held_answer_bytes;
    let mut held = BytesMut::new();
    let mut gate: Option<SseFramer> = None;
    loop {
        let event = poll_fn(|cx| {
            let event = pair.poll_event(cx);
            if pair.is_prefilled() {
                booked.record_prompt_computed(pair.prefill_usage());
            }
            event
        });
        match event.await {
            PairEvent::Failed(side, error) => {
                return Err(failure(&mut pair, side, error));
            }
            PairEvent::Silent(legs) => {
                if let Some(legs) = context.redispatch.should_redispatch(ask, legs) {
                    return Err(silence_failure(&mut pair, legs));
                }
            }
            PairEvent::Data(data) => {
                if gate.is_none() && held.is_empty() && pair.head().is_some_and(is_event_stream) {
                    gate = Some(SseFramer::default());
                }
                let first = match &mut gate {
                    // A whole answer tells nothing of its first token.
                    Some(gate) => gate.push(data).map_err(|fault| sse_failure(&mut pair, fault))?,
                    None => {
                        held.extend_from_slice(&data);
                        if held.len() <= held_bytes && ask.api != InferenceApi::Other {
                            continue;
                        }
                        held.split().freeze()
                    }
                };
                if !first.is_empty() {
                    if gate.is_some() {
                        booked.record_prompt_computed(None);
                    }
                    return Ok(response_start(pair, first, gate, booked));
                }
            }
            PairEvent::End => {
                let (mut whole, mut usage) = (held.freeze(), None);
                if let Some(mut gate) = gate {
                    whole = gate
                        .finish(ask.api != InferenceApi::Other)
                        .map_err(|fault| sse_failure(&mut pair, fault))?;
                } else if ask.api == InferenceApi::Other {
                    usage = TokenUsage::read(&whole);
                } else {
                    let garbage = |what| main_failure(&mut pair, LegError::ProtocolViolation(what));
                    usage = check_answer(&whole).map_err(garbage)?;
                }
                pair.main_endpoint().breaker.record_success();
                pair.detach_prefill();
                let (head, prefill_usage) = (take_head(&pair), pair.prefill_usage());
                let answer = ResponsePayload::Complete(whole, usage);
                return Ok(ResponseStart {
                    head,
                    payload: answer,
                    in_flight: booked,
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
    gate: Option<SseFramer>,
    booked: InFlightGuard,
) -> ResponseStart {
    let (head, prefill_usage) = (take_head(&pair), pair.prefill_usage());
    let answer = ResponsePayload::Streaming { pair, first, gate };
    ResponseStart {
        head,
        payload: answer,
        in_flight: booked,
        expected_hits: None,
        ttft_prediction: None,
        prefill_usage,
    }
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

/// The failure of an attempt that gives up these legs, of which there is one.
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

fn sse_failure(pair: &mut LegPair, fault: SseError) -> AttemptFailure {
    main_failure(pair, LegError::from(fault))
}

/// An answer to a generation request must be JSON: an object, or an array for SGLang's batches. Returns the tokens that it counts.
fn check_answer(body: &[u8]) -> Result<Option<TokenUsage>, &'static str> {
    let said = match body.trim_ascii_start().first() {
        None => return Err("answered with an empty body"),
        Some(b'{' | b'[') => ResponseSummary::of(body).ok(),
        Some(_) => None,
    };
    said.map(|said| said.usage).ok_or("answered with something that is not JSON")
}
