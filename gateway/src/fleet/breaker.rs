//! Circuit breaker of one engine.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use moongate_runtime::BackoffPolicy;
use tokio::time::Instant;

/// When a breaker opens, and for how long.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BreakerLimits {
    /// Consecutive failures that open it.
    pub(crate) failures: u32,
    /// Pauses, which grow with every further failure.
    pub(crate) pauses: BackoffPolicy,
}

/// Opens after consecutive failures, lets requests through again after a pause, and closes with the first success. While the
/// failures continue, each attempt opens it again for twice as long.
#[derive(Debug)]
pub(crate) struct CircuitBreaker {
    limits: BreakerLimits,
    failures: AtomicU32,
    /// Milliseconds after `start` until which it is open.
    open_until_ms: AtomicU64,
    start: Instant,
}

impl CircuitBreaker {
    pub(crate) fn new(limits: BreakerLimits) -> Self {
        Self { limits, failures: AtomicU32::new(0), open_until_ms: AtomicU64::new(0), start: Instant::now() }
    }

    /// Whether requests should avoid the engine now.
    pub(crate) fn is_open(&self) -> bool {
        let until = self.open_until_ms.load(Ordering::Relaxed);
        until != 0 && self.now_ms() < until
    }

    pub(crate) fn record_success(&self) {
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
            self.open_until_ms.store(0, Ordering::Relaxed);
        }
    }

    pub(crate) fn record_failure(&self) {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if let Some(excess) = failures.checked_sub(self.limits.failures) {
            let pause = self.limits.pauses.pause(excess.saturating_add(1));
            let until = self.now_ms() + u64::try_from(pause.as_millis()).unwrap_or(u64::MAX / 2);
            self.open_until_ms.store(until, Ordering::Relaxed);
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX / 2)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LIMITS: BreakerLimits = BreakerLimits {
        failures: 3,
        pauses: BackoffPolicy { initial: Duration::from_secs(1), max: Duration::from_secs(4) },
    };

    #[tokio::test(start_paused = true)]
    async fn opens_only_after_consecutive_failures() {
        let breaker = CircuitBreaker::new(LIMITS);
        for _ in 0..10 {
            breaker.record_failure();
            breaker.record_failure();
            breaker.record_success();
        }
        assert!(!breaker.is_open());
        for _ in 0..3 {
            breaker.record_failure();
        }
        assert!(breaker.is_open());
        tokio::time::advance(Duration::from_millis(1001)).await;
        assert!(!breaker.is_open(), "a trial is let through after the pause");
        breaker.record_failure();
        tokio::time::advance(Duration::from_millis(1900)).await;
        assert!(breaker.is_open(), "the pause has doubled");
        tokio::time::advance(Duration::from_millis(200)).await;
        breaker.record_success();
        assert!(!breaker.is_open());
    }

    #[tokio::test(start_paused = true)]
    async fn the_pause_is_bounded() {
        let breaker = CircuitBreaker::new(LIMITS);
        for _ in 0..100 {
            breaker.record_failure();
        }
        tokio::time::advance(Duration::from_millis(4001)).await;
        assert!(!breaker.is_open());
    }
}
