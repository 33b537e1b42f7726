//! Metrics of files and batches, written at each scrape.

use moongate_batch::{BatchStats, LineOutcome};
use moongate_runtime::metrics::MetricsRegistry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BatchLabels {
    status: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LineLabels {
    outcome: &'static str,
}

/// Counts of batches and of their lines.
#[derive(Debug)]
pub(crate) struct BatchMetrics {
    batches: Family<BatchLabels, Gauge>,
    lines: Family<LineLabels, Counter>,
    stored_bytes: Gauge,
    damaged: Gauge,
}

impl BatchMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        let metrics = Self {
            batches: registry.register(
                "moongate_batches",
                "Batches by `status`, as in the API. Ended ones count until they are removed",
                Family::default(),
            ),
            lines: registry.register(
                "moongate_batch_lines_total",
                "Lines of batches by `outcome`: `completed` (with a successful response), `failed`, `retried` (an attempt was rejected or failed, and the line runs again) or `expired` (its batch expired before)",
                Family::default(),
            ),
            stored_bytes: registry.register(
                "moongate_batch_stored_bytes",
                "Size of all files of the files API, at most `--batch-max-stored-bytes` without the outputs of batches",
                Gauge::default(),
            ),
            damaged: registry.register(
                "moongate_batch_damaged",
                "Files and batches whose stored state is damaged; the log names them",
                Gauge::default(),
            ),
        };
        metrics.update(&BatchStats::default());
        metrics
    }

    pub(crate) fn update(&self, stats: &BatchStats) {
        let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        for (status, count) in &stats.batches {
            let labels = BatchLabels { status: status.as_str() };
            self.batches.get_or_create(&labels).set(number(*count as u64));
        }
        for (outcome, count) in stats.lines {
            self.set_lines(outcome, count);
        }
        self.stored_bytes.set(number(stats.stored_bytes));
        self.damaged.set(number(stats.damaged as u64));
    }

    fn set_lines(&self, outcome: LineOutcome, count: u64) {
        let counter = self.lines.get_or_create(&LineLabels { outcome: outcome.as_str() });
        counter.inner().fetch_max(count, std::sync::atomic::Ordering::Relaxed);
    }
}
