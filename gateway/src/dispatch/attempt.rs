//! One attempt on one route: starts the legs in the protocol's order and waits until the answer has begun.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::Response;
use moongate_discovery::KvTransfer;
use moongate_scheduler::Decision;
use moongate_telemetry::SpanContext;
use tokio::time::Instant;

use super::abort::{Aborter, Ticket};
use super::ask::{Ask, random_uuid};
use super::booked::Booked;
use super::decide::{Chosen, Exit};
use super::pair::{Pair, PairEvent, Running, Side, is_event_stream};
use super::protocol::Protocol;
use super::silence::{RedispatchDecider, SilenceWatch, SilentLegs};
use super::{sglang, vllm};
use crate::feedback::{Expected, Foreseen, Try};
use crate::fleet::{Endpoint, Member};
use crate::prompt::{Api, Spliced};
use crate::relay::{SseFault, SseGate, Summary, Usage};
use crate::upstream::{Leg, LegError, LegLimits, PreparedRequest};

/// Limits of an attempt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttemptLimits {
    /// Time limits of the prefill leg.
    pub(crate) prefill: LegLimits,
    /// Time limits of the leg that answers with a stream.
    pub(crate) stream: LegLimits,
    /// Time limits of the leg that answers in one piece, after the whole generation.
    pub(crate) whole: LegLimits,
    /// Answers that are not streams are held up to this size, so that one that breaks off can still be retried.
    pub(crate) held_answer_bytes: usize,
}

/// An answer that has begun.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) head: Response<()>,
    pub(crate) answer: Answer,
    pub(crate) booked: Booked,
    /// What was predicted for the engine that computes the prompt.
    pub(crate) expected: Option<Expected>,
    /// When the first token was predicted to come.
    pub(crate) foreseen: Option<Foreseen>,
    /// What the prefill said of its cache, if it has ended already.
    pub(crate) prefill_usage: Option<Usage>,
}

/// What of the answer is there.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one per request, and taken apart at once")]
pub(crate) enum Answer {
    /// All of it, with the tokens that it counts.
    Whole(Bytes, Option<Usage>),
    /// Its first piece; the rest is to be relayed. The gate is there for event streams.
    Begun { pair: Pair, first: Bytes, gate: Option<SseGate> },
}

impl AttemptLimits {
    fn main(&self, ask: &Ask) -> LegLimits {
        if ask.head.stream { self.stream } else { self.whole }
    }
}

/// What an attempt works with.
pub(super) struct AttemptContext<'a> {
    pub(super) limits: AttemptLimits,
    pub(super) aborter: &'a Arc<Aborter>,
    pub(super) number: &'a Try<'a>,
    pub(super) redispatch: RedispatchDecider<'a>,
}

/// A failed attempt.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) side: Side,
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) error: LegError,
    /// The engine of the other leg, if it is to be avoided too.
    pub(crate) twin: Option<Arc<Endpoint>>,
    /// A prefill whose facts may be out of date: a restarted MooncakeConnector prefill has a new engine id, and it is the
    /// decode that answers 500 to the old one.
    pub(crate) suspect: Option<Member>,
    /// The span of the leg that failed, for those that follow from it.
    pub(crate) leg: Option<SpanContext>,
    /// The engine's `Retry-After`.
    pub(crate) retry_after: Option<Duration>,
}

