//! The span of a request.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http::{HeaderValue, Request, StatusCode};
use moongate_telemetry::{SpanHandle, TraceId, Tracer};
use tokio::time::Instant;

use super::request_fields::{BodyReadState, PredictionSpan, RequestSpanFields, operation_name};
use crate::dispatch::RoutedRequest;
use crate::error::ApiError;
use crate::feedback::ExpectedHits;
use crate::predict::{PredictionError, PromptPrediction};
use crate::relay::{ResponseFinish, TokenUsage};
use crate::request_body::InferenceApi;

/// Span of a request.
#[derive(Debug)]
pub(crate) struct RequestSpan {
    pub(super) root: SpanHandle<RequestSpanFields>,
    /// First tokens of streams that take longer are worth a trace.
    slow_ttft: Duration,
    request_id: HeaderValue,
}

impl RequestSpan {
    /// Starts the span of a request that came at `start`, below the caller's if it named one.
    pub(crate) fn start(
        traces: &Tracer,
        api: InferenceApi,
        request_id: &HeaderValue,
        (request, start): (&Request<Body>, Instant),
    ) -> Self {
        let name = operation_name(api).unwrap_or("pass through");
        let root =
            traces.server_span(name, request.headers(), start, || RequestSpanFields::new(api, request));
        Self { root, slow_ttft: traces.slow_threshold(), request_id: request_id.clone() }
    }

    /// The request is being read.
    pub(crate) fn start_body_read(&mut self) {
        self.root.update_attributes(|facts| facts.body_read = BodyReadState::Reading);
    }

    /// The request has been read. What engines do for it belongs to its trace.
    pub(crate) fn set_request(&mut self, ask: &mut RoutedRequest, at: Instant) {
        // Of one that is sampled, each leg names itself instead.
        if self.root.is_recording() {
            self.root.inject(Arc::make_mut(&mut ask.headers));
        }
        self.root.update_attributes(|facts| {
            facts.body_read = BodyReadState::Ended(at);
            facts.body_bytes = Some(ask.body.len());
            facts.estimated_input_tokens = ask.request.as_ref().map(|request| request.input_tokens);
            facts.model.clone_from(&ask.model);
            facts.stream = Some(ask.routing.stream);
            facts.max_output_tokens = ask.routing.max_output_tokens;
        });
    }

    /// Cache hits are being predicted.
    pub(crate) fn start_prediction(&mut self, start: Instant) {
        self.root.update_attributes(|facts| {
            facts.prediction = Some(PredictionSpan { start, end: None, result: None });
        });
    }

    /// What was found.
    pub(crate) fn end_prediction(&mut self, found: Result<&PromptPrediction, &PredictionError>, at: Instant) {
        if let Some(RequestSpanFields { prediction: Some(prediction), .. }) = self.root.attributes_mut() {
            let found = found.map(|predicted| (predicted.input_tokens, predicted.tokenized_by));
            prediction.end = Some(at);
            prediction.result = Some(found.map_err(PredictionError::name));
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
    pub(crate) fn set_expected_hits(&mut self, expected: ExpectedHits) {
        self.root.update_attributes(|facts| facts.predicted = Some(expected.hits));
    }

    /// The first piece of the answer goes to the client now, so long after the request came.
    pub(crate) fn first_token(&mut self, now: Instant, after: Duration) {
        if let Some(facts) = self.root.attributes_mut() {
            facts.first_chunk = Some((now, after));
            // A whole answer takes as long as it is.
            if facts.stream == Some(true) && after > self.slow_ttft {
                self.root.force_export("slow");
            }
        }
    }

    /// A prediction was far from what happened.
    pub(crate) fn sample_mispredicted(&mut self) {
        self.root.force_export("mispredicted");
    }

    /// The answer has ended, and `tell` says how. Nothing more can happen for which the trace would be kept.
    pub(crate) fn response_ended(&mut self, tell: impl FnOnce(&mut ResponseFinish)) {
        if self.exported_trace_id().is_some() {
            self.root.update_attributes(|facts| tell(&mut facts.end.get_or_insert_default().finish));
        }
    }

    /// What the engines counted.
    pub(crate) fn usage(&mut self, usage: TokenUsage) {
        self.root.update_attributes(|facts| facts.usage = Some(usage));
    }

    /// The client gets an answer with this status.
    pub(crate) fn set_status(&mut self, status: StatusCode) {
        self.root.update_attributes(|facts| facts.status = Some(status));
    }

    /// The client got this error.
    pub(crate) fn error(&mut self, error: &ApiError) {
        self.root.update_attributes(|facts| facts.error = Some(error.code.as_str()));
        // What a client does wrong is no failure of this server.
        if error.code.status().is_server_error() && self.root.is_recording() {
            self.root.error(Cow::Owned(error.message.clone()));
            self.root.force_export("error");
        }
    }

    /// An engine found the request at fault.
    pub(crate) fn rejected_by_engine(&mut self, status: StatusCode) {
        self.root.update_attributes(|facts| facts.status = Some(status));
        self.root.update_attributes(|facts| facts.error = Some("engine_rejected"));
    }

    /// The client left.
    pub(crate) fn client_closed(&mut self) {
        self.root.update_attributes(|facts| facts.error = Some("client_closed"));
    }

    /// All is known, and so many pieces went to the client until now. Tells the trace if it is exported.
    pub(crate) fn finished(&mut self, now: Instant, pieces: u64) -> Option<TraceId> {
        self.root.set_end(now);
        let trace = self.exported_trace_id()?;
        let facts = self.root.attributes_mut()?;
        let end = facts.end.get_or_insert_default();
        end.chunks = pieces;
        end.request_id = Some(self.request_id.clone());
        if let (Some(operation), Some(model)) = (operation_name(facts.api), &facts.model) {
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
