//! How long to wait before connecting again.

use std::time::Duration;

use crate::options::ReconnectPolicy;

/// Counts failures in a row.
#[derive(Debug)]
pub(crate) struct ReconnectBackoff {
    retry: ReconnectPolicy,
    failures: u32,
}

impl ReconnectBackoff {
    pub(crate) fn new(retry: ReconnectPolicy) -> Self {
        Self { retry, failures: 0 }
    }

    /// An attempt gave no connection.
    pub(crate) fn failed(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }

    /// A connection has ended after this time. One that broke at once is no success: a peer that accepts and closes must not be called
    /// without pause.
    pub(crate) fn ended(&mut self, after: Duration) {
        if after >= self.retry.max {
            self.failures = 0;
        } else {
            self.failed();
        }
    }

    /// The pause before the next attempt, for a random number from 0 to 1.
    pub(crate) fn pause(&self, random: f64) -> Duration {
        let Some(doublings) = self.failures.checked_sub(1) else { return Duration::ZERO };
        let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
        let full = self.retry.initial.saturating_mul(factor).min(self.retry.max);
        full.mul_f64(1.0 - 0.5 * random.clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_are_jittered() {
        let mut backoff = ReconnectBackoff::new(ReconnectPolicy::default());
        assert_eq!(backoff.pause(0.0), Duration::ZERO, "the first attempt comes at once");
        let mut pauses = Vec::new();
        for _ in 0..7 {
            backoff.failed();
            pauses.push(backoff.pause(0.0).as_millis());
        }
        assert_eq!(pauses, [50, 100, 200, 400, 800, 1000, 1000]);
        assert_eq!(backoff.pause(1.0), Duration::from_millis(500));
        for _ in 0..100 {
            backoff.failed();
        }
        assert_eq!(backoff.pause(0.0), Duration::from_secs(1), "no overflow");
    }

    #[test]
    fn only_a_connection_that_lasted_is_a_success() {
        let mut backoff = ReconnectBackoff::new(ReconnectPolicy::default());
        backoff.ended(Duration::from_millis(3));
        assert_eq!(backoff.pause(0.0), Duration::from_millis(50));
        backoff.ended(Duration::from_secs(1));
        assert_eq!(backoff.pause(0.0), Duration::ZERO);
    }
}
