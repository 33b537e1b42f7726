//! Retries of calls that must succeed before a node can start.

use std::fmt::Display;
use std::time::Duration;

use moongate_runtime::{Backoff, BackoffPolicy};
use tokio::time::Instant;

/// Pauses between attempts, jittered. The maximum is short, because the store lacks capacity while its nodes wait.
const RETRY: BackoffPolicy =
    BackoffPolicy { initial: Duration::from_millis(500), max: Duration::from_secs(2) };
/// Times between two warnings.
const WARNING_INTERVALS: BackoffPolicy =
    BackoffPolicy { initial: Duration::from_secs(5), max: Duration::from_mins(1) };

/// Retries until a deadline, with growing pauses and growing intervals between warnings.
#[derive(Debug)]
pub(crate) struct StartRetry {
    deadline: Instant,
    backoff: Backoff,
    warnings: Backoff,
    /// When the next warning is due. `None`: at once.
    warning_due: Option<Instant>,
}

impl StartRetry {
    pub(crate) fn new(deadline: Instant) -> Self {
        Self {
            deadline,
            backoff: Backoff::new(RETRY),
            warnings: Backoff::new(WARNING_INTERVALS),
            warning_due: None,
        }
    }

    /// Whether the deadline has passed.
    pub(crate) fn is_expired(&self) -> bool {
        Instant::now() >= self.deadline
    }

    /// Waits after a failed attempt until the next one is due, at most until the deadline.
    pub(crate) async fn pause(&mut self, awaited: &str, error: &impl Display) {
        let now = Instant::now();
        if self.is_warning_due(now) {
            tracing::warn!(%error, "waiting for {awaited}");
        } else {
            tracing::debug!(%error, "waiting for {awaited}");
        }
        self.backoff.record_failure();
        tokio::time::sleep_until((now + self.backoff.jittered_pause()).min(self.deadline)).await;
    }

    fn is_warning_due(&mut self, now: Instant) -> bool {
        let is_due = self.warning_due.is_none_or(|due| now >= due);
        if is_due {
            self.warnings.record_failure();
            self.warning_due = Some(now + self.warnings.pause());
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warning_interval_doubles_up_to_a_minute() {
        let start = Instant::now();
        let mut retry = StartRetry::new(start);
        let warned: Vec<u64> =
            (0..300).filter(|second| retry.is_warning_due(start + Duration::from_secs(*second))).collect();
        assert_eq!(warned, [0, 5, 15, 35, 75, 135, 195, 255]);
    }
}
