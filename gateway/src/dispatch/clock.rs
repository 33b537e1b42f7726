//! The scheduler's time.

use std::time::{SystemTime, UNIX_EPOCH};

use tokio::time::{Duration, Instant};

/// Counts the scheduler's seconds, which are those of the engines: simulated ones may live faster.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SchedulerClock {
    start: Instant,
    /// `start` in the scheduler's seconds: Unix time, so that priorities that several gateways write compare.
    started_at: f64,
    /// Seconds of the scheduler in one of ours.
    scale: f64,
}

impl SchedulerClock {
    /// Starts at the time of now. `scale` is above 0.
    pub(crate) fn start(scale: f64) -> Self {
        let started_at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        Self { start: Instant::now(), started_at, scale }
    }

    /// The time in the scheduler's seconds.
    pub(super) fn now(&self) -> f64 {
        self.started_at + self.start.elapsed().as_secs_f64() * self.scale
    }

    /// How long so many of the scheduler's seconds take; 0 for times that cannot be.
    pub(super) fn to_wall_time(self, seconds: f64) -> Duration {
        Duration::try_from_secs_f64(seconds / self.scale).unwrap_or_default()
    }

    /// When it will be `at`, in the scheduler's seconds; `None` for times that never come.
    pub(super) fn instant_at(&self, at: f64) -> Option<Instant> {
        let after = Duration::try_from_secs_f64((at - self.started_at).max(0.0) / self.scale).ok()?;
        self.start.checked_add(after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_wake_up_instant_matches_the_clock() {
        let clock = SchedulerClock::start(20.0);
        let at = clock.now() + 3.0;
        tokio::time::sleep_until(clock.instant_at(at).unwrap()).await;
        assert!((clock.now() - at).abs() < 0.05, "{}", clock.now());
        assert_eq!(clock.instant_at(f64::INFINITY), None);
    }
}
