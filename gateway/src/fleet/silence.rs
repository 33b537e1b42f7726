//! Detects a grey engine: one that accepts requests and passes health checks but produces no output.
//!
//! Output for any request on the engine is progress, so an engine that is only slow or has a long queue is never silent. A suspect
//! engine gets no new requests while there is an alternative, except one trial request after each pause. Progress ends the
//! suspicion.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use moongate_runtime::BackoffPolicy;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::availability::AvailabilityEvents;

/// Consecutive clients that leave without a byte until an engine becomes suspect.
const MIN_ABANDONED_REQUESTS: u32 = 3;
/// A silent request counts as abandoned, or leaves a suspect engine, after its limit divided by this.
const SUSPECT_LIMIT_DIVISOR: u32 = 4;
/// Progress is recorded at this resolution, so that the chunks of many streams do not all write to one cache line.
const PROGRESS_RESOLUTION_MS: u64 = 16;

/// When an engine counts as silent, and the pauses that follow.
#[derive(Debug, Clone)]
pub(crate) struct SilenceLimits {
    /// Silence limit as a multiple of the expected time to first token.
    pub(crate) factor: f64,
    /// Shortest silence that makes an engine suspect. Zero turns the detection off.
    pub(crate) floor: Duration,
    /// Pause of a stream after which it ends if its engine also fails a health check. Zero turns this off.
    pub(crate) stall: Duration,
    /// Times to the first trial request, and between further ones.
    pub(crate) trial_pauses: BackoffPolicy,
    /// Notified when an engine becomes suspect.
    pub(crate) suspected: Arc<Notify>,
}

impl SilenceLimits {
    /// Silence limit of an engine whose output is expected after `expected`.
    pub(crate) fn limit(&self, expected: Duration) -> Option<Duration> {
        let scaled =
            Duration::try_from_secs_f64(expected.as_secs_f64() * self.factor).unwrap_or(Duration::MAX);
        (!self.floor.is_zero()).then(|| scaled.max(self.floor))
    }
}

/// Why an engine became suspect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SuspicionReason {
    /// A request waited for its first byte for longer than its limit.
    Silent,
    /// Several clients left without having received a byte.
    Abandoned,
    /// A stream paused after its start.
    Stalled,
}

impl SuspicionReason {
    pub(crate) const ALL: [Self; 3] = [Self::Silent, Self::Abandoned, Self::Stalled];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            SuspicionReason::Silent => "silent",
            SuspicionReason::Abandoned => "abandoned",
            SuspicionReason::Stalled => "stalled",
        }
    }
}

/// Progress of one engine, and whether it is suspect.
#[derive(Debug)]
pub(crate) struct SilenceMonitor {
    limits: SilenceLimits,
    availability: Arc<AvailabilityEvents>,
    start: Instant,
    /// Milliseconds after `start` of the latest output for any request.
    progress_ms: AtomicU64,
    /// Milliseconds after `start` until which silence is expected, because long prompts were sent.
    expected_silence_until_ms: AtomicU64,
    /// Requests whose clients left without a byte since the latest progress.
    abandoned: AtomicU32,
    suspect: AtomicBool,
    /// Whether its health was checked since it became suspect, and whether the latest such check failed.
    health_checked: AtomicBool,
    unresponsive: AtomicBool,
    /// Trial requests since it became suspect.
    trials: AtomicU32,
    next_trial_ms: AtomicU64,
}

impl SilenceMonitor {
    pub(crate) fn new(limits: SilenceLimits, availability: Arc<AvailabilityEvents>) -> Self {
        Self {
            limits,
            availability,
            start: Instant::now(),
            progress_ms: AtomicU64::new(0),
            expected_silence_until_ms: AtomicU64::new(0),
            abandoned: AtomicU32::new(0),
            suspect: AtomicBool::new(false),
            health_checked: AtomicBool::new(false),
            unresponsive: AtomicBool::new(false),
            trials: AtomicU32::new(0),
            next_trial_ms: AtomicU64::new(0),
        }
    }

    pub(crate) fn limits(&self) -> &SilenceLimits {
        &self.limits
    }

