//! Counts who was not let in.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AccessRejectionLabels {
    reason: &'static str,
}

/// Requests that were refused for who sent them, or how many.
#[derive(Debug, Default)]
pub(crate) struct AccessRejectionMetrics {
    refused: Family<AccessRejectionLabels, Counter>,
    stripped: Counter,
}

impl AccessRejectionMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Requests that were not let in: `missing_key`, `wrong_key`, `wrong_scope`, `invalid_host`, `invalid_path`, `foreign_origin` (a page of another site, at the admin listener), or the tenant's quota, `requests_per_second`, \
                    `input_tokens_per_second`, `concurrent_requests`";
        registry.register("refused_requests", help, metrics.refused.clone());
        let help =
            "Requests from which members, form fields or headers that steer KV transfer were taken out";
        registry.register("stripped_requests", help, metrics.stripped.clone());
        metrics
    }

    /// Gives the family a sample.
    pub(super) fn init_all_series(&self) {
        self.refused.get_or_create(&AccessRejectionLabels { reason: "" }).inc_by(0);
    }

    /// Something of a request did not go to an engine.
    pub(crate) fn record_stripped(&self) {
        self.stripped.inc();
    }

    /// `reason` is one of a few fixed words.
    pub(crate) fn record_rejected(&self, reason: &'static str) {
        self.refused.get_or_create(&AccessRejectionLabels { reason }).inc();
    }
}
