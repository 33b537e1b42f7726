//! Requests that this gateway rejects for lack of its own resources, and their usage.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use moongate_runtime::metrics::MetricsRegistry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use crate::memory::MemoryBudget;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OverloadLabels {
    reason: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OverloadReason {
    /// Memory for the bodies of all requests.
    BodyMemory,
    ClientConnections,
    /// Connections to engines, limited by the open-file limit.
    EngineConnections,
}

impl OverloadReason {
    const ALL: [Self; 3] = [Self::BodyMemory, Self::ClientConnections, Self::EngineConnections];

    fn as_str(self) -> &'static str {
        match self {
            Self::BodyMemory => "body_memory",
            Self::ClientConnections => "client_connections",
            Self::EngineConnections => "engine_connections",
        }
    }
}

/// Rejections caused by the gateway's own limits.
#[derive(Debug)]
pub(crate) struct OverloadMetrics {
    rejected: Family<OverloadLabels, Counter>,
    body_bytes: Gauge,
    prompt_bytes: Gauge,
    /// Incremented by the listener.
    connections: Arc<AtomicU64>,
}

impl OverloadMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        let metrics = Self {
            rejected: registry.register(
                "moongate_overload_rejections_total",
                "Requests and connections rejected (503) for lack of this gateway's resources: `body_memory` (`--body-memory`), `client_connections` (`--max-connections`, or the limit of open files) or `engine_connections` (the limit of open files)",
                Family::default(),
            ),
            body_bytes: registry.register(
                "moongate_body_memory_bytes",
                "Memory reserved for request bodies, at most `--body-memory`",
                Gauge::default(),
            ),
            prompt_bytes: registry.register(
                "moongate_prompt_memory_bytes",
                "Memory reserved for tokenizing long prompts, at most two thirds of `--prompt-memory`",
                Gauge::default(),
            ),
            connections: Arc::default(),
        };
        // Prometheus cannot compute an increase from a missing sample.
        for reason in OverloadReason::ALL {
            metrics.rejected.get_or_create(&OverloadLabels { reason: reason.as_str() }).inc_by(0);
        }
        metrics
    }

    pub(crate) fn record_rejected(&self, reason: OverloadReason) {
        self.rejected.get_or_create(&OverloadLabels { reason: reason.as_str() }).inc();
    }

    /// Counter of connections that the listener rejects.
    pub(crate) fn rejected_connections(&self) -> Arc<AtomicU64> {
        self.connections.clone()
    }

    /// Collects counts of other components before a scrape.
    pub(crate) fn update(&self, [bodies, unfinished]: [&MemoryBudget; 2], prompts: &MemoryBudget) {
        let gauge = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        self.body_bytes.set(gauge(bodies.used()));
        self.prompt_bytes.set(gauge(prompts.used()));
        for (reason, count) in [
            (OverloadReason::BodyMemory, bodies.take_rejected() + unfinished.take_rejected()),
            (OverloadReason::ClientConnections, self.connections.swap(0, Ordering::Relaxed)),
        ] {
            self.rejected.get_or_create(&OverloadLabels { reason: reason.as_str() }).inc_by(count);
        }
    }
}
