//! What a router counts.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use moongate_runtime::metrics::{MetricsRegistry, MetricsWriter};

/// Counters of all connections.
#[derive(Debug)]
pub(crate) struct RouterCounters {
    pub(crate) connections: AtomicU64,
    /// Calls of clients.
    pub(crate) calls: AtomicU64,
    /// Calls of clients that were rejected: unknown functions and arguments.
    pub(crate) rejected: AtomicU64,
    pub(crate) shards: Vec<ShardCounters>,
}

/// Counters of one shard.
#[derive(Debug, Default)]
pub(crate) struct ShardCounters {
    pub(crate) calls: AtomicU64,
    /// Calls without a response.
    pub(crate) failed: AtomicU64,
}

impl RouterCounters {
    pub(crate) fn new(shards: usize) -> Self {
        Self {
            connections: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            shards: (0..shards).map(|_| ShardCounters::default()).collect(),
        }
    }

    /// The counters in Prometheus' text format.
    pub(crate) fn text(self: &Arc<Self>) -> String {
        let mut registry = MetricsRegistry::default();
        let counters = Arc::clone(self);
        registry.collect(move |out| counters.write(out));
        registry.prometheus_text()
    }

    fn write(&self, out: &mut MetricsWriter<'_>) {
        let connections = self.connections.load(Relaxed);
        out.gauge("moongate_router_connections", "Open connections of clients", connections);
        out.counter("moongate_router_calls_total", "Calls of clients", self.calls.load(Relaxed));
        let rejected = self.rejected.load(Relaxed);
        out.counter(
            "moongate_router_rejected_calls_total",
            "Calls with an unknown function or arguments",
            rejected,
        );
        let by_shard = |count: fn(&ShardCounters) -> &AtomicU64| {
            let counts = self.shards.iter().enumerate();
            counts
                .map(|(shard, counters)| (shard.to_string(), count(counters).load(Relaxed)))
                .collect::<Vec<_>>()
        };
        out.counter_by(
            "moongate_router_shard_calls_total",
            "Calls of shards",
            "shard",
            by_shard(|it| &it.calls),
        );
        out.counter_by(
            "moongate_router_shard_failures_total",
            "Calls of shards without a response",
            "shard",
            by_shard(|it| &it.failed),
        );
    }
}
