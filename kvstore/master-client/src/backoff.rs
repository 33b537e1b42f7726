//! How long to wait before connecting again.

use std::time::Duration;

/// Pauses between attempts to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackoffPolicy {
    /// The pause after the first failure. It doubles with every further one.
    pub initial: Duration,
    /// No pause is longer.
    pub max: Duration,
}

impl Default for BackoffPolicy {
    fn default() -> Self {
        Self { initial: Duration::from_millis(50), max: Duration::from_secs(2) }
    }
}

/// Counts failures in a row.
#[derive(Debug)]
pub struct Backoff {
    retry: BackoffPolicy,
    failures: u32,
}

impl Backoff {
    /// Without a failure yet.
    #[must_use]
    pub fn new(retry: BackoffPolicy) -> Self {
        Self { retry, failures: 0 }
    }

    /// An attempt failed.
    pub fn record_failure(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }

    /// The other side has shown that it works.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// The pause before the next attempt. Half of it is random, so that many clients of one server that comes
    /// back do not all come at once.
    #[must_use]
    pub fn delay(&self) -> Duration {
        self.delay_for(fastrand::f64())
    }

    fn delay_for(&self, random: f64) -> Duration {
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
        let mut backoff = Backoff::new(BackoffPolicy::default());
        assert_eq!(backoff.delay(), Duration::ZERO, "the first attempt comes at once");
        let mut pauses = Vec::new();
        for _ in 0..8 {
            backoff.record_failure();
            pauses.push(backoff.delay_for(0.0).as_millis());
        }
        assert_eq!(pauses, [50, 100, 200, 400, 800, 1600, 2000, 2000]);
        assert_eq!(backoff.delay_for(1.0), Duration::from_secs(1));
        for _ in 0..100 {
            backoff.record_failure();
        }
        assert_eq!(backoff.delay_for(0.0), Duration::from_secs(2), "no overflow");
        backoff.reset();
        assert_eq!(backoff.delay(), Duration::ZERO);
    }
}
