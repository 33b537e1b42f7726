//! Backoff between connection attempts.

use std::time::Duration;

use crate::options::ReconnectPolicy;

/// Computes pauses from the number of consecutive failures.
#[derive(Debug)]
pub(crate) struct ReconnectBackoff {
    retry: ReconnectPolicy,
    failures: u32,
}

impl ReconnectBackoff {
    pub(crate) fn new(retry: ReconnectPolicy) -> Self {
        Self { retry, failures: 0 }
    }

    /// Records a failed connection attempt.
    pub(crate) fn failed(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }

    /// Records the end of a connection that lasted `after`. A connection that broke at once counts as a failure: a peer that accepts and
    /// closes must not be redialled without a pause.
    pub(crate) fn ended(&mut self, after: Duration) {
        if after >= self.retry.max {
            self.failures = 0;
        } else {
            self.failed();
        }
    }

    /// The pause before the next attempt. `random` is from 0 to 1.
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
    fn pauses_double_up_to_the_maximum_with_jitter() {
        let mut backoff = ReconnectBackoff::new(ReconnectPolicy::default());
        assert_eq!(backoff.pause(0.0), Duration::ZERO, "the first attempt has no pause");
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
    fn only_a_long_connection_resets_the_backoff() {
        let mut backoff = ReconnectBackoff::new(ReconnectPolicy::default());
        backoff.ended(Duration::from_millis(3));
        assert_eq!(backoff.pause(0.0), Duration::from_millis(50));
        backoff.ended(Duration::from_secs(1));
        assert_eq!(backoff.pause(0.0), Duration::ZERO);
    }
}
