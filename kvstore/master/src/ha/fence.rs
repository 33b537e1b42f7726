//! The time limit up to which a leader may reply to clients.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Time since boot, including suspend: a lease also expires while the machine sleeps.
pub fn now() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

/// Deadline after which this master must not reply to clients. Every renewal of the leader's lease moves it.
#[derive(Debug, Default)]
pub struct LeaseFence {
    /// Microseconds, on the clock of [`now`].
    until: AtomicU64,
}

impl LeaseFence {
    /// Allows replies until this time.
    pub fn extend(&self, until: Duration) {
        self.until.store(until.as_micros().try_into().unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// Forbids replies from now on.
    pub fn revoke(&self) {
        self.until.store(0, Ordering::SeqCst);
    }

    /// Whether replies are allowed at this time.
    pub fn is_open(&self, now: Duration) -> bool {
        now.as_micros() < u128::from(self.until.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_stop_at_the_deadline() {
        let fence = LeaseFence::default();
        assert!(!fence.is_open(now()));
        let until = now() + Duration::from_secs(3600);
        fence.extend(until);
        assert!(fence.is_open(now()) && !fence.is_open(until));
        fence.revoke();
        assert!(!fence.is_open(now()));
    }
}
