//! The course of one request, from arrival to whatever end it has.

use std::sync::Arc;

use tokio::time::Instant;

use super::cache::Expected;
use super::metrics::Metrics;
use super::spans::RequestSpan;
use crate::error::ApiError;
use crate::prompt::Api;
use crate::relay::Usage;

/// Counts one request exactly once: completed, failed, rejected, or (if dropped before) left by its client.
#[derive(Debug)]
pub(crate) struct Feedback {
    metrics: Arc<Metrics>,
    span: RequestSpan,
    api: Api,
    start: Instant,
    last_piece: Option<Instant>,
    /// What was predicted for the engine that computes the prompt, and the model's name.
    expected: Option<(Expected, Arc<str>)>,
    ended: bool,
}

impl Feedback {
    pub(crate) fn new(metrics: Arc<Metrics>, span: RequestSpan, api: Api) -> Self {
        metrics.request_started();
        Self { metrics, span, api, start: Instant::now(), last_piece: None, expected: None, ended: false }
    }

    /// The request's span.
    pub(crate) fn span(&mut self) -> &mut RequestSpan {
        &mut self.span
    }

    /// A route was taken for which cache hits were predicted.
    pub(crate) fn expect(&mut self, expected: Expected, model: Arc<str>) {
        self.span.expected(expected);
        self.expected = Some((expected, model));
    }

    /// A piece of the answer goes to the client.
    pub(crate) fn piece(&mut self) {
        let now = Instant::now();
        match self.last_piece.replace(now) {
            Some(last) => self.metrics.next_token(now - last),
            None => {
                let after = now - self.start;
                self.metrics.first_token(self.api, after);
                self.span.first_token(after.as_secs_f64());
            }
        }
    }

    /// The answer is complete.
    pub(crate) fn completed(&mut self, usage: Option<Usage>, prefill: Option<Usage>) {
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
                self.metrics.predictions.compare(model, *expected, found);
            }
        }
        self.end("ok");
    }

    /// The client got an error.
    pub(crate) fn failed(&mut self, error: &ApiError) {
        self.span.error(error);
        self.end(error.code.as_str());
    }

    /// The client got an engine's own error answer.
    pub(crate) fn rejected_by_engine(&mut self) {
        self.end("engine_rejected");
    }

    fn end(&mut self, code: &'static str) {
        if !std::mem::replace(&mut self.ended, true) {
            self.metrics.request_ended(self.api, code, self.start.elapsed());
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