/// Runs one attempt until the answer has begun.
pub(super) async fn attempt(
    ask: &Ask,
    chosen: Chosen,
    context: &AttemptContext<'_>,
) -> Result<Started, Failure> {
    let Chosen { entry, exit, booked, reasons } = chosen;
    let decision = reasons.as_ref().map(|reasons| &*reasons.decision);
    let watch = decision.and_then(|decision| {
        let expected = decision.expected_ttft.max(decision.predicted_ttft.unwrap_or(0.0));
        let expected = context.redispatch.desk.real(expected);
        SilenceWatch::new(entry.endpoint.silence.limits(), expected, ask)
    });
    let mut suspect = None;
    let pair = match exit {
        Some(exit) => {
            let facts = entry.facts();
            if facts.is_some_and(|facts| matches!(facts.transfer, Some(KvTransfer::VllmMooncake { .. }))) {
                suspect = Some(entry.clone());
            }
            start_pair(ask, decision, (&entry, &exit), watch, context).await?
        }
        None => {
            let body = sglang::worker_body(ask, sglang::priority(decision, entry.facts()));
            let request = ask.prepare(body, Vec::new());
            let main = leg(Side::Worker, &entry, request, context.limits.main(ask), context.number);
            let main = if decision.is_some() { main.generating() } else { main };
            Pair::new(None, main, Side::Worker, context.aborter.clone())
        }
    };
    first_bytes(ask, pair.watched(watch), booked, context).await.map_err(|mut failure| {
        if failure.side == Side::Decode && failure.error.blames_engine() {
            failure.suspect = suspect;
        }
        failure
    })
}

fn leg(
    side: Side,
    member: &Member,
    mut request: PreparedRequest,
    limits: LegLimits,
    number: &Try<'_>,
) -> Running {
    let now = Instant::now();
    let span = number.leg(side, member, now);
    request.own.extend(span.headers());
    let endpoint = &member.endpoint;
    Running::new(Leg::start(endpoint.pool.clone(), request, limits, now), endpoint.clone(), span)
}

async fn start_pair(
    ask: &Ask,
    decision: Option<&Decision>,
    (prefill, exit): (&Member, &Exit),
    watch: Option<SilenceWatch>,
    context: &AttemptContext<'_>,
) -> Result<Pair, Failure> {
    let AttemptContext { limits, aborter, number, .. } = *context;
    let fail = |what: &'static str| Failure {
        side: Side::Prefill,
        endpoint: prefill.endpoint.clone(),
        error: LegError::Garbage(what),
        twin: None,
        suspect: None,
        leg: None,
        retry_after: None,
    };
    let facts = prefill.facts().ok_or_else(|| fail("has not been probed"))?;
    let decode_dp = exit.decode.facts().map_or(1, |facts| facts.dp_size);
    let id = random_uuid();
    let ranks =
        sglang::Ranks { prefill: (exit.prefill_rank, facts.dp_size), decode: (exit.decode_rank, decode_dp) };
    let (mut p_headers, mut d_headers) = (Vec::new(), Vec::new());
    if !prefill.is_sglang() {
        p_headers = vllm::headers(&ask.id, number.number, (exit.prefill_rank, facts.dp_size));
        d_headers = vllm::headers(&ask.id, number.number, (exit.decode_rank, decode_dp));
    }
    let alone = |body: Spliced, headers| {
        let main = leg(Side::Decode, &exit.decode, ask.prepare(body, headers), limits.main(ask), number);
        Pair::new(None, main.generating(), Side::Decode, aborter.clone())
    };
    let protocol = Protocol::of(facts, exit.prefill_rank).map_err(fail)?;
    if !matches!(protocol, Protocol::Sglang(_)) && ask.head.sequences() > 1 {
        // One hand-over serves one sequence: for several, the decode computes the prompt itself.
        return Ok(alone(vllm::nixl_decode(ask, None), d_headers));
    }
    match protocol {
        Protocol::Sglang(bootstrap) => {
            let rid: Arc<str> = id.into();
            let tie = sglang::Tie { bootstrap, ranks, rid: &rid, entropy: fastrand::u64(..) };
            let body = |facts| sglang::body(ask, tie, sglang::priority(decision, facts));
            let (p_body, d_body) = (body(Some(facts)), body(exit.decode.facts()));
            let prefill = leg(Side::Prefill, prefill, ask.prepare(p_body, p_headers), limits.prefill, number);
            let main =
                leg(Side::Decode, &exit.decode, ask.prepare(d_body, d_headers), limits.main(ask), number);
            let ticket = Ticket { rid };
            let (prefill, main) = (prefill.with_ticket(ticket.clone()), main.with_ticket(ticket));
            let (prefill, main) = (prefill.generating(), main.generating());
            Ok(Pair::new(Some(prefill), main, Side::Decode, aborter.clone()))
        }
        Protocol::Mooncake { bootstrap, engine_id } => {
            let transfer = format!("xfer-{id}");
            let body = vllm::mooncake_prefill(ask, &transfer);
            let prefill = leg(Side::Prefill, prefill, ask.prepare(body, p_headers), limits.prefill, number);
            let body = vllm::mooncake_decode(ask, &transfer, bootstrap, engine_id);
            let main =
                leg(Side::Decode, &exit.decode, ask.prepare(body, d_headers), limits.main(ask), number);
            let prefill = prefill.generating().running_on();
            Ok(Pair::new(Some(prefill), main.generating(), Side::Decode, aborter.clone()))
        }
        Protocol::Nixl => {
            let request = ask.prepare(vllm::nixl_prefill(ask), p_headers);
            let answer = prefill_first(ask, prefill, request, watch, context).await?;
            let params = vllm::read_params(&answer)
                .map_err(|_| fail("answered its prefill with something that is not JSON"))?;
            let decode = alone(vllm::nixl_decode(ask, params.as_deref()), d_headers);
            Ok(decode.after_prefill(Usage::read(&answer)))
        }
        Protocol::Store => {
            let request = ask.prepare(vllm::store_prefill(ask), p_headers);
            let answer = prefill_first(ask, prefill, request, watch, context).await?;
            Ok(alone(vllm::nixl_decode(ask, None), d_headers).after_prefill(Usage::read(&answer)))
        }
    }
}

