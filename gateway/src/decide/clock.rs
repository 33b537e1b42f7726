//! The scheduler's clock.

use std::time::{SystemTime, UNIX_EPOCH};

use tokio::time::{Duration, Instant};

/// Counts the scheduler's seconds, which are those of the engines: simulated ones may run faster than wall-clock time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SchedulerClock {
    start: Instant,
    /// `start` in the scheduler's seconds: Unix time, so that priorities written by several gateways are comparable.
    started_at: f64,
    /// Scheduler seconds per wall-clock second.
    scale: f64,
}

impl SchedulerClock {
    /// Starts at the current time. `scale` is above 0.
    pub(crate) fn start(scale: f64) -> Self {
        let started_at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        Self { start: Instant::now(), started_at, scale }
    }

    /// An instant in the scheduler's seconds.
    pub(super) fn seconds_at(&self, instant: Instant) -> f64 {
        self.started_at + instant.duration_since(self.start).as_secs_f64() * self.scale
    }

    /// Converts scheduler seconds to a wall-clock duration; 0 for negative or non-finite values.
    pub(super) fn to_wall_time(self, seconds: f64) -> Duration {
        Duration::try_from_secs_f64(seconds / self.scale).unwrap_or_default()
    }

    /// Converts a wall-clock duration to the scheduler's seconds.
    pub(super) fn to_scheduler_time(self, duration: Duration) -> f64 {
        duration.as_secs_f64() * self.scale
    }

    /// Converts a scheduler time to an instant; `None` if it is never reached.
    pub(super) fn instant_at(&self, time: f64) -> Option<Instant> {
        let after = Duration::try_from_secs_f64((time - self.started_at).max(0.0) / self.scale).ok()?;
        self.start.checked_add(after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_wake_up_instant_matches_the_clock() {
        let clock = SchedulerClock::start(20.0);
        let time = clock.seconds_at(Instant::now()) + 3.0;
        tokio::time::sleep_until(clock.instant_at(time).unwrap()).await;
        let now = clock.seconds_at(Instant::now());
        assert!((now - time).abs() < 0.05, "{now}");
        assert_eq!(clock.instant_at(f64::INFINITY), None);
    }
}
