//! Bounds how often a condition is logged that may last, such as overload.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Time between two lines about the same condition.
const INTERVAL: Duration = Duration::from_secs(10);

/// One condition that is logged at most every ten seconds. A metric counts every occurrence.
#[derive(Debug, Default)]
pub struct LogRateLimiter(Mutex<Option<Instant>>);

impl LogRateLimiter {
    /// A condition that was not logged yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Whether to log now. The interval to the next line begins if so.
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
