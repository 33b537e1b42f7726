//! The span of a request, below which its steps have theirs.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use moongate_scheduler::TierHits;
use moongate_telemetry::{Notes, SpanHandle, SpanKind, TraceId, Traces, names, texts};

use super::Expected;
use super::steps::PredictSpan;
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
    facts: Facts,
}

/// What is known of a request. It is written once it is known that somebody will see it: of most requests nobody does.
#[derive(Debug, Default)]
struct Facts {
    operation: Option<&'static str>,
    method: Method,
    uri: Uri,
    body_bytes: Option<usize>,
    estimated_input_tokens: Option<u32>,
    model: Option<Arc<str>>,
    stream: Option<bool>,
    max_output_tokens: Option<u32>,
    predicted: Option<TierHits>,
    first_chunk: Option<Duration>,
    /// The answer's end, or the answer.
    last: [Bytes; 2],
    usage: Option<Usage>,
    status: Option<StatusCode>,
    error: Option<&'static str>,
}

impl RequestSpan {
    /// Starts the span of an incoming request, below the caller's if it named one.
    pub(crate) fn start(
        traces: &Traces,
        api: Api,
        request_id: &HeaderValue,
        request: &Request<Body>,
    ) -> Self {
        let mut facts = Facts::default();
        let mut root = SpanHandle::off();
        if traces.is_on() {
            facts.operation = match api {
                Api::Chat => Some("chat"),
                Api::Completions => Some("text_completion"),
                Api::Generate => Some("generate_content"),
                Api::Other => None,
            };
            facts.method = request.method().clone();
            facts.uri = request.uri().clone();
            root = traces.server_span(facts.operation.unwrap_or("pass through"), request.headers());
        }
        Self { root, relay: None, traces: traces.clone(), request_id: request_id.clone(), facts }
    }

    /// Span of reading the request.
    pub(crate) fn prompt(&self) -> SpanHandle {
        self.root.first_child("prompt", SpanKind::Internal)
    }

    /// Span of predicting cache hits.
    pub(crate) fn predict(&self) -> PredictSpan {
        PredictSpan(self.root.child("predict", SpanKind::Internal))
    }

    /// The request has been read.
    pub(crate) fn asked(&mut self, ask: &Ask) {
        self.facts.body_bytes = Some(ask.body.len());
        self.facts.estimated_input_tokens = ask.request.as_ref().map(|request| request.input_tokens);
        self.facts.model.clone_from(&ask.model);
        self.facts.stream = Some(ask.head.stream);
        self.facts.max_output_tokens = ask.head.max_output_tokens;
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
        self.facts.predicted = Some(expected.hits);
    }

    /// The first piece of the answer goes to the client.
    pub(crate) fn first_token(&mut self, after: Duration) {
        self.facts.first_chunk = Some(after);
        self.relay = Some(self.root.child("relay", SpanKind::Internal));
        // A whole answer takes as long as it is.
        if self.facts.stream == Some(true) && self.traces.is_slow(after) {
            self.root.keep("slow");
        }
    }

    /// A prediction was far from what happened.
    pub(crate) fn mispredicted(&mut self) {
        self.root.keep("mispredicted");
    }

    /// The answer has ended with these events, or is this.
    pub(crate) fn answer_ended<const N: usize>(&mut self, last: [&Bytes; N]) {
        if self.root.is_recording() {
            for (kept, json) in self.facts.last.iter_mut().zip(last) {
                *kept = if Ending::looks_at(json) { json.clone() } else { Bytes::new() };
            }
        }
    }

    /// What the engines counted.
    pub(crate) fn usage(&mut self, usage: Usage) {
        self.facts.usage = Some(usage);
    }

    /// The client gets an answer with this status.
    pub(crate) fn answered(&mut self, status: StatusCode) {
        self.facts.status = Some(status);
    }

    /// The client got this error.
    pub(crate) fn error(&mut self, error: &ApiError) {
        self.facts.error = Some(error.code.as_str());
        // What a client does wrong is no failure of this server.
        if error.code.status().is_server_error() && self.root.is_recording() {
            self.root.error(Cow::Owned(error.message.clone()));
            self.root.keep("error");
        }
    }

