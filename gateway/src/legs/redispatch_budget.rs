//! Limits how many requests are redispatched because their engine is silent, so that a slow, overloaded fleet does not get even
//! more work.

use parking_lot::Mutex;
use tokio::time::Instant;

/// Capacity of the bucket: the requests of one engine that stops.
const BURST: f64 = 64.0;
/// Redispatches per second that are always allowed: with little traffic, the share alone would allow too few trials of a broken
/// engine.
const MIN_RATE_PER_SECOND: f64 = 1.0;

/// A token bucket: every request adds a share of a token, and every redispatch removes one token.
#[derive(Debug)]
pub(crate) struct RedispatchBudget {
    share: f64,
    bucket: Mutex<RedispatchBucket>,
}

#[derive(Debug)]
struct RedispatchBucket {
    tokens: f64,
    filled_at: Instant,
}

impl RedispatchBudget {
    /// A full bucket to which each request adds `share` tokens. With a share of 0, redispatching is off.
    pub(crate) fn new(share: f64) -> Self {
        let tokens = if share > 0.0 { BURST } else { 0.0 };
        Self { share, bucket: Mutex::new(RedispatchBucket { tokens, filled_at: Instant::now() }) }
    }

    /// A client's request has arrived.
    pub(crate) fn deposit(&self) {
        let mut bucket = self.bucket.lock();
        bucket.tokens = (bucket.tokens + self.share).min(BURST);
    }

    /// Takes the token for one redispatch. Returns whether there was one.
    pub(super) fn withdraw(&self, now: Instant) -> bool {
        let mut bucket = self.bucket.lock();
        if self.share > 0.0 {
            let passed = now.saturating_duration_since(bucket.filled_at).as_secs_f64();
            bucket.tokens = (bucket.tokens + passed * MIN_RATE_PER_SECOND).min(BURST);
            bucket.filled_at = bucket.filled_at.max(now);
        }
        let available = bucket.tokens >= 1.0;
        if available {
            bucket.tokens -= 1.0;
        }
        available
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn redispatches_are_a_share_of_requests_plus_a_burst() {
        let budget = RedispatchBudget::new(0.25);
        let now = Instant::now();
        let spend = || (0..1000).take_while(|_| budget.withdraw(now)).count();
        assert_eq!(spend(), 64);
        (0..40).for_each(|_| budget.deposit());
        assert_eq!(spend(), 10);
        assert!(budget.withdraw(now + Duration::from_secs(1)), "one a second is always allowed");
        assert!(!budget.withdraw(now + Duration::from_secs(1)));
        (0..1000).for_each(|_| budget.deposit());
        assert_eq!(spend(), 64, "the bucket holds at most a burst");
    }

    #[tokio::test(start_paused = true)]
    async fn a_share_of_zero_turns_redispatching_off() {
        let budget = RedispatchBudget::new(0.0);
        budget.deposit();
        assert!(!budget.withdraw(Instant::now() + Duration::from_secs(100)));
    }
}
