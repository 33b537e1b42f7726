//! Metrics of LoRA adapters that engines load at run time.

use std::time::Duration;

use moongate_runtime::metrics::MetricsRegistry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

use crate::lora_adapters::AdapterLoadError;

/// Seconds; from a small adapter in the page cache to a large one from a slow volume.
const LOAD_BUCKETS: [f64; 11] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AdapterLoadLabels {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AdapterReloadLabels {
    result: &'static str,
}

/// How a load has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AdapterLoadOutcome {
    Loaded,
    /// The engine already had it: another gateway or an administrator loaded it.
    AlreadyLoaded,
    Rejected,
    Timeout,
    /// There was no response.
    Failed,
}

impl AdapterLoadOutcome {
    const ALL: [Self; 5] = [Self::Loaded, Self::AlreadyLoaded, Self::Rejected, Self::Timeout, Self::Failed];

    pub(crate) fn of_error(error: &AdapterLoadError) -> Self {
        match error {
            AdapterLoadError::Rejected { .. } => Self::Rejected,
            AdapterLoadError::Timeout(_) => Self::Timeout,
            AdapterLoadError::Exchange(_) | AdapterLoadError::Interrupted => Self::Failed,
        }
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Loaded => "loaded",
            Self::AlreadyLoaded => "already_loaded",
            Self::Rejected => "rejected",
            Self::Timeout => "timeout",
            Self::Failed => "failed",
        }
    }
}

/// Counters of loads, and of reloads of the adapters' file.
#[derive(Debug, Clone)]
pub(crate) struct AdapterLoadMetrics {
    loads: Family<AdapterLoadLabels, Counter>,
    durations: Histogram,
    reloads: Family<AdapterReloadLabels, Counter>,
}

impl AdapterLoadMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        let metrics = Self {
            loads: registry.register(
                "moongate_lora_loads_total",
                "LoRA adapters that engines were requested to load. `outcome` is `loaded`, `already_loaded` (the engine had it), `rejected` (by the engine), `timeout` or `failed` (no response)",
                Family::default(),
            ),
            durations: registry.register(
                "moongate_lora_load_seconds",
                "Duration of loads with the outcome `loaded`",
                Histogram::new(LOAD_BUCKETS),
            ),
            reloads: registry.register(
                "moongate_lora_adapter_reloads_total",
                "Reloads of `--lora-adapter-file`. `result` is `ok` or `invalid` (the previous adapters stay)",
                Family::default(),
            ),
        };
        for outcome in AdapterLoadOutcome::ALL {
            metrics.loads.get_or_create(&AdapterLoadLabels { outcome: outcome.as_str() }).inc_by(0);
        }
        for result in ["ok", "invalid"] {
            metrics.reloads.get_or_create(&AdapterReloadLabels { result }).inc_by(0);
        }
        metrics
    }

    pub(crate) fn record_load(&self, outcome: AdapterLoadOutcome, took: Duration) {
        self.loads.get_or_create(&AdapterLoadLabels { outcome: outcome.as_str() }).inc();
        if outcome == AdapterLoadOutcome::Loaded {
            self.durations.observe(took.as_secs_f64());
        }
    }

    pub(crate) fn record_reload(&self, is_valid: bool) {
        let result = if is_valid { "ok" } else { "invalid" };
        self.reloads.get_or_create(&AdapterReloadLabels { result }).inc();
    }
}
