//! The course of one request, from arrival to whatever end it has.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use tokio::time::Instant;

use super::cache::ExpectedHits;
use super::metrics::GatewayMetrics;
use super::spans::RequestSpan;
use crate::access::QuotaPermit;
use crate::error::ApiError;
use crate::fleet::UpstreamEndpoint;
use crate::relay::{ResponseFinish, TokenUsage};
use crate::request_body::InferenceApi;

/// What a first token may differ by from its prediction: half, or twice, of what it takes, and this.
const TTFT_TOLERANCE: Duration = Duration::from_secs(1);

/// When a first token was predicted to come.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TtftPrediction {
    /// Time of the prediction.
    pub(crate) predicted_at: Instant,
    pub(crate) ttft: Duration,
}

impl TtftPrediction {
    fn is_mispredicted(self, now: Instant) -> bool {
        let took = now - self.predicted_at;
        took > 2 * self.ttft + TTFT_TOLERANCE || self.ttft > 2 * took + TTFT_TOLERANCE
    }
}

/// Counts one request exactly once: completed, failed, rejected, or (if dropped before) left by its client.
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
    /// What was predicted for the engine that computes the prompt, and the model's name.
    expected_hits: Option<(ExpectedHits, Arc<str>)>,
    /// The tenant's quota counts the request until its end.
    permit: Option<QuotaPermit>,
    ended: bool,
}

impl RequestRecorder {
    /// Of a request that came at `start`.
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
            permit: None,
            ended: false,
        }
    }

    /// The request's span.
    pub(crate) fn span(&mut self) -> &mut RequestSpan {
        &mut self.span
    }

    /// An engine computes the prompt.
    pub(crate) fn set_prefill(&mut self, entry: Arc<UpstreamEndpoint>) {
        self.prefill = Some(entry);
    }

    /// Keeps the permit until the request ends.
    pub(crate) fn set_quota_permit(&mut self, permit: QuotaPermit) {
        self.permit = Some(permit);
    }

    /// A route was taken for which cache hits were predicted.
    pub(crate) fn set_expected_hits(&mut self, expected: ExpectedHits, model: Arc<str>) {
        self.span.set_expected_hits(expected);
        self.expected_hits = Some((expected, model));
    }

    /// A stream has begun whose first token was predicted.
    pub(crate) fn set_ttft_prediction(&mut self, foreseen: Option<TtftPrediction>) {
        self.ttft_prediction = foreseen;
    }

    /// An answer that is not a stream, or a piece of one, goes to the client. It has no information about its first token, or of the time between
    /// two.
    pub(crate) fn set_sample_of_batch(&mut self) {
        self.chunks += 1;
    }

    /// A piece of a stream goes to the client.
    pub(crate) fn record_chunk(&mut self) {
        let now = Instant::now();
        self.chunks += 1;
        match self.last_chunk_at.replace(now) {
            Some(last) => self.metrics.next_token(now - last),
            None => {
                let after = now - self.start;
                self.span.first_token(now, after);
                if self.ttft_prediction.take().is_some_and(|foreseen| foreseen.is_mispredicted(now)) {
                    self.span.sample_mispredicted();
                }
                self.metrics.first_token(self.api, after, self.span.exported_trace_id());
            }
        }
    }

    /// The answer is complete. It has counted tokens, as its prefill may have done, and `tell` says how it ended, if anybody wants to know.
    pub(crate) fn completed(
        &mut self,
        usage: Option<TokenUsage>,
        prefill: Option<TokenUsage>,
        tell: impl FnOnce(&mut ResponseFinish),
    ) {
        if let Some(entry) = &self.prefill {
            let told = prefill.or(usage);
            entry
                .prompt_counters
                .record_completed(told.and_then(|usage| Some((usage.prompt_tokens, usage.cached_tokens?))));
        }
        if let Some(mut usage) = usage {
            // Decode counts everything it was handed as cached; the prefill knows what was not computed.
            let told = prefill.and_then(|prefill| prefill.cached_tokens);
            usage.cached_tokens = told.or(usage.cached_tokens);
            self.metrics.record_tokens(
                usage.prompt_tokens,
                usage.cached_tokens.unwrap_or(0),
                usage.completion_tokens,
            );
            self.span.usage(usage);
            if let (Some((expected, model)), Some(found)) = (&self.expected_hits, usage.cached_tokens) {
                let trace = self.span.trace_id();
                if self.metrics.predictions.compare(model, *expected, found, trace) {
                    self.span.sample_mispredicted();
                }
            }
        }
        self.span.response_ended(tell);
        self.end("ok");
    }

    /// The client got an error.
    pub(crate) fn failed(&mut self, error: &ApiError) {
        self.span.set_status(error.code.status());
        self.span.error(error);
        self.end(error.code.as_str());
    }

    /// The client got an engine's own error answer.
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
            let foreseen =
                TtftPrediction { predicted_at: Instant::now(), ttft: Duration::from_secs_f64(ttft) };
            foreseen.is_mispredicted(Instant::now() + Duration::from_secs_f64(took))
        };
        assert!(!after(0.1, 1.1) && !after(2.0, 4.9) && !after(10.0, 5.0));
        assert!(after(0.1, 1.3) && after(2.0, 5.1) && after(10.0, 4.4));
    }
}
