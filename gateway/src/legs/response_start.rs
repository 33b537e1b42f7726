//! From the events of the legs to the start of the response: the first complete event of a stream, or a complete response.

use std::future::poll_fn;

use bytes::{Bytes, BytesMut};
use http::Response;
use moongate_translate::chat_to_messages;

use super::attempt::AttemptContext;
use super::failure::AttemptFailure;
use super::pair::{LegPair, PairEvent};
use super::running_leg::{RunningLeg, is_event_stream};
use super::silence::AttemptSilenceLimits;
use crate::decide::InFlightGuard;
use crate::feedback::{ExpectedHits, TtftPrediction};
use crate::request_body::InferenceApi;
use crate::response::{ResponseEvents, ResponseSummary, TokenUsage};
use crate::routed_request::RoutedRequest;
use crate::upstream::{LegError, LegKind};

const NOT_A_CHAT: &str = "returned a response that is not a chat completion's";

/// The start of a response. Boxed where it is passed on, because it is large.
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
pub(crate) enum ResponsePayload {
    /// The complete response, with its token counts.
    Complete(Bytes, Option<TokenUsage>),
    /// The first chunk; the rest is to be relayed. `events` is set for event streams.
    Streaming { pair: Box<LegPair>, first: Bytes, events: Option<ResponseEvents> },
}

/// Runs a prefill leg to its end and returns its response.
pub(crate) async fn prefill_response(
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
                return Err(AttemptFailure::of_leg(&mut pair, LegKind::Prefill, error));
            }
            PairEvent::Data(data) => response.extend_from_slice(&data),
            PairEvent::End => return Ok(response.freeze()),
            PairEvent::Failed(side, error) => return Err(AttemptFailure::of_leg(&mut pair, side, error)),
            PairEvent::Silent(legs) => {
                if let Some(legs) = context.redispatch.should_redispatch(routed, legs) {
                    return Err(AttemptFailure::of_silence(&mut pair, legs));
                }
            }
        }
    }
}

/// Waits for output that may be sent to the client: the first complete event of a stream, or a whole response.
pub(crate) async fn first_bytes(
    routed: &RoutedRequest,
    mut pair: Box<LegPair>,
    mut in_flight: InFlightGuard,
    context: &AttemptContext<'_>,
) -> Result<Box<ResponseStart>, AttemptFailure> {
    let buffer_limit = context.limits.response_buffer_bytes;
    let mut buffered = BytesMut::new();
    let mut preamble = BytesMut::new();
    let mut events: Option<ResponseEvents> = None;
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
                return Err(AttemptFailure::of_leg(&mut pair, side, error));
            }
            PairEvent::Silent(legs) => {
                if let Some(legs) = context.redispatch.should_redispatch(routed, legs) {
                    return Err(AttemptFailure::of_silence(&mut pair, legs));
                }
            }
            PairEvent::Data(data) => {
                let is_stream = |head: &Response<()>| is_event_stream(head.headers());
                if events.is_none() && buffered.is_empty() && pair.head().is_some_and(is_stream) {
                    events = Some(if pair.is_translated() {
                        ResponseEvents::of_translated_chat()
                    } else {
                        ResponseEvents::new(routed.api.stream_end())
                    });
                }
                let mut first = match &mut events {
                    // A non-streamed response does not reveal its first token.
                    Some(events) => {
                        events.push(data).map_err(|error| AttemptFailure::of_events(&mut pair, error))?
                    }
                    None => {
                        buffered.extend_from_slice(&data);
                        if buffered.len() <= buffer_limit && routed.api != InferenceApi::Other {
                            continue;
                        }
                        buffered.split().freeze()
                    }
                };
                // Held back, so that the request can still be sent to another engine.
                if events.as_ref().is_some_and(ResponseEvents::is_in_preamble) {
                    preamble.extend_from_slice(&first);
                    if preamble.len() <= buffer_limit {
                        continue;
                    }
                    first.clear();
                }
                let first = prepend(&mut preamble, first);
                if !first.is_empty() {
                    if events.is_some() {
                        in_flight.record_prompt_computed(None);
                    }
                    let received = received(&pair);
                    let payload = ResponsePayload::Streaming { pair, first, events };
                    return Ok(response_start(received, payload, in_flight));
                }
            }
            PairEvent::End => {
                let (mut complete, mut usage) = (buffered.freeze(), None);
                if let Some(mut events) = events {
                    complete =
                        events.finish().map_err(|error| AttemptFailure::of_events(&mut pair, error))?;
                    complete = prepend(&mut preamble, complete);
                } else if routed.api == InferenceApi::Other {
                    usage = TokenUsage::read(&complete);
                } else {
                    let violation =
                        |what| AttemptFailure::of_main(&mut pair, LegError::ProtocolViolation(what));
                    usage = check_response(&complete).map_err(violation)?;
                    if pair.is_translated() {
                        let translated = chat_to_messages(&complete);
                        let violation =
                            |_| AttemptFailure::of_main(&mut pair, LegError::ProtocolViolation(NOT_A_CHAT));
                        complete = translated.map_err(violation)?.into();
                    }
                }
                pair.main_endpoint().breaker.record_success();
                pair.detach_prefill();
                let payload = ResponsePayload::Complete(complete, usage);
                return Ok(response_start(received(&pair), payload, in_flight));
            }
        }
    }
}

/// The events that were held back, and those that follow.
fn prepend(held: &mut BytesMut, events: Bytes) -> Bytes {
    if held.is_empty() {
        return events;
    }
    held.extend_from_slice(&events);
    held.split().freeze()
}

fn response_start(
    (head, prefill_usage): (Response<()>, Option<TokenUsage>),
    payload: ResponsePayload,
    in_flight: InFlightGuard,
) -> Box<ResponseStart> {
    Box::new(ResponseStart {
        head,
        payload,
        in_flight,
        expected_hits: None,
        ttft_prediction: None,
        prefill_usage,
    })
}

/// The head of the response, and the token counts of the prefill.
fn received(pair: &LegPair) -> (Response<()>, Option<TokenUsage>) {
    let mut head = Response::new(());
    if let Some(from) = pair.head() {
        *head.status_mut() = from.status();
        *head.headers_mut() = from.headers().clone();
    }
    (head, pair.prefill_usage())
}

/// The response to a generation request must be JSON: an object, or an array for SGLang's batches. Returns its token counts.
pub(crate) fn check_response(body: &[u8]) -> Result<Option<TokenUsage>, &'static str> {
    let summary = match body.trim_ascii_start().first() {
        None => return Err("returned an empty body"),
        Some(b'{' | b'[') => ResponseSummary::of(body).ok(),
        Some(_) => None,
    };
    summary.map(|summary| summary.usage).ok_or("returned a response that is not JSON")
}
