//! Metrics of sessions and stored responses.

use moongate_runtime::metrics::MetricsRegistry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SessionLabels {
    request: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StoredResponseLabels {
    outcome: &'static str,
}

/// Metrics of sessions and of the responses that the gateway stores.
#[derive(Debug, Clone)]
pub(crate) struct SessionMetrics {
    requests: Family<SessionLabels, Counter>,
    stored_responses: Family<StoredResponseLabels, Counter>,
}

impl SessionMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        let metrics = Self {
            requests: registry.register(
                "moongate_session_requests_total",
                "Requests that name a session: its first, a later one, or a later one without a prediction, which is assumed to find the session's last prompt in the engine that computed it",
                Family::default(),
            ),
            stored_responses: registry.register(
                "moongate_stored_responses_total",
                "Responses for --response-store: stored, invalid (the engine's response could not be read), evicted (the store was full), or not_found (a request named one that is not stored)",
                Family::default(),
            ),
        };
        for outcome in ["stored", "invalid", "evicted", "not_found"] {
            drop(metrics.stored_responses.get_or_create(&StoredResponseLabels { outcome }));
        }
        for request in ["first", "later", "assumed"] {
            drop(metrics.requests.get_or_create(&SessionLabels { request }));
        }
        metrics
    }

    /// Counts what became of a response for the store.
    pub(crate) fn record_response(&self, outcome: &'static str) {
        self.stored_responses.get_or_create(&StoredResponseLabels { outcome }).inc();
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
