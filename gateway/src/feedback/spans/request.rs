//! The span of a request.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http::{HeaderValue, Request, StatusCode};
use moongate_telemetry::{SpanHandle, TraceId, Traces};
use tokio::time::Instant;

use super::facts::{Facts, Prediction, Reading, operation};
use crate::dispatch::Ask;
use crate::error::ApiError;
use crate::feedback::Expected;
use crate::predict::{Predicted, Unknown};
use crate::prompt::Api;
use crate::relay::{Ending, Usage};

/// Span of a request.
#[derive(Debug)]
pub(crate) struct RequestSpan {
    pub(super) root: SpanHandle<Facts>,
    /// First tokens of streams that take longer are worth a trace.
    slow: Duration,
    request_id: HeaderValue,
}

impl RequestSpan {
    /// Starts the span of a request that came at `start`, below the caller's if it named one.
    pub(crate) fn start(
        traces: &Traces,
        api: Api,
        request_id: &HeaderValue,
        (request, start): (&Request<Body>, Instant),
    ) -> Self {
        let name = operation(api).unwrap_or("pass through");
        let root = traces.server_span(name, request.headers(), start, || Facts::of(api, request));
        Self { root, slow: traces.slow(), request_id: request_id.clone() }
    }

    /// The request is being read.
    pub(crate) fn reading(&mut self) {
        self.root.know(|facts| facts.reading = Reading::Begun);
    }

    /// The request has been read. What engines do for it belongs to its trace.
    pub(crate) fn asked(&mut self, ask: &mut Ask, at: Instant) {
        // Of one that is sampled, each leg names itself instead.
        if self.root.is_recording() {
            self.root.inject(Arc::make_mut(&mut ask.headers));
        }
        self.root.know(|facts| {
            facts.reading = Reading::Ended(at);
            facts.body_bytes = Some(ask.body.len());
            facts.estimated_input_tokens = ask.request.as_ref().map(|request| request.input_tokens);
            facts.model.clone_from(&ask.model);
            facts.stream = Some(ask.head.stream);
            facts.max_output_tokens = ask.head.max_output_tokens;
        });
    }

    /// Cache hits are being predicted.
    pub(crate) fn predicting(&mut self, start: Instant) {
        self.root.know(|facts| facts.prediction = Some(Prediction { start, end: None, found: None }));
    }

    /// What was found.
    pub(crate) fn predicted(&mut self, found: Result<&Predicted, &Unknown>, at: Instant) {
        if let Some(Facts { prediction: Some(prediction), .. }) = self.root.facts_mut() {
            let found = found.map(|predicted| (predicted.input_tokens, predicted.tokenized_by));
            prediction.end = Some(at);
            prediction.found = Some(found.map_err(Unknown::name));
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
        self.root.know(|facts| facts.predicted = Some(expected.hits));
    }

    /// The first piece of the answer goes to the client now, so long after the request came.
    pub(crate) fn first_token(&mut self, now: Instant, after: Duration) {
        if let Some(facts) = self.root.facts_mut() {
            facts.first_piece = Some((now, after));
            // A whole answer takes as long as it is.
            if facts.stream == Some(true) && after > self.slow {
                self.root.keep("slow");
            }
        }
    }

    /// A prediction was far from what happened.
    pub(crate) fn mispredicted(&mut self) {
        self.root.keep("mispredicted");
    }

    /// The answer has ended, and `tell` says how. Nothing more can happen for which the trace would be kept.
    pub(crate) fn answer_ended(&mut self, tell: impl FnOnce(&mut Ending)) {
        if self.exported_trace_id().is_some() {
            self.root.know(|facts| tell(&mut facts.end.get_or_insert_default().ending));
        }
    }

    /// What the engines counted.
    pub(crate) fn usage(&mut self, usage: Usage) {
        self.root.know(|facts| facts.usage = Some(usage));
    }

    /// The client gets an answer with this status.
    pub(crate) fn answered(&mut self, status: StatusCode) {
        self.root.know(|facts| facts.status = Some(status));
    }

    /// The client got this error.
    pub(crate) fn error(&mut self, error: &ApiError) {
        self.root.know(|facts| facts.error = Some(error.code.as_str()));
        // What a client does wrong is no failure of this server.
        if error.code.status().is_server_error() && self.root.is_recording() {
            self.root.error(Cow::Owned(error.message.clone()));
            self.root.keep("error");
        }
    }

    /// An engine found the request at fault.
    pub(crate) fn rejected_by_engine(&mut self, status: StatusCode) {
        self.root.know(|facts| facts.status = Some(status));
        self.root.know(|facts| facts.error = Some("engine_rejected"));
    }

    /// The client left.
    pub(crate) fn client_closed(&mut self) {
        self.root.know(|facts| facts.error = Some("client_closed"));
    }

    /// All is known, and so many pieces went to the client until now. Tells the trace if it is exported.
    pub(crate) fn finished(&mut self, now: Instant, pieces: u64) -> Option<TraceId> {
        self.root.ends_at(now);
        let trace = self.exported_trace_id()?;
        let facts = self.root.facts_mut()?;
        let end = facts.end.get_or_insert_default();
        end.pieces = pieces;
        end.request_id = Some(self.request_id.clone());
        if let (Some(operation), Some(model)) = (operation(facts.api), &facts.model) {
            let name = format!("{operation} {model}");
            self.root.rename(name);
        }
        Some(trace)
    }

    /// Tells the log that a begun answer was broken off.
    pub(crate) fn log_stream_failure(&self, error: &ApiError) {
        let trace_id = self.trace_id().map(tracing::field::display);
        tracing::warn!(%error, request_id = self.request_id.to_str().ok(), trace_id, "stream failed");
    }
}