/// Runs a prefill leg to its end and returns its answer.
async fn prefill_first(
    ask: &Ask,
    prefill: &Member,
    request: PreparedRequest,
    watch: Option<SilenceWatch>,
    context: &AttemptContext<'_>,
) -> Result<Bytes, Failure> {
    let limits = context.limits;
    let running = leg(Side::Prefill, prefill, request, limits.prefill, context.number).generating();
    let mut pair = Pair::new(None, running, Side::Prefill, context.aborter.clone())
        .watched(watch.map(SilenceWatch::of_prefill));
    let mut answer = BytesMut::new();
    loop {
        match poll_fn(|cx| pair.poll_event(cx)).await {
            PairEvent::Data(data) if answer.len() + data.len() > limits.held_answer_bytes => {
                let error = LegError::Garbage("answered its prefill with more data than is ever needed");
                return Err(failure(&mut pair, Side::Prefill, error));
            }
            PairEvent::Data(data) => answer.extend_from_slice(&data),
            PairEvent::End => {
                prefill.endpoint.breaker.success();
                return Ok(answer.freeze());
            }
            PairEvent::Failed(side, error) => return Err(failure(&mut pair, side, error)),
            PairEvent::Silent(legs) => {
                if let Some(legs) = context.redispatch.give_up(ask, legs) {
                    return Err(silence_failure(&mut pair, legs));
                }
            }
        }
    }
}

