//! The time model, and the pace of decoding.

use std::time::Duration;

use tokio::time::Instant;

use super::config::EngineTimeModel;

/// Shorter sleeps would overshoot by more than their duration: the timer has millisecond resolution.
const MIN_SLEEP: Duration = Duration::from_micros(500);

/// A time model on a clock that runs `scale` times faster.
#[derive(Debug, Clone)]
pub(crate) struct ScaledTiming {
    pub(super) model: EngineTimeModel,
    scale: f64,
}

impl ScaledTiming {
    pub(crate) fn new(model: EngineTimeModel, scale: f64) -> Self {
        Self { model, scale }
    }

    /// The same model, slower by `factor`.
    pub(crate) fn slowed(&self, factor: f64) -> Self {
        let factor = if factor.is_finite() && factor > 0.0 { factor } else { 1.0 };
        Self { model: self.model.clone(), scale: self.scale / factor }
    }

    /// Converts seconds of the imitated engine to a real duration.
    pub(crate) fn scaled(&self, seconds: f64) -> Duration {
        Duration::try_from_secs_f64(seconds.max(0.0) / self.scale).unwrap_or(Duration::MAX)
    }

    /// Seconds to compute a part of a prompt, without the constant part.
    pub(super) fn prefill_s(&self, new: usize, context: usize) -> f64 {
        self.model.prefill_compute_s(new, context)
    }

    /// Duration of transferring a prompt's KV cache from prefill to decode.
    pub(crate) fn transfer(&self, tokens: usize) -> Duration {
        self.scaled(self.model.transfer_s(tokens))
    }

    /// Duration of reading this many tokens from the shared store.
    pub(crate) fn storage_fetch(&self, tokens: usize) -> Duration {
        self.scaled(self.model.storage_fetch_s(tokens))
    }

    /// Duration of one decode step of this many sequences, which hold this many tokens.
    pub(crate) fn decode_step(&self, sequences: u64, tokens: u64) -> Duration {
        self.scaled(self.model.decode_step_s(sequences, tokens))
    }
}

/// Sleeps so that a sequence of waits takes their sum, despite a coarse timer.
#[derive(Debug)]
pub(crate) struct Pacer {
    due: Instant,
}

impl Pacer {
    pub(crate) fn start() -> Self {
        Self { due: Instant::now() }
    }

    pub(crate) async fn wait(&mut self, duration: Duration) {
        let now = Instant::now();
        // Lost time is caught up, at most one second; an idle phase is not.
        self.due = self.due.max(now.checked_sub(Duration::from_secs(1)).unwrap_or(now));
        self.due = self.due.checked_add(duration).unwrap_or(self.due);
        if self.due.saturating_duration_since(now) >= MIN_SLEEP {
            tokio::time::sleep_until(self.due).await;
        }
    }
}

/// Sleeps unless the duration is below the timer's resolution.
pub(crate) async fn sleep_if_measurable(duration: Duration) {
    if duration >= MIN_SLEEP {
        tokio::time::sleep(duration).await;
    }
}
