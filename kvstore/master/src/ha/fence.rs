//! Until when this master may serve.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The time since the machine was started, including time in which it slept: a leader that sleeps grows old.
pub fn now() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

/// A moment after which nobody may be answered any more. It moves with every renewal of the leader's lease.
#[derive(Debug, Default)]
pub struct LeaseFence {
    /// Microseconds, on the clock of [`now`].
    until: AtomicU64,
}

impl LeaseFence {
    /// Callers may be answered until then.
    pub fn extend(&self, until: Duration) {
        self.until.store(until.as_micros().try_into().unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// Nobody may be answered.
    pub fn revoke(&self) {
        self.until.store(0, Ordering::SeqCst);
    }

    /// Whether callers may be answered at this time.
    pub fn is_open(&self, now: Duration) -> bool {
        now.as_micros() < u128::from(self.until.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_falls_by_itself() {
        let fence = LeaseFence::default();
        assert!(!fence.is_open(now()));
        let until = now() + Duration::from_secs(3600);
        fence.extend(until);
        assert!(fence.is_open(now()) && !fence.is_open(until));
        fence.revoke();
        assert!(!fence.is_open(now()));
    }
}