/// Waits until there is something that may be shown to the client: the first complete event of a stream, or a
/// whole answer.
async fn first_bytes(
    ask: &Ask,
    mut pair: Pair,
    mut booked: Booked,
    context: &AttemptContext<'_>,
) -> Result<Started, Failure> {
    let held_bytes = context.limits.held_answer_bytes;
    let mut held = BytesMut::new();
    let mut gate: Option<SseGate> = None;
    loop {
        let event = poll_fn(|cx| {
            let event = pair.poll_event(cx);
            if pair.is_prefilled() {
                booked.computed(pair.prefill_usage());
            }
            event
        });
        match event.await {
            PairEvent::Failed(side, error) => {
                return Err(failure(&mut pair, side, error));
            }
            PairEvent::Silent(legs) => {
                if let Some(legs) = context.redispatch.give_up(ask, legs) {
                    return Err(silence_failure(&mut pair, legs));
                }
            }
            PairEvent::Data(data) => {
                if gate.is_none() && held.is_empty() && pair.head().is_some_and(is_event_stream) {
                    gate = Some(SseGate::default());
                }
                let first = match &mut gate {
                    // A whole answer tells nothing of its first token.
                    Some(gate) => gate.push(data).map_err(|fault| sse_failure(&mut pair, fault))?,
                    None => {
                        held.extend_from_slice(&data);
                        if held.len() <= held_bytes && ask.api != Api::Other {
                            continue;
                        }
                        held.split().freeze()
                    }
                };
                if !first.is_empty() {
                    if gate.is_some() {
                        booked.computed(None);
                    }
                    return Ok(begun(pair, first, gate, booked));
                }
            }
            PairEvent::End => {
                let (mut whole, mut usage) = (held.freeze(), None);
                if let Some(mut gate) = gate {
                    whole =
                        gate.finish(ask.api != Api::Other).map_err(|fault| sse_failure(&mut pair, fault))?;
                } else if ask.api == Api::Other {
                    usage = Usage::read(&whole);
                } else {
                    let garbage = |what| main_failure(&mut pair, LegError::Garbage(what));
                    usage = check_answer(&whole).map_err(garbage)?;
                }
                pair.main_endpoint().breaker.success();
                pair.leave_prefill_to_finish();
                let (head, prefill_usage) = (take_head(&pair), pair.prefill_usage());
                let answer = Answer::Whole(whole, usage);
                return Ok(Started { head, answer, booked, expected: None, foreseen: None, prefill_usage });
            }
        }
    }
}

fn begun(pair: Pair, first: Bytes, gate: Option<SseGate>, booked: Booked) -> Started {
    let (head, prefill_usage) = (take_head(&pair), pair.prefill_usage());
    let answer = Answer::Begun { pair, first, gate };
    Started { head, answer, booked, expected: None, foreseen: None, prefill_usage }
}

fn take_head(pair: &Pair) -> Response<()> {
    let mut head = Response::new(());
    if let Some(from) = pair.head() {
        *head.status_mut() = from.status();
        *head.headers_mut() = from.headers().clone();
    }
    head
}

fn failure(pair: &mut Pair, side: Side, error: LegError) -> Failure {
    let leg = pair.blame(side, &error);
    let retry_after = pair.retry_after(side);
    Failure { side, endpoint: pair.endpoint(side), error, twin: None, suspect: None, leg, retry_after }
}

/// The failure of an attempt that gives up these legs, of which there is one.
fn silence_failure(pair: &mut Pair, legs: SilentLegs) -> Failure {
    let silence = legs.first().map_or(Duration::ZERO, |leg| leg.silence());
    let mut failure = match legs.first() {
        Some(leg) => failure(pair, leg.side, LegError::Silent(silence)),
        None => main_failure(pair, LegError::Silent(silence)),
    };
    failure.twin = legs.get(1).map(|leg| leg.endpoint.clone());
    failure
}

fn main_failure(pair: &mut Pair, error: LegError) -> Failure {
    failure(pair, pair.main_side(), error)
}

fn sse_failure(pair: &mut Pair, fault: SseFault) -> Failure {
    main_failure(pair, LegError::from(fault))
}

/// An answer to a generation request must be JSON: an object, or an array for SGLang's batches. Returns the tokens that it counts.
fn check_answer(body: &[u8]) -> Result<Option<Usage>, &'static str> {
    let said = match body.trim_ascii_start().first() {
        None => return Err("answered with an empty body"),
        Some(b'{' | b'[') => Summary::of(body).ok(),
        Some(_) => None,
    };
    said.map(|said| said.usage).ok_or("answered with something that is not JSON")
}
