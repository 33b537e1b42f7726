//! Attempts at what must be reachable before a node can start.

use std::fmt::Display;
use std::time::Duration;

use moongate_master_client::{Backoff, BackoffPolicy};
use tokio::time::Instant;

/// Pauses between attempts. The longest is short: a store is not complete while its nodes wait.
const RETRY: BackoffPolicy =
    BackoffPolicy { initial: Duration::from_millis(500), max: Duration::from_secs(2) };
/// Time from the first warning to the second. It doubles with every further one.
const FIRST_INTERVAL: Duration = Duration::from_secs(5);
/// Warnings are never further apart.
const LONGEST_INTERVAL: Duration = Duration::from_mins(1);

/// Retries until a deadline, with growing pauses and growing times between warnings.
#[derive(Debug)]
pub(crate) struct StartRetry {
    deadline: Instant,
    backoff: Backoff,
    /// When the next warning is due, and the time from it to the one after.
    warning: Option<(Instant, Duration)>,
}

impl StartRetry {
    pub(crate) fn new(deadline: Instant) -> Self {
        Self { deadline, backoff: Backoff::new(RETRY), warning: None }
    }

    /// Whether there is no time for another attempt.
    pub(crate) fn is_expired(&self) -> bool {
        Instant::now() >= self.deadline
    }

    /// After an attempt that failed: waits until the next one is due, at the deadline at the latest.
    pub(crate) async fn pause(&mut self, awaited: &str, error: &impl Display) {
        let now = Instant::now();
        if self.is_warning_due(now) {
            tracing::warn!(%error, "waiting for {awaited}");
        } else {
            tracing::debug!(%error, "waiting for {awaited}");
        }
        self.backoff.record_failure();
        tokio::time::sleep_until((now + self.backoff.delay()).min(self.deadline)).await;
    }

    fn is_warning_due(&mut self, now: Instant) -> bool {
        let (due, interval) = self.warning.unwrap_or((now, FIRST_INTERVAL));
        let is_due = now >= due;
        if is_due {
            self.warning = Some((now + interval, (interval * 2).min(LONGEST_INTERVAL)));
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_become_rarer() {
        let begun = Instant::now();
        let mut retry = StartRetry::new(begun);
        let warned: Vec<u64> =
            (0..300).filter(|second| retry.is_warning_due(begun + Duration::from_secs(*second))).collect();
        assert_eq!(warned, [0, 5, 15, 35, 75, 135, 195, 255]);
    }
}
