//! Measurements of a run, in bounded memory.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

/// Histogram limit of one hour, in microseconds.
const MAX_LATENCY_US: u64 = 3_600_000_000;

#[derive(Debug, Clone, Default)]
pub struct RequestMeasurement {
    /// From sending to the first event with content.
    pub ttft: Option<Duration>,
    /// From sending to the end of the stream.
    pub e2e: Duration,
    /// Gaps between events with content.
    pub inter_token_latencies: Vec<Duration>,
    /// Prompt tokens as counted by the server.
    pub prompt_tokens: u64,
    /// … of them found in a cache.
    pub cached_tokens: u64,
    /// As counted by the server, otherwise the number of events with content.
    pub completion_tokens: u64,
}

/// A failed request with its error kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestFailure {
    /// A short name under which failures are counted.
    pub kind: String,
    /// Error message, or the beginning of the response.
    pub detail: String,
}

/// Count and first example of one kind of failure.
#[derive(Debug, Clone, Default)]
pub struct FailureCount {
    pub count: u64,
    /// Detail of the first failure.
    pub example: String,
}

/// Maximum number of error kinds counted separately.
const MAX_FAILURE_KINDS: usize = 64;

/// Measurements of all requests of a run.
#[derive(Debug)]
pub struct LoadMeasurements {
    /// Time to the first event with content.
    pub ttft: Histogram<u64>,
    /// Gaps between events with content.
    pub itl: Histogram<u64>,
    /// Mean time per token after the first, one value per request.
    pub tpot: Histogram<u64>,
    pub e2e: Histogram<u64>,
    /// Delay of sending against the scheduled arrival.
    pub lateness: Histogram<u64>,
    /// Requests with a complete response.
    pub succeeded: u64,
    /// All other requests, by error kind.
    pub failures: BTreeMap<String, FailureCount>,
    /// Prompt tokens of successful requests.
    pub prompt_tokens: u64,
    /// … of them cached.
    pub cached_tokens: u64,
    /// Output tokens of successful requests.
    pub completion_tokens: u64,
}

impl LoadMeasurements {
    ///
    /// # Errors
    /// The histograms cannot be created, which does not happen with these bounds.
    pub fn new() -> Result<Self, hdrhistogram::CreationError> {
        let histogram = || Histogram::new_with_bounds(1, MAX_LATENCY_US, 3);
        Ok(Self {
            ttft: histogram()?,
            itl: histogram()?,
            tpot: histogram()?,
            e2e: histogram()?,
            lateness: histogram()?,
            succeeded: 0,
            failures: BTreeMap::new(),
            prompt_tokens: 0,
            cached_tokens: 0,
            completion_tokens: 0,
        })
    }

    /// Adds the result of one request.
    pub fn add(&mut self, result: Result<RequestMeasurement, RequestFailure>) {
        match result {
            Ok(outcome) => self.add_outcome(&outcome),
            Err(failure) => {
                let known =
                    self.failures.contains_key(&failure.kind) || self.failures.len() < MAX_FAILURE_KINDS;
                let kind = if known { failure.kind } else { "other".to_owned() };
                let entry = self.failures.entry(kind).or_default();
                if entry.count == 0 {
                    entry.example = failure.detail;
                }
                entry.count += 1;
            }
        }
    }

    fn add_outcome(&mut self, outcome: &RequestMeasurement) {
        self.succeeded += 1;
        self.prompt_tokens += outcome.prompt_tokens;
        self.cached_tokens += outcome.cached_tokens;
        self.completion_tokens += outcome.completion_tokens;
        self.e2e.saturating_record(microseconds(outcome.e2e));
        for gap in &outcome.inter_token_latencies {
            self.itl.saturating_record(microseconds(*gap));
        }
        if let Some(ttft) = outcome.ttft {
            self.ttft.saturating_record(microseconds(ttft));
            if let Some(after) = outcome.completion_tokens.checked_sub(1).filter(|after| *after > 0) {
                let decoding: Duration = outcome.inter_token_latencies.iter().sum();
                self.tpot.saturating_record(microseconds(decoding) / after);
            }
        }
    }

    #[must_use]
    pub fn failed(&self) -> u64 {
        self.failures.values().map(|failure| failure.count).sum()
    }

    /// Prompt tokens found in a cache, as a share of all.
    #[must_use]
    pub fn prefix_hit_rate(&self) -> f64 {
        share(self.cached_tokens, self.prompt_tokens)
    }
}

/// Microseconds, limited to one hour.
pub(crate) fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX).min(MAX_LATENCY_US)
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub(crate) fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub(crate) fn per_second(count: u64, elapsed: Duration) -> f64 {
    if elapsed.is_zero() { 0.0 } else { count as f64 / elapsed.as_secs_f64() }
}

/// Mean and percentiles of a histogram of microseconds, in seconds.
pub(crate) fn summary(histogram: &Histogram<u64>) -> Value {
    if histogram.is_empty() {
        return Value::Null;
    }
    let quantile_s = |quantile: f64| seconds(histogram.value_at_quantile(quantile));
    json!({
        "count": histogram.len(), "mean_s": histogram.mean() / 1e6, "p50_s": quantile_s(0.5), "p90_s": quantile_s(0.9),
        "p95_s": quantile_s(0.95), "p99_s": quantile_s(0.99), "max_s": seconds(histogram.max()),
    })
}

pub(crate) fn seconds(microseconds: u64) -> f64 {
    Duration::from_micros(microseconds).as_secs_f64()
}
