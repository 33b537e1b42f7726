//! The course of one request, from arrival to whatever end it has.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use tokio::time::Instant;

use super::cache::Expected;
use super::metrics::Metrics;
use super::spans::RequestSpan;
use crate::access::Permit;
use crate::error::ApiError;
use crate::fleet::Endpoint;
use crate::prompt::Api;
use crate::relay::{Ending, Usage};

/// What a first token may differ by from its prediction: half, or twice, of what it takes, and this.
const TTFT_TOLERANCE: Duration = Duration::from_secs(1);

/// When a first token was predicted to come.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Foreseen {
    /// Time of the prediction.
    pub(crate) since: Instant,
    pub(crate) ttft: Duration,
}

impl Foreseen {
    fn is_far_from(self, now: Instant) -> bool {
        let took = now - self.since;
        took > 2 * self.ttft + TTFT_TOLERANCE || self.ttft > 2 * took + TTFT_TOLERANCE
    }
}

/// Counts one request exactly once: completed, failed, rejected, or (if dropped before) left by its client.
#[derive(Debug)]
pub(crate) struct Feedback {
    metrics: Arc<Metrics>,
    span: RequestSpan,
    api: Api,
    start: Instant,
    last_piece: Option<Instant>,
    /// The engine that computes the prompt.
    entry: Option<Arc<Endpoint>>,
    pieces: u64,
    foreseen: Option<Foreseen>,
    /// What was predicted for the engine that computes the prompt, and the model's name.
    expected: Option<(Expected, Arc<str>)>,
    /// The tenant's quota counts the request until its end.
    permit: Option<Permit>,
    ended: bool,
}

impl Feedback {
    /// Of a request that came at `start`.
    pub(crate) fn new(metrics: Arc<Metrics>, span: RequestSpan, api: Api, start: Instant) -> Self {
        metrics.request_started();
        Self {
            metrics,
            span,
            api,
            start,
            last_piece: None,
            pieces: 0,
            entry: None,
            foreseen: None,
            expected: None,
            permit: None,
            ended: false,
        }
    }

    /// The request's span.
    pub(crate) fn span(&mut self) -> &mut RequestSpan {
        &mut self.span
    }

    /// An engine computes the prompt.
    pub(crate) fn entered(&mut self, entry: Arc<Endpoint>) {
        self.entry = Some(entry);
    }

    /// Keeps the permit until the request ends.
    pub(crate) fn hold(&mut self, permit: Permit) {
        self.permit = Some(permit);
    }

    /// A route was taken for which cache hits were predicted.
    pub(crate) fn expect(&mut self, expected: Expected, model: Arc<str>) {
        self.span.expected(expected);
        self.expected = Some((expected, model));
    }

    /// A stream has begun whose first token was predicted.
    pub(crate) fn foresee(&mut self, foreseen: Option<Foreseen>) {
        self.foreseen = foreseen;
    }

    /// An answer that is not a stream, or a piece of one, goes to the client. It has no information about its first token, or of the time between
    /// two.
    pub(crate) fn part_of_whole(&mut self) {
        self.pieces += 1;
    }

    /// A piece of a stream goes to the client.
    pub(crate) fn piece(&mut self) {
        let now = Instant::now();
        self.pieces += 1;
        match self.last_piece.replace(now) {
            Some(last) => self.metrics.next_token(now - last),
            None => {
                let after = now - self.start;
                self.span.first_token(now, after);
                if self.foreseen.take().is_some_and(|foreseen| foreseen.is_far_from(now)) {
                    self.span.mispredicted();
                }
                self.metrics.first_token(self.api, after, self.span.exported_trace_id());
            }
        }
    }

    /// The answer is complete. It has counted tokens, as its prefill may have done, and `tell` says how it ended, if anybody wants to know.
    pub(crate) fn completed(
        &mut self,
        usage: Option<Usage>,
        prefill: Option<Usage>,
        tell: impl FnOnce(&mut Ending),
    ) {
        if let Some(entry) = &self.entry {
            let told = prefill.or(usage);
            entry.prompts.answered(told.and_then(|usage| Some((usage.prompt_tokens, usage.cached_tokens?))));
        }
        if let Some(mut usage) = usage {
            // Decode counts everything it was handed as cached; the prefill knows what was not computed.
            let told = prefill.and_then(|prefill| prefill.cached_tokens);
            usage.cached_tokens = told.or(usage.cached_tokens);
            self.metrics.tokens(
                usage.prompt_tokens,
                usage.cached_tokens.unwrap_or(0),
                usage.completion_tokens,
            );
            self.span.usage(usage);
            if let (Some((expected, model)), Some(found)) = (&self.expected, usage.cached_tokens) {
                let trace = self.span.trace_id();
                if self.metrics.predictions.compare(model, *expected, found, trace) {
                    self.span.mispredicted();
                }
            }
        }
        self.span.answer_ended(tell);
        self.end("ok");
    }

    /// The client got an error.
    pub(crate) fn failed(&mut self, error: &ApiError) {
        self.span.answered(error.code.status());
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
            let trace = self.span.finished(now, self.pieces);
            self.metrics.request_ended(self.api, code, now - self.start, trace);
        }
    }
}

impl Drop for Feedback {
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
    async fn a_first_token_is_mispredicted_if_it_is_off_by_more_than_twice_and_a_second() {
        let after = |ttft: f64, took: f64| {
            let foreseen = Foreseen { since: Instant::now(), ttft: Duration::from_secs_f64(ttft) };
            foreseen.is_far_from(Instant::now() + Duration::from_secs_f64(took))
        };
        assert!(!after(0.1, 1.1) && !after(2.0, 4.9) && !after(10.0, 5.0));
        assert!(after(0.1, 1.3) && after(2.0, 5.1) && after(10.0, 4.4));
    }
}
