//! Metrics of the shared queue.

use moongate_runtime::metrics::MetricsRegistry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

/// What this gateway is in the shared queue, and what became of its requests.
#[derive(Debug, Clone)]
pub(crate) struct SharedQueueMetrics {
    follows: Gauge,
    followers: Gauge,
    requests: Family<OutcomeLabel, Counter>,
}

impl SharedQueueMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        let metrics = Self {
            follows: registry.register(
                "moongate_shared_queue_follows",
                "1 while another gateway decides this one's requests, otherwise 0",
                Gauge::default(),
            ),
            followers: registry.register(
                "moongate_shared_queue_followers",
                "Gateways for which this one decides",
                Gauge::default(),
            ),
            requests: registry.register(
                "moongate_shared_queue_requests_total",
                "Requests of a gateway with peers: decided by the leading gateway, or alone because the connection to it was lost or it had no route",
                Family::default(),
            ),
        };
        for outcome in ["decided_by_leader", "decided_alone"] {
            drop(metrics.requests.get_or_create(&OutcomeLabel { outcome }));
        }
        metrics
    }

    pub(crate) fn set_follows(&self, follows: bool) {
        self.follows.set(follows.into());
    }

    pub(crate) fn follower_connected(&self) {
        self.followers.inc();
    }

    pub(crate) fn follower_disconnected(&self) {
        self.followers.dec();
    }

    pub(crate) fn record_decided_by_leader(&self) {
        self.requests.get_or_create(&OutcomeLabel { outcome: "decided_by_leader" }).inc();
    }

    pub(crate) fn record_decided_alone(&self) {
        self.requests.get_or_create(&OutcomeLabel { outcome: "decided_alone" }).inc();
    }
}
