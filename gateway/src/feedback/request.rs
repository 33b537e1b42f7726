//! Lifecycle of one request, from arrival to its end.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use tokio::time::Instant;

use super::cache::ExpectedHits;
use super::metrics::GatewayMetrics;
use super::prompt_reports::PromptReport;
use super::spans::RequestSpan;
use crate::access::QuotaPermit;
use crate::error::ApiError;
use crate::fleet::UpstreamEndpoint;
use crate::request_body::InferenceApi;
use crate::response::{ResponseFinish, TokenUsage};
use crate::stored_responses::ResponseStore;

/// A first token is mispredicted if it takes less than half or more than twice the prediction, beyond this tolerance.
const TTFT_TOLERANCE: Duration = Duration::from_secs(1);

/// Predicted time of a first token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TtftPrediction {
    pub(crate) predicted_at: Instant,
    pub(crate) ttft: Duration,
}

impl TtftPrediction {
    fn is_mispredicted(self, now: Instant) -> bool {
        let took = now - self.predicted_at;
        took > 2 * self.ttft + TTFT_TOLERANCE || self.ttft > 2 * took + TTFT_TOLERANCE
    }
}

/// Where a response is stored, with the conversation that led to it.
#[derive(Debug)]
pub(crate) struct ResponseCapture {
    pub(crate) store: Arc<ResponseStore>,
    pub(crate) tenant: Option<u64>,
    pub(crate) input_items: Bytes,
}

/// Counts one request exactly once: completed, failed, rejected, or abandoned by its client (if dropped earlier).
#[derive(Debug)]
pub(crate) struct RequestRecorder {
    metrics: Arc<GatewayMetrics>,
    span: RequestSpan,
    api: InferenceApi,
    start: Instant,
    last_chunk_at: Option<Instant>,
    /// The engine that computes the prompt.
    prefill: Option<Arc<UpstreamEndpoint>>,
    chunks: u64,
    ttft_prediction: Option<TtftPrediction>,
    /// Predicted hits of the engine that computes the prompt, and the model's name.
    expected_hits: Option<(ExpectedHits, Arc<str>)>,
    /// Where a response is stored when it is complete.
    response_capture: Option<ResponseCapture>,
    /// What to report to the store's master when the response is complete.
    prompt_report: Option<PromptReport>,
    /// The tenant's quota counts the request until its end.
    permit: Option<QuotaPermit>,
    ended: bool,
}

impl RequestRecorder {
    /// Recorder of a request that arrived at `start`.
    pub(crate) fn new(
        metrics: Arc<GatewayMetrics>,
        span: RequestSpan,
        api: InferenceApi,
        start: Instant,
    ) -> Self {
        metrics.request_started();
        Self {
            metrics,
            span,
            api,
            start,
            last_chunk_at: None,
            chunks: 0,
            prefill: None,
            ttft_prediction: None,
            expected_hits: None,
            response_capture: None,
            prompt_report: None,
            permit: None,
            ended: false,
        }
    }

    pub(crate) fn span(&mut self) -> &mut RequestSpan {
        &mut self.span
    }

    /// Sets the engine that computes the prompt.
    pub(crate) fn set_prefill(&mut self, endpoint: Arc<UpstreamEndpoint>) {
        self.prefill = Some(endpoint);
    }

    /// Holds the permit until the request ends.
    pub(crate) fn set_quota_permit(&mut self, permit: QuotaPermit) {
        self.permit = Some(permit);
    }

    /// Sets the predicted cache hits of the chosen route.
    pub(crate) fn set_expected_hits(&mut self, expected: ExpectedHits, model: Arc<str>) {
        self.span.set_expected_hits(expected.hits);
        self.expected_hits = Some((expected, model));
    }

    /// Sets the report about the prompt, to be sent when the response is complete.
    pub(crate) fn set_prompt_report(&mut self, report: PromptReport) {
        self.prompt_report = Some(report);
    }

    /// Sets where the response is stored.
    pub(crate) fn set_response_capture(&mut self, capture: ResponseCapture) {
        self.response_capture = Some(capture);
    }

    /// Sets the predicted time of a stream's first token.
    pub(crate) fn set_ttft_prediction(&mut self, prediction: Option<TtftPrediction>) {
        self.ttft_prediction = prediction;
    }

    /// A non-streamed response, or a chunk of one, goes to the client. It does not reveal the time of its first token, or the time
    /// between tokens.
    pub(crate) fn set_sample_of_batch(&mut self) {
        self.chunks += 1;
    }

