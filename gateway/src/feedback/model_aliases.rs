//! Metrics of model aliases.

use std::sync::Arc;

use moongate_runtime::metrics::MetricsRegistry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

/// Names are bounded by the file of aliases.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AliasRequestLabels {
    alias: Arc<str>,
    model: Arc<str>,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AliasReloadLabels {
    result: &'static str,
}

/// What became of a request for an alias at one of its models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AliasOutcome {
    /// The response has started.
    Started,
    /// An engine rejected the request.
    Rejected,
    /// No engine that serves the model was usable.
    Unavailable,
    /// It failed before a response had started.
    Failed,
}

impl AliasOutcome {
    fn as_str(self) -> &'static str {
        match self {
            AliasOutcome::Started => "started",
            AliasOutcome::Rejected => "rejected",
            AliasOutcome::Unavailable => "unavailable",
            AliasOutcome::Failed => "failed",
        }
    }
}

/// Counters of requests for aliases, and of reloads of their file.
#[derive(Debug, Clone)]
pub(crate) struct ModelAliasMetrics {
    requests: Family<AliasRequestLabels, Counter>,
    reloads: Family<AliasReloadLabels, Counter>,
}

impl ModelAliasMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        let metrics = Self {
            requests: registry.register(
                "moongate_model_alias_requests_total",
                "Requests for a model alias, by the model that was tried. `outcome` is `started` (the response has started), `rejected` (by an engine), `unavailable` (no usable engine serves the model) or `failed`; after the last two, the next fallback is tried and counted too",
                Family::default(),
            ),
            reloads: registry.register(
                "moongate_model_alias_reloads_total",
                "Reloads of `--model-alias-file`. `result` is `ok` or `invalid` (the previous aliases stay)",
                Family::default(),
            ),
        };
        for result in ["ok", "invalid"] {
            metrics.reloads.get_or_create(&AliasReloadLabels { result }).inc_by(0);
        }
        metrics
    }

    /// Gives the family a sample.
    pub(super) fn init_all_series(&self) {
        self.record("", "", AliasOutcome::Started);
    }

    pub(crate) fn record(&self, alias: &str, model: &str, outcome: AliasOutcome) {
        let labels =
            AliasRequestLabels { alias: alias.into(), model: model.into(), outcome: outcome.as_str() };
        self.requests.get_or_create(&labels).inc();
    }

    pub(crate) fn record_reload(&self, is_valid: bool) {
        let result = if is_valid { "ok" } else { "invalid" };
        self.reloads.get_or_create(&AliasReloadLabels { result }).inc();
    }
}
