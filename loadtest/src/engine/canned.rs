//! Canned chat completions: a few microseconds of CPU per request, for measuring what is in front of the engine.
//!
//! Nothing of a request is parsed, computed, transferred or recorded; four of its members are searched for. A stream
//! has one event per token, and each event contains the time at which it was written.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::Method;
use memchr::memmem;
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;
use tokio::time::{Instant, sleep_until};

use super::config::{CannedCompletions, SimEngineOptions, SimRole};
use super::generation::{GenerationFinish, OutputPart, OutputToken};
use super::render::{ChoiceOutput, ResponseRenderer};
use super::request::GenerationEndpoint;
use super::response::{self, SimRejection, SimResponse};
use super::stats::{unix_ms, unix_s};

/// Gateways append their members, and load generators put their own after the messages: the relevant members are near
/// the end. Searching the whole body would cost more than everything else here.
const SEARCHED_TAIL_BYTES: usize = 1024;
/// Maximum number of tokens of a stream.
const MAX_TOKENS: u32 = 1 << 20;
/// Prompt tokens in the usage.
const PROMPT_TOKENS: usize = 64;
/// Text before the digits of a token's timestamp.
const TIMESTAMP_PREFIX: &str = "\"content\":\"T";
/// Digits of a token's timestamp.
const TIMESTAMP_DIGITS: usize = 20;

/// Nanoseconds of `CLOCK_MONOTONIC`, which is the same for all processes of one machine.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// When this event of a canned stream was written, in nanoseconds of [`monotonic_ns`]. `None` if it is not a token's.
#[must_use]
pub fn canned_event_ns(event: &[u8]) -> Option<u64> {
    let start = memmem::find(event, TIMESTAMP_PREFIX.as_bytes())? + TIMESTAMP_PREFIX.len();
    std::str::from_utf8(event.get(start..start + TIMESTAMP_DIGITS)?).ok()?.parse().ok()
}

/// An engine's responses, rendered once.
#[derive(Debug)]
pub(crate) struct CannedResponses {
    role: SimRole,
    inter_token_latency: Duration,
    renderer: ResponseRenderer,
    completion: Bytes,
    /// The event of a token, before and after its timestamp.
    token_event: (String, String),
}

impl CannedResponses {
    pub(crate) fn new(options: &SimEngineOptions, canned: &CannedCompletions) -> Self {
        let renderer = renderer(options);
        let mut whole = output(4);
        "Hello there.".clone_into(&mut whole.text);
        whole.finish = Some(GenerationFinish::Stop(None));
        let completion = renderer.complete_response(&[whole], false).to_string();
        let token =
            OutputToken { part: OutputPart::Content, text: format!("T{:0TIMESTAMP_DIGITS$}", 0), id: 0 };
        let event = renderer.token_event(0, &token, &output(0)).to_string();
        let (before, after) = event.split_once(&token.text).unwrap_or_default();
        Self {
            role: options.role,
            inter_token_latency: canned.inter_token_latency,
            completion: completion.into(),
            token_event: (format!("data: {before}T"), format!("{after}\n\n")),
            renderer,
        }
    }

    /// The response, or `None` if the path has no canned one.
    pub(crate) fn respond(self: &Arc<Self>, method: &Method, path: &str, body: &[u8]) -> Option<SimResponse> {
        match path {
            "/v1/chat/completions" if method == Method::POST => Some(self.complete(body)),
            // A gateway could predict with the tokens, at the cost of a request more.
            "/tokenize" | "/v1/tokenize" => Some(response::not_found(self.renderer.protocol)),
            // A trace collector that accepts everything.
            "/v1/traces" => Some(response::empty()),
            _ => None,
        }
    }

    fn complete(self: &Arc<Self>, body: &[u8]) -> SimResponse {
        let request = CannedRequest::find(body);
        if self.role != SimRole::Plain && !request.has_bootstrap_room {
            return response::rejection(self.renderer.protocol, &SimRejection::missing_bootstrap_room());
        }
        if !request.stream {
            return response::json_text(self.completion.clone());
        }
        // A prefill engine generates the first token and responds at once.
        let tokens = if self.role == SimRole::Prefill { 1 } else { request.tokens };
        self.stream(tokens, request.inter_token_latency.unwrap_or(self.inter_token_latency))
    }

