//! What this gateway refuses because it is full itself, and how full it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::memory::MemoryBudget;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OverloadLabels {
    reason: &'static str,
}

/// What there was not enough of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OverloadReason {
    /// Memory for the bodies of all requests.
    BodyMemory,
    /// Connections from clients.
    ClientConnections,
    /// Connections to engines, which the limit of open files bounds.
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

/// Refusals because of the gateway's own limits.
#[derive(Debug, Default)]
pub(crate) struct OverloadMetrics {
    refused: Family<OverloadLabels, Counter>,
    body_bytes: Gauge,
    prompt_bytes: Gauge,
    /// Counted by the listener.
    connections: Arc<AtomicU64>,
}

impl OverloadMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Refused with 503 because this gateway is full: `body_memory` (`--body-memory`), `client_connections` (`--max-connections`, \
                    or the limit of open files) or `engine_connections` (the limit of open files)";
        registry.register("overload_refusals", help, metrics.refused.clone());
        for (name, help, gauge) in [
            ("body_memory", "Memory of request bodies, at most `--body-memory`", &metrics.body_bytes),
            (
                "prompt_memory",
                "Memory reserved to make tokens of long prompts, at most half of `--prompt-memory`",
                &metrics.prompt_bytes,
            ),
        ] {
            registry.register_with_unit(name, help, Unit::Bytes, gauge.clone());
        }
        // Prometheus sees no rise from nothing to one.
        for reason in OverloadReason::ALL {
            metrics.refused.get_or_create(&OverloadLabels { reason: reason.as_str() }).inc_by(0);
        }
        metrics
    }

    pub(crate) fn record_rejected(&self, reason: OverloadReason) {
        self.refused.get_or_create(&OverloadLabels { reason: reason.as_str() }).inc();
    }

    /// Where the listener counts the connections that it refuses.
    pub(crate) fn refused_connections(&self) -> Arc<AtomicU64> {
        self.connections.clone()
    }

    /// Reads what is counted elsewhere, before a scrape.
    pub(crate) fn update(&self, [bodies, unfinished]: [&MemoryBudget; 2], prompts: &MemoryBudget) {
        let gauge = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        self.body_bytes.set(gauge(bodies.used()));
        self.prompt_bytes.set(gauge(prompts.used()));
        for (reason, new) in [
            (OverloadReason::BodyMemory, bodies.take_refused() + unfinished.take_refused()),
            (OverloadReason::ClientConnections, self.connections.swap(0, Ordering::Relaxed)),
        ] {
            self.refused.get_or_create(&OverloadLabels { reason: reason.as_str() }).inc_by(new);
        }
    }
}
