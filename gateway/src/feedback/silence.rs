//! Metrics of silent engines and redispatches.

use moongate_runtime::metrics::MetricsRegistry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use crate::fleet::SuspicionReason;
use crate::upstream::LegKind;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SuspicionLabels {
    side: &'static str,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RedispatchLabels {
    reason: &'static str,
}

/// Why a request was redispatched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RedispatchReason {
    /// Its engine was silent beyond the request's own limit.
    Silent,
    /// Other requests had made its engine suspect.
    Suspect,
}

impl RedispatchReason {
    const ALL: [Self; 2] = [Self::Silent, Self::Suspect];

    fn as_str(self) -> &'static str {
        match self {
            RedispatchReason::Silent => "silent",
            RedispatchReason::Suspect => "suspect",
        }
    }
}

/// Counters of suspicions and redispatches.
#[derive(Debug)]
pub(crate) struct SilenceMetrics {
    suspicions: Family<SuspicionLabels, Counter>,
    redispatches: Family<RedispatchLabels, Counter>,
    budget_exhausted: Counter,
}

impl SilenceMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        let metrics = Self {
            suspicions: registry.register(
                "moongate_engine_suspicions_total",
                "Times that an engine became suspect because it accepted requests without output. `reason` is `silent` (a request waited for its first byte for longer than its limit), `abandoned` (several clients left without a byte) or `stalled` (a stream paused after its start)",
                Family::default(),
            ),
            redispatches: registry.register(
                "moongate_redispatches_total",
                "Requests without a byte that were redispatched from a silent engine. `reason` is `silent` (beyond the request's own limit) or `suspect` (other requests had made the engine suspect)",
                Family::default(),
            ),
            budget_exhausted: registry.register(
                "moongate_redispatch_budget_exhausted_total",
                "Attempts that stayed on a silent engine because of `--redispatch-share`",
                Counter::default(),
            ),
        };
        for side in LegKind::ALL.map(LegKind::as_str) {
            for reason in SuspicionReason::ALL.map(SuspicionReason::as_str) {
                metrics.suspicions.get_or_create(&SuspicionLabels { side, reason }).inc_by(0);
            }
        }
        for reason in RedispatchReason::ALL.map(RedispatchReason::as_str) {
            metrics.redispatches.get_or_create(&RedispatchLabels { reason }).inc_by(0);
        }
        metrics
    }

    pub(crate) fn record_suspicion(&self, side: LegKind, reason: SuspicionReason) {
        let labels = SuspicionLabels { side: side.as_str(), reason: reason.as_str() };
        self.suspicions.get_or_create(&labels).inc();
    }

    pub(crate) fn record_redispatch(&self, reason: RedispatchReason) {
        self.redispatches.get_or_create(&RedispatchLabels { reason: reason.as_str() }).inc();
    }

    pub(crate) fn budget_exhausted(&self) {
        self.budget_exhausted.inc();
    }
}