    fn stream(self: &Arc<Self>, tokens: u32, inter_token_latency: Duration) -> SimResponse {
        let started = Instant::now();
        let events = stream::unfold((Arc::clone(self), 0_u32), move |(canned, sent)| async move {
            // The token's event, or the usage and the end behind the tokens.
            let behind = sent.checked_sub(tokens);
            if behind > Some(1) {
                return None;
            }
            if behind.is_none() && !inter_token_latency.is_zero() {
                sleep_until(started + inter_token_latency * sent).await;
            }
            // What was sent is flushed: an engine writes every event by itself. An engine's step also generates one
            // token for each of its streams; without this, one stream would get ahead.
            tokio::task::yield_now().await;
            let event = match behind {
                None => canned.token_event(),
                Some(0) => response::event(&canned.renderer.usage_event(&[output(tokens)])),
                Some(_) => response::done_event(),
            };
            Some((Ok(event), (canned, sent + 1)))
        });
        response::stream("text/event-stream; charset=utf-8", events)
    }

    fn token_event(&self) -> Bytes {
        let (before, after) = &self.token_event;
        Bytes::from(format!("{before}{:0TIMESTAMP_DIGITS$}{after}", monotonic_ns()))
    }
}

fn renderer(options: &SimEngineOptions) -> ResponseRenderer {
    ResponseRenderer {
        protocol: options.protocol,
        endpoint: GenerationEndpoint::Chat,
        id: response::hex_id(),
        ids: Vec::new(),
        created: unix_ms() / 1_000,
        model: options.model.clone(),
        logprobs: false,
        return_token_ids: false,
        n: 1,
        tool: None,
        kv_transfer_params: Value::Null,
        prefill_leg: false,
        started_unix_s: unix_s(),
    }
}

fn output(tokens: u32) -> ChoiceOutput {
    ChoiceOutput {
        token_ids: vec![0; tokens as usize],
        prompt_tokens: PROMPT_TOKENS,
        ..ChoiceOutput::default()
    }
}

/// The members of a request on which a canned response depends.
#[derive(Debug, PartialEq, Eq)]
struct CannedRequest {
    stream: bool,
    tokens: u32,
    inter_token_latency: Option<Duration>,
    has_bootstrap_room: bool,
}

impl CannedRequest {
    fn find(body: &[u8]) -> Self {
        let tail = &body[body.len().saturating_sub(SEARCHED_TAIL_BYTES)..];
        Self {
            stream: value(tail, b"\"stream\":").is_some_and(|value| value.starts_with(b"true")),
            tokens: value(tail, b"\"max_tokens\":").and_then(number).unwrap_or(16).clamp(1, MAX_TOKENS),
            inter_token_latency: value(tail, b"\"user\":")
                .and_then(|user| number(user.strip_prefix(b"\"itl-ms-")?))
                .map(|ms| Duration::from_millis(u64::from(ms))),
            has_bootstrap_room: value(tail, b"\"bootstrap_room\":")
                .is_some_and(|value| !value.starts_with(b"null")),
        }
    }
}

/// Text after the last occurrence of `member`.
fn value<'a>(body: &'a [u8], member: &[u8]) -> Option<&'a [u8]> {
    let offset = memmem::rfind(body, member)?;
    Some(body[offset + member.len()..].trim_ascii_start())
}

fn number(text: &[u8]) -> Option<u32> {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&text[..digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_found_with_and_without_blanks() {
        let body =
            br#"{"messages":[],"max_tokens": 64,"stream": true,"user":"itl-ms-10","bootstrap_room":7}"#;
        let expected = CannedRequest {
            stream: true,
            tokens: 64,
            inter_token_latency: Some(Duration::from_millis(10)),
            has_bootstrap_room: true,
        };
        assert_eq!(CannedRequest::find(body), expected);
        let expected =
            CannedRequest { stream: false, tokens: 16, inter_token_latency: None, has_bootstrap_room: false };
        assert_eq!(CannedRequest::find(br#"{"messages":[],"user":"me","bootstrap_room":null}"#), expected);
    }
}