    /// An engine found the request at fault.
    pub(crate) fn rejected_by_engine(&mut self, status: StatusCode) {
        self.facts.status = Some(status);
        self.facts.error = Some("engine_rejected");
    }

    /// The client left.
    pub(crate) fn client_closed(&mut self) {
        self.facts.error = Some("client_closed");
    }

    /// All is known, and so many pieces went to the client. Tells the trace if it is exported.
    pub(crate) fn finished(&mut self, pieces: u64) -> Option<TraceId> {
        let trace = self.root.exported_trace_id()?;
        let facts = std::mem::take(&mut self.facts);
        if let (Some(operation), Some(model)) = (facts.operation, &facts.model) {
            self.root.rename(format!("{operation} {model}"));
        }
        let id = self.request_id.to_str().unwrap_or_default().to_owned();
        self.root.set("moongate.request_id", id);
        self.root.set_later(Arc::new(move |notes: &mut Notes| facts.tell(notes)));
        if let Some(relay) = &mut self.relay {
            relay.set("moongate.pieces", i64::try_from(pieces).unwrap_or(i64::MAX));
        }
        Some(trace)
    }

    /// Tells the log that a begun answer was broken off.
    pub(crate) fn log_stream_failure(&self, error: &ApiError) {
        let trace_id = self.trace_id().map(tracing::field::display);
        tracing::warn!(%error, request_id = self.request_id.to_str().ok(), trace_id, "stream failed");
    }
}

impl Facts {
    fn tell(&self, notes: &mut Notes) {
        let count = |tokens: u64| i64::try_from(tokens).unwrap_or(i64::MAX);
        notes.set(names::HTTP_REQUEST_METHOD, self.method.as_str().to_owned());
        notes.set(names::URL_PATH, self.uri.path().to_owned());
        if let Some(bytes) = self.body_bytes {
            notes.set("http.request.body.size", i64::try_from(bytes).unwrap_or(i64::MAX));
        }
        if let Some(tokens) = self.estimated_input_tokens {
            notes.set("moongate.estimated_input_tokens", i64::from(tokens));
        }
        if let Some(operation) = self.operation {
            notes.set(names::GEN_AI_OPERATION_NAME, operation);
        }
        if let Some(model) = &self.model {
            notes.set(names::GEN_AI_REQUEST_MODEL, model.clone());
        }
        if let Some(stream) = self.stream {
            notes.set(names::GEN_AI_REQUEST_STREAM, stream);
        }
        if let Some(most) = self.max_output_tokens {
            notes.set(names::GEN_AI_REQUEST_MAX_TOKENS, i64::from(most));
        }
        if let Some(hits) = self.predicted {
            notes.set("moongate.predicted.l1_tokens", i64::from(hits.l1_tokens));
            notes.set("moongate.predicted.l2_tokens", i64::from(hits.l2_tokens));
            notes.set("moongate.predicted.l3_tokens", i64::from(hits.l3_tokens));
        }
        if let Some(after) = self.first_chunk {
            notes.set(names::GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, after.as_secs_f64());
        }
        if let Some(usage) = self.usage {
            notes.set(names::GEN_AI_USAGE_INPUT_TOKENS, count(usage.prompt_tokens));
            notes.set(names::GEN_AI_USAGE_OUTPUT_TOKENS, count(usage.completion_tokens));
            if let Some(cached) = usage.cached_tokens {
                notes.set(names::GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, count(cached));
            }
        }
        if let Some(status) = self.status {
            notes.set(names::HTTP_RESPONSE_STATUS_CODE, i64::from(status.as_u16()));
        }
        if let Some(error) = self.error {
            notes.set(names::ERROR_TYPE, error);
        }
        self.tell_ending(notes);
    }

    fn tell_ending(&self, notes: &mut Notes) {
        let mut ending = Ending::default();
        self.last.iter().for_each(|json| ending.read(json));
        if let Some(id) = ending.id {
            notes.set(names::GEN_AI_RESPONSE_ID, id);
        }
        if !ending.finish_reasons.is_empty() {
            notes.set(names::GEN_AI_RESPONSE_FINISH_REASONS, texts(ending.finish_reasons));
        }
    }
}
