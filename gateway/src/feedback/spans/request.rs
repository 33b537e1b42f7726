//! The span of a request.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use moongate_scheduler::TierHits;
use moongate_telemetry::{SpanHandle, TraceId, Tracer};
use tokio::time::Instant;

use super::request_fields::{BodyReadState, PredictionSpan, RequestSpanFields, operation_name};
use crate::error::ApiError;
use crate::feedback::TokenSource;
use crate::request_body::InferenceApi;
use crate::response::{ResponseFinish, TokenUsage};

/// Root span of a request.
#[derive(Debug)]
pub(crate) struct RequestSpan {
    pub(super) root: SpanHandle<RequestSpanFields>,
    /// Streams whose first token takes longer are exported.
    slow_ttft: Duration,
    request_id: HeaderValue,
}

/// A request that has been read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestDescription<'a> {
    pub(crate) body_bytes: usize,
    pub(crate) estimated_input_tokens: Option<u32>,
    pub(crate) model: Option<&'a Arc<str>>,
    pub(crate) stream: bool,
    pub(crate) max_output_tokens: Option<u32>,
}

impl RequestSpan {
    /// Starts the span of a request that arrived at `start`, as a child of the caller's span if the headers name one.
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

    /// The body is being read.
    pub(crate) fn start_body_read(&mut self) {
        self.root.update_attributes(|fields| fields.body_read = BodyReadState::Reading);
    }

    /// Sets the trace in the headers for engines, so that their spans become its children. In a sampled trace, each leg sets its own
    /// span instead.
    pub(crate) fn inject(&self, headers: &mut Arc<HeaderMap>) {
        if self.root.is_recording() {
            self.root.inject(Arc::make_mut(headers));
        }
    }

    /// The request has been read.
    pub(crate) fn set_request(&mut self, request: RequestDescription<'_>, at: Instant) {
        self.root.update_attributes(|fields| {
            fields.body_read = BodyReadState::Ended(at);
            fields.body_bytes = Some(request.body_bytes);
            fields.estimated_input_tokens = request.estimated_input_tokens;
            fields.model = request.model.cloned();
            fields.stream = Some(request.stream);
            fields.max_output_tokens = request.max_output_tokens;
        });
    }

    /// Cache hits are being predicted.
    pub(crate) fn start_prediction(&mut self, start: Instant) {
        self.root.update_attributes(|fields| {
            fields.prediction = Some(PredictionSpan { start, end: None, result: None });
        });
    }

    /// Records the outcome of the prediction: the prompt's tokens and their source, or the name of the error.
    pub(crate) fn end_prediction(&mut self, result: Result<(u32, TokenSource), &'static str>, at: Instant) {
        if let Some(RequestSpanFields { prediction: Some(prediction), .. }) = self.root.attributes_mut() {
            prediction.end = Some(at);
            prediction.result = Some(result);
        }
    }

    pub(crate) fn trace_id(&self) -> Option<TraceId> {
        self.root.trace_id()
    }

    /// Trace id, if the trace is certain to be exported.
    pub(crate) fn exported_trace_id(&self) -> Option<TraceId> {
        self.root.exported_trace_id()
    }

    /// Predicted hits of the engine that computes the prompt.
    pub(crate) fn set_expected_hits(&mut self, expected: TierHits) {
        self.root.update_attributes(|fields| fields.predicted = Some(expected));
    }

    /// The first chunk of the response goes to the client now, `after` the request's arrival.
    pub(crate) fn first_token(&mut self, now: Instant, after: Duration) {
        if let Some(fields) = self.root.attributes_mut() {
            fields.first_chunk = Some((now, after));
            // The duration of a non-streamed response depends on its length.
            if fields.stream == Some(true) && after > self.slow_ttft {
                self.root.force_export("slow");
            }
        }
    }

    /// Exports the trace because a prediction was far off.
    pub(crate) fn sample_mispredicted(&mut self) {
        self.root.force_export("mispredicted");
    }

    /// The response has ended; `write_finish` fills in id and finish reasons. Nothing later can cause the trace to be exported.
    pub(crate) fn response_ended(&mut self, write_finish: impl FnOnce(&mut ResponseFinish)) {
        if self.exported_trace_id().is_some() {
            self.root
                .update_attributes(|fields| write_finish(&mut fields.end.get_or_insert_default().finish));
        }
    }

    /// Token counts that the engine reported.
    pub(crate) fn usage(&mut self, usage: TokenUsage) {
        self.root.update_attributes(|fields| fields.usage = Some(usage));
    }

    /// Status of the response to the client.
    pub(crate) fn set_status(&mut self, status: StatusCode) {
        self.root.update_attributes(|fields| fields.status = Some(status));
    }

    /// The client got this error.
    pub(crate) fn error(&mut self, error: &ApiError) {
        self.root.update_attributes(|fields| fields.error = Some(error.code.as_str()));
        // A client's mistake is not a failure of this server.
        if error.code.status().is_server_error() && self.root.is_recording() {
            self.root.error(Cow::Owned(error.message.clone()));
            self.root.force_export("error");
        }
    }

    /// An engine rejected the request.
    pub(crate) fn rejected_by_engine(&mut self, status: StatusCode) {
        self.root.update_attributes(|fields| fields.status = Some(status));
        self.root.update_attributes(|fields| fields.error = Some("engine_rejected"));
    }

    /// The client closed the connection.
    pub(crate) fn client_closed(&mut self) {
        self.root.update_attributes(|fields| fields.error = Some("client_closed"));
    }

    /// The request has ended after `chunks` chunks. Returns the trace id if the trace is exported.
    pub(crate) fn finished(&mut self, now: Instant, chunks: u64) -> Option<TraceId> {
        self.root.set_end(now);
        let trace = self.exported_trace_id()?;
        let fields = self.root.attributes_mut()?;
        let end = fields.end.get_or_insert_default();
        end.chunks = chunks;
        end.request_id = Some(self.request_id.clone());
        if let (Some(operation), Some(model)) = (operation_name(fields.api), &fields.model) {
            let name = format!("{operation} {model}");
            self.root.rename(name);
        }
        Some(trace)
    }

    /// Logs that a response ended with an error after its start.
    pub(crate) fn log_stream_failure(&self, error: &ApiError) {
        let trace_id = self.trace_id().map(tracing::field::display);
        tracing::warn!(%error, request_id = self.request_id.to_str().ok(), trace_id, "stream failed");
    }
}