    /// A chunk of a stream goes to the client.
    pub(crate) fn record_chunk(&mut self) {
        let now = Instant::now();
        self.chunks += 1;
        match self.last_chunk_at.replace(now) {
            Some(last) => self.metrics.next_token(now - last),
            None => {
                let after = now - self.start;
                self.span.first_token(now, after);
                if self.ttft_prediction.take().is_some_and(|prediction| prediction.is_mispredicted(now)) {
                    self.span.sample_mispredicted();
                }
                self.metrics.first_token(self.api, after, self.span.exported_trace_id());
            }
        }
    }

    /// The response is complete, with its token counts and those of its prefill. `last` is its JSON, or that of its stream's last event.
    /// `write_finish` fills in id and finish reasons, if they are needed.
    pub(crate) fn completed(
        &mut self,
        usage: Option<TokenUsage>,
        prefill: Option<TokenUsage>,
        last: &[u8],
        write_finish: impl FnOnce(&mut ResponseFinish),
    ) {
        if let Some(ResponseCapture { store, tenant, input_items }) = self.response_capture.take() {
            let is_stored = store.insert(tenant, input_items, last);
            self.metrics.sessions.record_response(if is_stored { "stored" } else { "invalid" });
            if !is_stored {
                tracing::warn!(
                    "a response is not stored, because it could not be read; its id cannot be continued"
                );
            }
        }
        if let Some(endpoint) = &self.prefill {
            let reported = prefill.or(usage);
            endpoint.prompt_counters.record_completed(
                reported.and_then(|usage| Some((usage.prompt_tokens, usage.cached_tokens?))),
            );
        }
        let usage = usage.map(|mut usage| {
            // Decode counts the whole KV cache that it received as cached; the prefill reports which tokens were not computed.
            let reported = prefill.and_then(|prefill| prefill.cached_tokens);
            usage.cached_tokens = reported.or(usage.cached_tokens);
            usage
        });
        let checkpoints = self.expected_hits.as_ref().and_then(|(expected, _)| expected.checkpoints.as_ref());
        if let Some(checkpoints) = checkpoints {
            let (response, found) =
                (usage.map(|usage| usage.completion_tokens), usage.and_then(|usage| usage.cached_tokens));
            checkpoints.learn(response, found);
        }
        if let Some(usage) = usage {
            self.metrics.record_tokens(
                usage.prompt_tokens,
                usage.cached_tokens.unwrap_or(0),
                usage.completion_tokens,
            );
            self.span.usage(usage);
            if let (Some((expected, model)), Some(found)) = (&self.expected_hits, usage.cached_tokens) {
                let trace = self.span.trace_id();
                if self.metrics.predictions.compare((model, self.api), expected, found, trace) {
                    self.span.sample_mispredicted();
                }
            }
        }
        match self.prompt_report.take() {
            None => self.span.response_ended(write_finish),
            Some(report) => {
                let mut finish = ResponseFinish::default();
                write_finish(&mut finish);
                report.send(self.start, finish.requests_tools());
                self.span.response_ended(|target| *target = finish);
            }
        }
        self.end("ok");
    }

    /// The client got an error.
    pub(crate) fn failed(&mut self, error: &ApiError) {
        self.span.set_status(error.code.status());
        self.span.error(error);
        self.end(error.code.as_str());
    }

    /// The client got an engine's own error response.
    pub(crate) fn rejected_by_engine(&mut self, status: StatusCode) {
        self.span.rejected_by_engine(status);
        self.end("engine_rejected");
    }

    fn end(&mut self, code: &'static str) {
        if !std::mem::replace(&mut self.ended, true) {
            let now = Instant::now();
            let trace = self.span.finished(now, self.chunks);
            self.metrics.request_ended(self.api, code, now - self.start, trace);
        }
    }
}

impl Drop for RequestRecorder {
    fn drop(&mut self) {
        if !self.ended {
            self.span.client_closed();
            self.end("client_closed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn ttft_is_mispredicted_beyond_twice_and_one_second() {
        let after = |ttft: f64, took: f64| {
            let prediction =
                TtftPrediction { predicted_at: Instant::now(), ttft: Duration::from_secs_f64(ttft) };
            prediction.is_mispredicted(Instant::now() + Duration::from_secs_f64(took))
        };
        assert!(!after(0.1, 1.1) && !after(2.0, 4.9) && !after(10.0, 5.0));
        assert!(after(0.1, 1.3) && after(2.0, 5.1) && after(10.0, 4.4));
    }
}
