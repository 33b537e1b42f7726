//! Source of time and randomness.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Monotonic Unix time in milliseconds: the wall clock is read once, then a monotonic clock counts.
#[derive(Clone, Copy, Debug)]
pub struct MonotonicUnixClock {
    started: Instant,
    started_ms: u64,
}

impl MonotonicUnixClock {
    /// Starts at the current wall-clock time.
    pub fn start() -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let started_ms = u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX / 2);
        Self { started: Instant::now(), started_ms }
    }

    /// The current time in milliseconds since 1970.
    pub fn now_ms(&self) -> u64 {
        self.at_ms(Instant::now())
    }

    /// The time at an instant, in milliseconds since 1970.
    pub fn at_ms(&self, instant: Instant) -> u64 {
        let elapsed = instant.saturating_duration_since(self.started).as_millis();
        self.started_ms.saturating_add(u64::try_from(elapsed).unwrap_or(u64::MAX))
    }
}

/// An unpredictable number, for identifiers.
pub(crate) fn entropy() -> u64 {
    fastrand::u64(..)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn time_continues_from_the_wall_clock() {
        let clock = MonotonicUnixClock::start();
        assert!(clock.now_ms() > 1_700_000_000_000);
        let later = clock.started + Duration::from_millis(1500);
        assert_eq!(clock.at_ms(later) - clock.started_ms, 1500);
        assert_eq!(clock.at_ms(clock.started), clock.started_ms);
    }
}
