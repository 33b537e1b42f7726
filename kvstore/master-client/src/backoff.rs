//! Exponential backoff with jitter.

use std::time::Duration;

/// Limits of the pauses between attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackoffPolicy {
    /// Pause after the first failure. It doubles with each further one.
    pub initial: Duration,
    /// Upper limit of a pause.
    pub max: Duration,
}

impl Default for BackoffPolicy {
    fn default() -> Self {
        Self { initial: Duration::from_millis(50), max: Duration::from_secs(2) }
    }
}

/// Counts consecutive failures, and computes the pause after them.
#[derive(Debug)]
pub struct Backoff {
    retry: BackoffPolicy,
    failures: u32,
}

impl Backoff {
    #[must_use]
    pub fn new(retry: BackoffPolicy) -> Self {
        Self { retry, failures: 0 }
    }

    /// Records a failed attempt, which lengthens the next pause.
    pub fn record_failure(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }

    /// Resets the count after a success.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// The pause before the next attempt. Half of it is random, so that many clients do not reconnect to a restarted server at the
    /// same time.
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
    fn pauses_double_up_to_the_maximum_and_are_jittered() {
        let mut backoff = Backoff::new(BackoffPolicy::default());
        assert_eq!(backoff.delay(), Duration::ZERO, "the first attempt has no pause");
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
