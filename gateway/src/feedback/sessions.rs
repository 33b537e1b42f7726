//! Metrics of sessions and stored responses.

use moongate_runtime::metrics::MetricsRegistry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SessionLabels {
    request: &'static str,
}

/// Metrics of sessions.
#[derive(Debug, Clone)]
pub(crate) struct SessionMetrics {
    requests: Family<SessionLabels, Counter>,
}

impl SessionMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        let metrics = Self {
            requests: registry.register(
                "moongate_session_requests_total",
                "Requests that name a session: its first, a later one, or a later one without a prediction, which is assumed to find the session's last prompt in the engine that computed it",
                Family::default(),
            ),
        };
        for request in ["first", "later", "assumed"] {
            drop(metrics.requests.get_or_create(&SessionLabels { request }));
        }
        metrics
    }

    /// Counts a request of a session. `returned`: it is not the session's first; `predicted`: its prompt's cache hits are predicted.
    pub(crate) fn record(&self, returned: bool, predicted: bool) {
        let request = match (returned, predicted) {
            (false, _) => "first",
            (true, true) => "later",
            (true, false) => "assumed",
        };
        self.requests.get_or_create(&SessionLabels { request }).inc();
    }
}
