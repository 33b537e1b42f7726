//! Metrics of rejected and sanitized requests.

use moongate_runtime::metrics::MetricsRegistry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AccessRejectionLabels {
    reason: &'static str,
}

/// Requests rejected by access control, quotas or request checks.
#[derive(Debug)]
pub(crate) struct AccessRejectionMetrics {
    rejected: Family<AccessRejectionLabels, Counter>,
    stripped: Counter,
}

impl AccessRejectionMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        Self {
            rejected: registry.register(
                "moongate_rejected_requests_total",
                "Rejected requests: `missing_key`, `invalid_key`, `conflicting_keys`, `insufficient_scope`, `invalid_host`, `invalid_path`, `cross_origin` (a page of another site, at the admin listener), or the exceeded quota of the tenant, `requests_per_second`, `input_tokens_per_second`, `concurrent_requests`",
                Family::default(),
            ),
            stripped: registry.register(
                "moongate_stripped_requests_total",
                "Requests from which members, form fields or headers that steer KV transfer were removed",
                Counter::default(),
            ),
        }
    }

    /// Gives the family a sample.
    pub(super) fn init_all_series(&self) {
        self.rejected.get_or_create(&AccessRejectionLabels { reason: "" }).inc_by(0);
    }

    /// Something was removed from a request before it was sent to an engine.
    pub(crate) fn record_stripped(&self) {
        self.stripped.inc();
    }

    /// `reason` is one of the values in the help text.
    pub(crate) fn record_rejected(&self, reason: &'static str) {
        self.rejected.get_or_create(&AccessRejectionLabels { reason }).inc();
    }
}