    pub(crate) fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Relaxed)
    }

    /// Suspect, and its latest health check since then failed.
    pub(crate) fn is_unresponsive(&self) -> bool {
        self.is_suspect() && self.unresponsive.load(Ordering::Relaxed)
    }

    /// Records the outcome of a health check of a suspect engine.
    pub(crate) fn record_health_check(&self, passed: bool) {
        self.health_checked.store(true, Ordering::Relaxed);
        self.unresponsive.store(!passed, Ordering::Relaxed);
    }

    /// Whether its health was checked since it became suspect.
    pub(crate) fn was_health_checked(&self) -> bool {
        self.health_checked.load(Ordering::Relaxed)
    }

    /// Records output at `at`. Returns whether it ended a suspicion.
    pub(crate) fn record_progress(&self, at: Instant) -> bool {
        let at = self.ms(at);
        let suspect = self.is_suspect();
        if suspect || at >= self.progress_ms.load(Ordering::Relaxed) + PROGRESS_RESOLUTION_MS {
            self.progress_ms.fetch_max(at, Ordering::Relaxed);
            self.abandoned.store(0, Ordering::Relaxed);
        }
        suspect && self.suspect.swap(false, Ordering::Relaxed)
    }

    /// A request was sent whose silence is normal for `limit`.
    pub(crate) fn expect_silence_until(&self, now: Instant, limit: Duration) {
        self.expected_silence_until_ms
            .fetch_max(self.ms(now).saturating_add(millis(limit)), Ordering::Relaxed);
    }

    /// How long no request has produced output, counted from `since` at the earliest.
    pub(crate) fn silence(&self, now: Instant, since: Instant) -> Duration {
        let from = self.ms(since).max(self.progress_ms.load(Ordering::Relaxed));
        Duration::from_millis(self.ms(now).saturating_sub(from))
    }

    /// Whether a request that was sent at `since` and waits for its first byte should leave the engine because other requests have
    /// made it suspect.
    pub(crate) fn should_redispatch(&self, now: Instant, since: Instant, limit: Option<Duration>) -> bool {
        match limit {
            Some(limit) => self.is_suspect() && self.silence(now, since) >= limit / SUSPECT_LIMIT_DIVISOR,
            None => self.is_unresponsive(),
        }
    }

    /// Whether a stream whose last byte arrived at `since` is on an engine that is silent without an expected reason.
    pub(crate) fn is_stalled(&self, now: Instant, since: Instant) -> bool {
        let limit = self.limits.stall;
        !limit.is_zero()
            && self.silence(now, since) >= limit / 2
            && self.ms(now) >= self.expected_silence_until_ms.load(Ordering::Relaxed)
    }

    /// A client has left that had waited since `since` without a byte. Returns whether this made the engine suspect.
    pub(crate) fn record_abandoned(&self, now: Instant, since: Instant, limit: Duration) -> bool {
        if self.silence(now, since) < limit / SUSPECT_LIMIT_DIVISOR {
            return false;
        }
        let abandoned = self.abandoned.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        abandoned >= MIN_ABANDONED_REQUESTS && self.mark_suspect(now)
    }

    /// Makes the engine suspect. Returns whether it was not suspect before.
    pub(crate) fn mark_suspect(&self, now: Instant) -> bool {
        if self.is_suspect() {
            return false;
        }
        self.trials.store(0, Ordering::Relaxed);
        self.health_checked.store(false, Ordering::Relaxed);
        self.unresponsive.store(false, Ordering::Relaxed);
        self.next_trial_ms.store(self.ms(now) + millis(self.limits.trial_pauses.initial), Ordering::Relaxed);
        let new = !self.suspect.swap(true, Ordering::Relaxed);
        if new {
            self.availability.record();
            self.limits.suspected.notify_one();
        }
        new
    }

    /// Whether a suspect engine may get a trial request.
    pub(crate) fn is_trial_due(&self, now: Instant) -> bool {
        self.is_suspect() && self.ms(now) >= self.next_trial_ms.load(Ordering::Relaxed)
    }

    /// A request was sent to the engine. If the engine is suspect, it is a trial, and the pause before the next trial doubles.
    pub(crate) fn record_sent(&self, now: Instant) {
        if self.is_suspect() {
            let trials = self.trials.fetch_add(1, Ordering::Relaxed).saturating_add(1);
            let pause = self.limits.trial_pauses.pause(trials.saturating_add(1));
            self.next_trial_ms.store(self.ms(now) + millis(pause), Ordering::Relaxed);
        }
    }

    fn ms(&self, at: Instant) -> u64 {
        millis(at.saturating_duration_since(self.start))
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOOR: Duration = Duration::from_secs(2);

    fn monitor() -> SilenceMonitor {
        let limits = SilenceLimits {
            factor: 4.0,
            floor: FLOOR,
            stall: Duration::from_secs(10),
            trial_pauses: BackoffPolicy { initial: Duration::from_secs(1), max: Duration::from_secs(4) },
            suspected: Arc::default(),
        };
        SilenceMonitor::new(limits, Arc::default())
    }

    async fn pass(seconds: f64) {
        tokio::time::advance(Duration::from_secs_f64(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_limit_scales_with_expected_time_above_a_floor() {
        let limits = monitor().limits;
        assert_eq!(limits.limit(Duration::from_millis(50)), Some(FLOOR));
        assert_eq!(limits.limit(Duration::from_secs(30)), Some(Duration::from_secs(120)));
        assert_eq!(limits.limit(Duration::MAX), Some(Duration::MAX));
        let off = SilenceLimits { floor: Duration::ZERO, ..limits };
        assert_eq!(off.limit(Duration::from_secs(30)), None);
    }

    #[tokio::test(start_paused = true)]
    async fn output_of_another_request_ends_the_silence() {
        let monitor = monitor();
        let sent = Instant::now();
        pass(1.9).await;
        assert!(!monitor.record_progress(Instant::now()));
        pass(1.0).await;
        assert_eq!(monitor.silence(Instant::now(), sent), Duration::from_secs(1));
        // Requests that were sent later have waited less.
        assert_eq!(monitor.silence(Instant::now(), Instant::now()), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_suspect_engine_gets_one_trial_after_each_growing_pause() {
        let monitor = monitor();
        assert!(!monitor.is_trial_due(Instant::now()), "it is not suspect");
        assert!(monitor.mark_suspect(Instant::now()) && !monitor.mark_suspect(Instant::now()));
        for pause in [1.0, 2.0, 4.0, 4.0] {
            pass(pause - 0.01).await;
            assert!(!monitor.is_trial_due(Instant::now()), "{pause}");
            pass(0.01).await;
            assert!(monitor.is_trial_due(Instant::now()), "{pause}");
            monitor.record_sent(Instant::now());
            assert!(!monitor.is_trial_due(Instant::now()), "one trial at a time");
        }
        assert!(monitor.record_progress(Instant::now()) && !monitor.is_suspect());
    }

    #[tokio::test(start_paused = true)]
    async fn early_disconnects_or_progress_are_not_silence() {
        let monitor = monitor();
        for _ in 0..10 {
            let sent = Instant::now();
            pass(0.4).await;
            assert!(!monitor.record_abandoned(Instant::now(), sent, FLOOR));
        }
        for _ in 0..10 {
            let sent = Instant::now();
            pass(0.6).await;
            assert!(!monitor.record_abandoned(Instant::now(), sent, FLOOR));
            monitor.record_progress(Instant::now());
        }
        let sent = Instant::now();
        pass(0.6).await;
        let suspected = [(); 3].map(|()| monitor.record_abandoned(Instant::now(), sent, FLOOR));
        assert_eq!(suspected, [false, false, true]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_stalls_unless_silence_is_expected() {
        let monitor = monitor();
        let last_data = Instant::now();
        monitor.expect_silence_until(Instant::now(), Duration::from_secs(8));
        pass(7.9).await;
        assert!(!monitor.is_stalled(Instant::now(), last_data));
        pass(0.1).await;
        assert!(monitor.is_stalled(Instant::now(), last_data));
        monitor.record_progress(Instant::now());
        assert!(!monitor.is_stalled(Instant::now(), last_data));
    }

    #[tokio::test(start_paused = true)]
    async fn requests_on_a_suspect_engine_are_redispatched_sooner() {
        let monitor = monitor();
        let sent = Instant::now();
        pass(0.6).await;
        assert!(!monitor.should_redispatch(Instant::now(), sent, Some(FLOOR)));
        monitor.mark_suspect(Instant::now());
        assert!(monitor.should_redispatch(Instant::now(), sent, Some(FLOOR)));
        assert!(
            !monitor.should_redispatch(Instant::now(), Instant::now(), Some(FLOOR)),
            "it has just been sent"
        );
        assert!(
            !monitor.should_redispatch(Instant::now(), sent, None),
            "a non-streamed response may take long"
        );
        monitor.record_health_check(false);
        assert!(monitor.should_redispatch(Instant::now(), sent, None));
    }
}
