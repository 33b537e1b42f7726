//! Exponential backoff: pauses that double with each consecutive failure.

use std::time::Duration;

/// Limits of the pauses between attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackoffPolicy {
    /// Pause after the first failure. It doubles with each further one.
    pub initial: Duration,
    /// Upper limit of a pause.
    pub max: Duration,
}

impl BackoffPolicy {
    /// The pause after this many consecutive failures; zero without a failure.
    #[must_use]
    pub fn pause(self, failures: u32) -> Duration {
        let Some(doublings) = failures.checked_sub(1) else { return Duration::ZERO };
        let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
        self.initial.saturating_mul(factor).min(self.max)
    }

    /// The same, shortened by up to half, so that many clients do not retry at the same time. `random` is from 0 to 1; with 1 the pause
    /// is whole.
    #[must_use]
    pub fn jittered_pause(self, failures: u32, random: f64) -> Duration {
        self.pause(failures).mul_f64(0.5 + 0.5 * random.clamp(0.0, 1.0))
    }
}

/// Counts consecutive failures, and computes the pause after them.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    policy: BackoffPolicy,
    failures: u32,
}

impl Backoff {
    #[must_use]
    pub const fn new(policy: BackoffPolicy) -> Self {
        Self { policy, failures: 0 }
    }

    /// Records a failed attempt, which lengthens the next pause.
    pub const fn record_failure(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }

    /// Resets the count after a success.
    pub const fn reset(&mut self) {
        self.failures = 0;
    }

    /// The pause before the next attempt.
    #[must_use]
    pub fn pause(&self) -> Duration {
        self.policy.pause(self.failures)
    }

    /// The pause before the next attempt, with a random half ([`BackoffPolicy::jittered_pause`]).
    #[must_use]
    pub fn jittered_pause(&self) -> Duration {
        self.policy.jittered_pause(self.failures, fastrand::f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: BackoffPolicy =
        BackoffPolicy { initial: Duration::from_millis(50), max: Duration::from_secs(2) };

    #[test]
    fn pauses_double_up_to_the_maximum() {
        let mut backoff = Backoff::new(POLICY);
        assert_eq!(backoff.pause(), Duration::ZERO, "the first attempt has no pause");
        let mut pauses = Vec::new();
        for _ in 0..8 {
            backoff.record_failure();
            pauses.push(backoff.pause().as_millis());
        }
        assert_eq!(pauses, [50, 100, 200, 400, 800, 1600, 2000, 2000]);
        for _ in 0..100 {
            backoff.record_failure();
        }
        assert_eq!(backoff.pause(), POLICY.max, "no overflow");
        assert_eq!(POLICY.pause(u32::MAX), POLICY.max);
        backoff.reset();
        assert_eq!((backoff.pause(), backoff.jittered_pause()), (Duration::ZERO, Duration::ZERO));
    }

    #[test]
    fn jitter_shortens_a_pause_by_up_to_half() {
        let jittered = [0.0, 0.5, 1.0, 7.0].map(|random| POLICY.jittered_pause(2, random).as_millis());
        assert_eq!(jittered, [50, 75, 100, 100]);
        let mut backoff = Backoff::new(POLICY);
        for failures in 1..12 {
            backoff.record_failure();
            let (pause, whole) = (backoff.jittered_pause(), POLICY.pause(failures));
            assert!(pause >= whole / 2 && pause <= whole, "{failures}: {pause:?}");
        }
    }
}
