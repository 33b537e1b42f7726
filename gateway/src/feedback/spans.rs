//! The span of a request, below which its steps have theirs.

use std::borrow::Cow;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode};
use moongate_telemetry::{SpanHandle, SpanKind, TraceId, Traces, names, texts};

use super::Expected;
use super::steps::{PredictSpan, PromptSpan};
use crate::dispatch::Ask;
use crate::error::ApiError;
use crate::prompt::Api;
use crate::relay::{Ending, Usage};

/// Span of a request, with the relay's below it once that has begun.
#[derive(Debug)]
pub(crate) struct RequestSpan {
    /// Before the root: fields are dropped in order, and a child ends before its parent.
    relay: Option<SpanHandle>,
    pub(super) root: SpanHandle,
    traces: Traces,
    request_id: HeaderValue,
    operation: Option<&'static str>,
    stream: bool,
}

impl RequestSpan {
    /// Starts the span of an incoming request, below the caller's if it named one.
    pub(crate) fn start(
        traces: &Traces,
        api: Api,
        request_id: &HeaderValue,
        request: &Request<Body>,
    ) -> Self {
        let operation = match api {
            Api::Chat => Some("chat"),
            Api::Completions => Some("text_completion"),
            Api::Generate => Some("generate_content"),
            Api::Other => None,
        };
        let mut root = SpanHandle::off();
        if traces.is_on() {
            root = traces.server_span(operation.unwrap_or("pass through"), request.headers());
            let (method, uri, id) = (request.method().clone(), request.uri().clone(), request_id.clone());
            root.set_later(move |notes| {
                notes.set(names::HTTP_REQUEST_METHOD, method.as_str().to_owned());
                notes.set(names::URL_PATH, uri.path().to_owned());
                notes.set("moongate.request_id", id.to_str().unwrap_or_default().to_owned());
            });
        }
        if let Some(operation) = operation {
            root.set(names::GEN_AI_OPERATION_NAME, operation);
        }
        let (traces, request_id) = (traces.clone(), request_id.clone());
        Self { root, relay: None, traces, request_id, operation, stream: false }
    }

    /// Span of reading the request.
    pub(crate) fn prompt(&self) -> PromptSpan {
        PromptSpan(self.root.child_at("prompt", SpanKind::Internal, self.root.start()))
    }

    /// Span of predicting cache hits.
    pub(crate) fn predict(&self) -> PredictSpan {
        PredictSpan(self.root.child("predict", SpanKind::Internal))
    }

    /// The request has been read.
    pub(crate) fn asked(&mut self, ask: &Ask) {
        self.stream = ask.head.stream;
        if !self.root.is_recording() {
            return;
        }
        if let Some(model) = &ask.model {
            if let Some(operation) = self.operation {
                self.root.rename(format!("{operation} {model}"));
            }
            self.root.set(names::GEN_AI_REQUEST_MODEL, model.clone());
        }
        self.root.set(names::GEN_AI_REQUEST_STREAM, self.stream);
        if let Some(most) = ask.head.max_output_tokens {
            self.root.set(names::GEN_AI_REQUEST_MAX_TOKENS, i64::from(most));
        }
    }

    /// Identity of the trace, for logs.
    pub(crate) fn trace_id(&self) -> Option<TraceId> {
        self.root.trace_id()
    }

    /// Identity of the trace, if it is exported for sure.
    pub(crate) fn exported_trace_id(&self) -> Option<TraceId> {
        self.root.exported_trace_id()
    }

    /// What was predicted for the engine that computes the prompt.
    pub(crate) fn expected(&mut self, expected: Expected) {
        let hits = expected.hits;
        self.root.set("moongate.predicted.l1_tokens", i64::from(hits.l1_tokens));
        self.root.set("moongate.predicted.l2_tokens", i64::from(hits.l2_tokens));
        self.root.set("moongate.predicted.l3_tokens", i64::from(hits.l3_tokens));
    }

    /// The first piece of the answer goes to the client.
    pub(crate) fn first_token(&mut self, after: Duration) {
        self.root.set(names::GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, after.as_secs_f64());
        self.relay = Some(self.root.child("relay", SpanKind::Internal));
        // A whole answer takes as long as it is.
        if self.stream && self.traces.is_slow(after) {
            self.root.keep("slow");
        }
    }

    /// A prediction was far from what happened.
    pub(crate) fn mispredicted(&mut self) {
        self.root.keep("mispredicted");
    }

    /// So many pieces went to the client.
    pub(crate) fn relayed(&mut self, pieces: u64) {
        if let Some(relay) = &mut self.relay {
            relay.set("moongate.pieces", i64::try_from(pieces).unwrap_or(i64::MAX));
        }
    }

    /// The answer has ended with these events, or is this. They are looked at only if the span may be exported.
    pub(crate) fn answer_ended<const N: usize>(&mut self, last: [&Bytes; N]) {
        if !self.root.is_recording() {
            return;
        }
        let last = last.map(|json| if Ending::looks_at(json) { json.clone() } else { Bytes::new() });
        self.root.set_cheaply(move |notes| {
            let mut ending = Ending::default();
            last.iter().for_each(|json| ending.read(json));
            if let Some(id) = ending.id {
                notes.set(names::GEN_AI_RESPONSE_ID, id);
            }
            if !ending.finish_reasons.is_empty() {
                notes.set(names::GEN_AI_RESPONSE_FINISH_REASONS, texts(ending.finish_reasons));
            }
        });
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

    /// The client gets an answer with this status.
    pub(crate) fn answered(&mut self, status: StatusCode) {
        self.root.set(names::HTTP_RESPONSE_STATUS_CODE, i64::from(status.as_u16()));
    }

    /// The client got this error.
    pub(crate) fn error(&mut self, error: &ApiError) {
        if !self.root.is_recording() {
            return;
        }
        self.root.set(names::ERROR_TYPE, error.code.as_str());
        // What a client does wrong is no failure of this server.
        if error.code.status().is_server_error() {
            self.root.error(Cow::Owned(error.message.clone()));
            self.root.keep("error");
        }
    }

    /// An engine found the request at fault.
    pub(crate) fn rejected_by_engine(&mut self, status: StatusCode) {
        self.answered(status);
        self.root.set(names::ERROR_TYPE, "engine_rejected");
    }

    /// The client left.
    pub(crate) fn client_closed(&mut self) {
        self.root.set(names::ERROR_TYPE, "client_closed");
    }

    /// Tells the log that a begun answer was broken off.
    pub(crate) fn log_stream_failure(&self, error: &ApiError) {
        let trace_id = self.trace_id().map(tracing::field::display);
        tracing::warn!(%error, request_id = self.request_id.to_str().ok(), trace_id, "stream failed");
    }
}
