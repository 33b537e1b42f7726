//! Metrics of failed, aborted and repeated legs.

use std::fmt::{self, Write as _};

use moongate_runtime::metrics::MetricsRegistry;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use crate::upstream::{LegError, LegKind};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LegFailureLabels {
    side: LegKindLabel,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct LegKindLabels {
    side: LegKindLabel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LegKindLabel(LegKind);

impl EncodeLabelValue for LegKindLabel {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        encoder.write_str(self.0.as_str())
    }
}

/// Counters of legs that did not complete.
#[derive(Debug)]
pub(crate) struct LegMetrics {
    failures: Family<LegFailureLabels, Counter>,
    aborts: Family<LegKindLabels, Counter>,
    mixed_versions: Counter,
    pub(super) retries: Family<LegKindLabels, Counter>,
}

impl LegMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        let metrics = Self {
            failures: registry.register(
                "moongate_leg_failures_total",
                "Legs that failed before the response started. `reason` is `connect`, `no_connection_left` (this gateway's limit of open files), `transport`, `closed`, `timeout`, `silent` (no output for longer than expected, see docs/protocols.md), `status_4xx`, `status_5xx`, `protocol_violation` (not the engine's protocol), `engine_error` (an error event in a stream) or `adapter_load` (the engine did not load the LoRA adapter)",
                Family::default(),
            ),
            aborts: registry.register(
                "moongate_leg_aborts_total",
                "Legs that the gateway aborted: the other leg failed, or the client left",
                Family::default(),
            ),
            mixed_versions: registry.register(
                "moongate_mixed_version_pairs_total",
                "Attempts whose prefill and decode report different versions, which may not be able to transfer KV caches (`--pair-versions`)",
                Counter::default(),
            ),
            retries: registry.register(
                "moongate_retries_total",
                "Attempts after the first, by the leg that had failed",
                Family::default(),
            ),
        };
        metrics.init_series();
        metrics
    }

    /// Creates all series at 0: Prometheus cannot compute an increase from a missing sample.
    fn init_series(&self) {
        for side in LegKind::ALL.map(LegKindLabel) {
            for reason in LegError::REASONS {
                self.failures.get_or_create(&LegFailureLabels { side, reason }).inc_by(0);
            }
            for family in [&self.aborts, &self.retries] {
                family.get_or_create(&LegKindLabels { side }).inc_by(0);
            }
        }
    }

    pub(crate) fn record_failure(&self, side: LegKind, error: &LegError) {
        let labels = LegFailureLabels { side: LegKindLabel(side), reason: error.reason() };
        self.failures.get_or_create(&labels).inc();
    }

    pub(crate) fn record_abort(&self, side: LegKind) {
        self.aborts.get_or_create(&LegKindLabels { side: LegKindLabel(side) }).inc();
    }

    pub(crate) fn record_mixed_versions(&self) {
        self.mixed_versions.inc();
    }

    pub(crate) fn record_retry(&self, side: LegKind) {
        self.retries.get_or_create(&LegKindLabels { side: LegKindLabel(side) }).inc();
    }
}
