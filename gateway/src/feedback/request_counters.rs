//! Running totals, from which the console computes rates.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

/// Requests since the start of the gateway.
#[derive(Debug, Default)]
pub(super) struct RequestCounters {
    ended: AtomicU64,
    failed: AtomicU64,
    first_tokens: AtomicU64,
    first_token_us: AtomicU64,
}

/// Totals of all requests since the start.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct RequestTotals {
    /// Requests that have not ended.
    pub(crate) in_flight: i64,
    /// Requests that have ended in any way.
    pub(crate) ended: u64,
    /// Ended requests that had an error.
    pub(crate) failed: u64,
    /// Requests whose first token has arrived, and the sum of their TTFTs.
    pub(crate) first_tokens: u64,
    pub(crate) first_token_s: f64,
    /// Tokens, as engines report them.
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) completion_tokens: u64,
}

impl RequestCounters {
    /// `code` is as in [`super::GatewayMetrics::request_ended`].
    pub(super) fn record_ended(&self, code: &str) {
        self.ended.fetch_add(1, Ordering::Relaxed);
        if !matches!(code, "ok" | "client_closed") {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn record_first_token(&self, after: Duration) {
        self.first_tokens.fetch_add(1, Ordering::Relaxed);
        let micros = u64::try_from(after.as_micros()).unwrap_or(u64::MAX);
        self.first_token_us.fetch_add(micros, Ordering::Relaxed);
    }

    /// The totals, with values counted elsewhere: requests in flight, and prompt, cached and completion tokens.
    pub(super) fn totals(&self, in_flight: i64, tokens: [u64; 3]) -> RequestTotals {
        let [prompt_tokens, cached_tokens, completion_tokens] = tokens;
        RequestTotals {
            in_flight,
            ended: self.ended.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            first_tokens: self.first_tokens.load(Ordering::Relaxed),
            first_token_s: self.first_token_us.load(Ordering::Relaxed) as f64 / 1e6,
            prompt_tokens,
            cached_tokens,
            completion_tokens,
        }
    }
}
