//! Settings, and what runs now: progress of running batches, and counters.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::batch::{BatchStatus, RequestCounts};

/// Settings of the batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchOptions {
    /// Most lines that run at the same time, of all batches.
    pub concurrency: usize,
    /// Lines start while the fleet's load is below this, as a fraction of its capacity.
    pub max_load: f64,
    /// Largest file that is accepted.
    pub max_file_bytes: u64,
    /// Most bytes of all files together, beyond which uploads are rejected.
    pub max_stored_bytes: u64,
    /// Longest line of an input.
    pub max_line_bytes: usize,
    /// Time within which a batch ends.
    pub window: Duration,
    /// How long ended batches are listed.
    pub retention: Duration,
}

/// Figures for metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchStats {
    pub batches: BTreeMap<BatchStatus, usize>,
    /// Lines since the start by outcome.
    pub lines: [(LineOutcome, u64); 4],
    pub stored_bytes: u64,
    /// Files and batches whose stored state is damaged.
    pub damaged: usize,
}

impl Default for BatchStats {
    /// Without any files, batches and lines.
    fn default() -> Self {
        Self {
            batches: BatchStatus::ALL.map(|status| (status, 0)).into(),
            lines: LineOutcome::ALL.map(|outcome| (outcome, 0)),
            stored_bytes: 0,
            damaged: 0,
        }
    }
}

/// How a line, or an attempt of it, ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineOutcome {
    /// With a successful response.
    Completed,
    /// With an error, or none of its attempts succeeded.
    Failed,
    /// An attempt was rejected, and the line runs again.
    Retried,
    /// Its batch expired before.
    Expired,
}

impl LineOutcome {
    pub(crate) const ALL: [Self; 4] = [Self::Completed, Self::Failed, Self::Retried, Self::Expired];

    /// Label in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Retried => "retried",
            Self::Expired => "expired",
        }
    }
}

#[derive(Debug)]
struct ActiveBatch {
    interrupted: CancellationToken,
    counts: RequestCounts,
}

/// Progress of batches that run now, and lines since the start.
#[derive(Debug, Default)]
pub(crate) struct RunProgress {
    active: Mutex<HashMap<String, ActiveBatch>>,
    outcomes: [AtomicU64; 4],
}

impl RunProgress {
    /// A batch begins to run its lines; the token is cancelled when they must stop.
    pub(crate) fn start(&self, batch: &str, counts: RequestCounts) -> CancellationToken {
        let interrupted = CancellationToken::new();
        self.active.lock().insert(batch.to_owned(), ActiveBatch { interrupted: interrupted.clone(), counts });
        interrupted
    }

    pub(crate) fn record(&self, batch: &str, counts: RequestCounts) {
        if let Some(active) = self.active.lock().get_mut(batch) {
            active.counts = counts;
        }
    }

    pub(crate) fn end(&self, batch: &str) {
        self.active.lock().remove(batch);
    }

    /// Stops the lines of a batch, if it runs any.
    pub(crate) fn interrupt(&self, batch: &str) {
        if let Some(active) = self.active.lock().get(batch) {
            active.interrupted.cancel();
        }
    }

    /// Counts of a batch that runs its lines now.
    pub(crate) fn counts(&self, batch: &str) -> Option<RequestCounts> {
        self.active.lock().get(batch).map(|active| active.counts)
    }

    pub(crate) fn count(&self, outcome: LineOutcome, lines: u64) {
        self.outcomes[outcome as usize].fetch_add(lines, Ordering::Relaxed);
    }

    pub(crate) fn outcomes(&self) -> [(LineOutcome, u64); 4] {
        LineOutcome::ALL.map(|outcome| (outcome, self.outcomes[outcome as usize].load(Ordering::Relaxed)))
    }
}
