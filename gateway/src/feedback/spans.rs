//! The spans of one request: the request itself, and below it each decision, each leg and the relay.

use std::borrow::Cow;

use axum::body::Body;
use http::Request;
use moongate_scheduler::Refusal;
use moongate_telemetry::{SpanHandle, SpanKind, Traces, names};

use super::Expected;
use crate::dispatch::{Ask, Chosen, Side};
use crate::error::ApiError;
use crate::prompt::Api;
use crate::relay::Usage;

/// Span of a request, with the relay's below it once that has begun.
#[derive(Debug)]
pub(crate) struct RequestSpan {
    /// Before the root: fields are dropped in order, and a child ends before its parent.
    relay: Option<SpanHandle>,
    root: SpanHandle,
}

impl RequestSpan {
    /// Starts the span of an incoming request, below the caller's if it named one.
    pub(crate) fn start(traces: &Traces, api: Api, request: &Request<Body>) -> Self {
        if !traces.is_on() {
            return Self { root: SpanHandle::off(), relay: None };
        }
        let path = request.uri().path();
        let name = format!("{} {path}", request.method());
        let mut root = traces.server_span(name, request.headers());
        root.set(names::HTTP_REQUEST_METHOD, request.method().as_str().to_owned());
        root.set(names::URL_PATH, path.to_owned());
        let operation = match api {
            Api::Chat => Some("chat"),
            Api::Completions => Some("text_completion"),
            Api::Generate => Some("generate_content"),
            Api::Other => None,
        };
        if let Some(operation) = operation {
            root.set(names::GEN_AI_OPERATION_NAME, operation);
        }
        Self { root, relay: None }
    }

    /// The request has been read.
    pub(crate) fn asked(&mut self, ask: &Ask) {
        if !self.root.is_recording() {
            return;
        }
        if let Some(model) = &ask.model {
            self.root.set(names::GEN_AI_REQUEST_MODEL, model.to_string());
        }
        self.root.set(names::GEN_AI_REQUEST_STREAM, ask.head.stream);
        if let Some(request) = &ask.request {
            self.root.set("moongate.estimated_input_tokens", i64::from(request.input_tokens));
        }
    }

    /// Span of a decision.
    pub(crate) fn decide(&self) -> DecideSpan {
        DecideSpan(self.root.child("decide", SpanKind::Internal))
    }

    /// Span of a leg.
    pub(crate) fn leg(&self, side: Side, engine: &str) -> SpanHandle {
        let name = match side {
            Side::Prefill => "prefill",
            Side::Decode => "decode",
            Side::Worker => "worker",
        };
        let mut span = self.root.child(name, SpanKind::Client);
        if span.is_recording() {
            span.set(names::SERVER_ADDRESS, engine.to_owned());
        }
        span
    }

    /// What was predicted for the engine that computes the prompt.
    pub(crate) fn expected(&mut self, expected: Expected) {
        let hits = expected.hits;
        self.root.set("moongate.predicted.l1_tokens", i64::from(hits.l1_tokens));
        self.root.set("moongate.predicted.l2_tokens", i64::from(hits.l2_tokens));
        self.root.set("moongate.predicted.l3_tokens", i64::from(hits.l3_tokens));
    }

    /// The first piece of the answer goes to the client.
    pub(crate) fn first_token(&mut self, after_s: f64) {
        self.root.set(names::GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, after_s);
        self.relay = Some(self.root.child("relay", SpanKind::Internal));
    }

    /// What the engines counted.
    pub(crate) fn usage(&mut self, usage: Usage) {
        let count = |tokens: u64| i64::try_from(tokens).unwrap_or(i64::MAX);
        self.root.set(names::GEN_AI_USAGE_INPUT_TOKENS, count(usage.prompt_tokens));
        self.root.set(names::GEN_AI_USAGE_OUTPUT_TOKENS, count(usage.completion_tokens));
        if let Some(cached) = usage.cached_tokens {
            self.root.set(names::GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, count(cached));
        }
    }

    /// The client got this error.
    pub(crate) fn error(&mut self, error: &ApiError) {
        if self.root.is_recording() {
            self.root.set(names::ERROR_TYPE, error.code.as_str());
            self.root.error(Cow::Owned(error.message.clone()));
        }
    }

    /// The client left.
    pub(crate) fn client_closed(&mut self) {
        self.root.set(names::ERROR_TYPE, "client_closed");
    }
}

/// Span of one decision.
pub(crate) struct DecideSpan(SpanHandle);

impl DecideSpan {
    /// Notes what was decided, and ends the span.
    pub(crate) fn decided(mut self, chosen: &Result<Chosen, Refusal>) {
        if !self.0.is_recording() {
            return;
        }
        match chosen {
            Err(refusal) => self.0.error(refusal.to_string()),
            Ok(chosen) => {
                self.0.set("moongate.entry", chosen.entry.endpoint.id.to_string());
                if let Some(exit) = &chosen.exit {
                    self.0.set("moongate.decode", exit.decode.endpoint.id.to_string());
                }
                if let Some(decision) = &chosen.decision {
                    let why = &decision.explanation;
                    self.0.set("moongate.policy", why.policy.as_str());
                    self.0.set("moongate.reason", why.reason);
                    self.0
                        .set("moongate.candidates", i64::try_from(why.candidates.len()).unwrap_or(i64::MAX));
                }
            }
        }
    }
}
