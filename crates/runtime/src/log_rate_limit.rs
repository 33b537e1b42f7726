//! Limits how often a lasting condition, such as overload, is logged.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Minimum time between two lines about the same condition.
const INTERVAL: Duration = Duration::from_secs(10);

/// Log rate limit of one condition: at most one line every ten seconds. Count occurrences with a metric.
#[derive(Debug, Default)]
pub struct LogRateLimiter(Mutex<Option<Instant>>);

impl LogRateLimiter {
    /// Creates a limiter whose first line is due at once.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Whether to log now; if so, starts the next interval.
    pub fn is_due(&self) -> bool {
        let mut logged = self.0.lock();
        let is_due = logged.is_none_or(|logged| logged.elapsed() >= INTERVAL);
        if is_due {
            *logged = Some(Instant::now());
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_condition_is_logged_once_per_interval() {
        let overload = LogRateLimiter::new();
        assert!(overload.is_due());
        assert!(!overload.is_due());
        *overload.0.lock() = Instant::now().checked_sub(INTERVAL);
        assert!(overload.is_due());
        assert!(!overload.is_due());
    }
}
