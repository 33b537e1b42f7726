//! Metrics and readiness of the operator. `docs/metrics.md` lists the metrics.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use moongate_runtime::metrics::MetricsRegistry;
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::ResourceKind;

/// Histogram buckets in seconds, for plans and for reconciliations.
const BUCKETS: [f64; 16] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 30.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReconcileLabels {
    kind: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ApiRequestLabels {
    method: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FaultActionLabels {
    action: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WebhookLabels {
    webhook: &'static str,
    result: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReconcileOutcome {
    /// All steps of the plan were carried out.
    Done,
    /// The object's spec is invalid.
    InvalidSpec,
    /// The API server rejected a write, or did not respond.
    Failed,
}

/// Metrics of one operator process.
#[derive(Debug)]
pub struct OperatorMetrics {
    registry: MetricsRegistry,
    reconciles: Family<ReconcileLabels, Counter>,
    durations: Family<KindLabels, Histogram, fn() -> Histogram>,
    plans: Family<KindLabels, Histogram, fn() -> Histogram>,
    queued: Gauge,
    requests: Family<ApiRequestLabels, Counter>,
    watch_failures: Family<KindLabels, Counter>,
    leading: Gauge,
    events_dropped: Counter,
    fault_actions: Family<FaultActionLabels, Counter>,
    webhooks: Family<WebhookLabels, Counter>,
    webhooks_owned: Gauge,
    synced: AtomicBool,
    webhooks_pending: AtomicBool,
    /// The release that this one waits for.
    waiting_for: Mutex<Option<String>>,
}

impl Default for OperatorMetrics {
    fn default() -> Self {
        let mut registry = MetricsRegistry::default();
        let histograms = || -> Family<KindLabels, Histogram, fn() -> Histogram> {
            Family::new_with_constructor(|| Histogram::new(BUCKETS))
        };
        let metrics = Self {
            reconciles: registry.register(
                "moongate_operator_reconciles_total",
                "Reconciliations: `done`, `invalid_spec`, `failed` (a write was rejected)",
                Family::default(),
            ),
            durations: registry.register(
                "moongate_operator_reconcile_seconds",
                "Duration of a reconciliation, writes included",
                histograms(),
            ),
            plans: registry.register(
                "moongate_operator_plan_seconds",
                "Duration of planning, without API writes",
                histograms(),
            ),
            queued: registry.register(
                "moongate_operator_queued",
                "Objects queued for reconciliation",
                Gauge::default(),
            ),
            requests: registry.register(
                "moongate_operator_api_requests_total",
                "Requests to the API server",
                Family::default(),
            ),
            watch_failures: registry.register(
                "moongate_operator_watch_failures_total",
                "Watches restarted after a failure",
                Family::default(),
            ),
            leading: registry.register(
                "moongate_operator_leading",
                "1 while this replica holds the leader Lease",
                Gauge::default(),
            ),
            events_dropped: registry.register(
                "moongate_operator_events_dropped_total",
                "Events dropped because the event queue was full",
                Counter::default(),
            ),
            fault_actions: registry.register(
                "moongate_operator_fault_actions_total",
                "Actions on instances after faults of others: `restart`, `drain`, `replace`",
                Family::default(),
            ),
            webhooks: registry.register(
                "moongate_operator_webhook_requests_total",
                "Webhook requests: `converted`, `allowed`, `refused`, or `invalid` for an unreadable body",
                Family::default(),
            ),
            webhooks_owned: registry.register(
                "moongate_operator_webhooks_owned",
                "1 while this release owns the cluster's webhooks; 0 without webhooks, or while another release owns them",
                Gauge::default(),
            ),
            synced: AtomicBool::new(false),
            webhooks_pending: AtomicBool::new(false),
            waiting_for: Mutex::default(),
            registry,
        };
        // Without samples, Prometheus cannot compute an increase.
        for kind in ResourceKind::ALL {
            metrics.watch_failures.get_or_create(&KindLabels { kind: kind.name() }).inc_by(0);
        }
        metrics
    }
}

impl OperatorMetrics {
    /// Metrics in the OpenMetrics text format.
    #[must_use]
    pub fn text(&self) -> String {
        self.registry.open_metrics()
    }

    /// All metrics in the scrape format, each with a sample: input of the table in `docs/metrics.md`.
    #[must_use]
    pub fn sample_text() -> String {
        let metrics = Self::default();
        metrics.observe_reconcile(ResourceKind::Group, ReconcileOutcome::Done, Duration::ZERO);
        metrics.observe_plan(ResourceKind::Group, Duration::ZERO);
        metrics.count_api_request("");
        metrics.watch_failed(ResourceKind::Group);
        metrics.count_webhook_request("", "");
        metrics.count_fault_action("");
        metrics.text()
    }

    /// Whether the operator is ready: it leads and has listed all objects, or it is a standby; and its webhooks, if enabled,
    /// are registered, and no other release owns them while this one would reconcile the same objects.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.unready_reason().is_none()
    }

    /// Why the operator is not ready, and what to do.
    pub(crate) fn unready_reason(&self) -> Option<String> {
        if let Some(owner) = &*self.waiting_for.lock() {
            return Some(format!(
                "waiting: release {owner} owns the webhooks and reconciles this cluster; uninstall it, or give each release \
                 its own namespace (operator.namespace)"
            ));
        }
        let is_synced_or_standby = self.leading.get() == 0 || self.synced.load(Ordering::Relaxed);
        let is_ready = is_synced_or_standby && !self.webhooks_pending.load(Ordering::Relaxed);
        (!is_ready).then(|| "starting".to_owned())
    }

    pub(crate) fn observe_reconcile(
        &self,
        kind: ResourceKind,
        outcome_kind: ReconcileOutcome,
        duration: Duration,
    ) {
        let kind = kind.name();
        let outcome = match outcome_kind {
            ReconcileOutcome::Done => "done",
            ReconcileOutcome::InvalidSpec => "invalid_spec",
            ReconcileOutcome::Failed => "failed",
        };
        self.reconciles.get_or_create(&ReconcileLabels { kind, outcome }).inc();
        self.durations.get_or_create(&KindLabels { kind }).observe(duration.as_secs_f64());
    }

    pub(crate) fn observe_plan(&self, kind: ResourceKind, duration: Duration) {
        self.plans.get_or_create(&KindLabels { kind: kind.name() }).observe(duration.as_secs_f64());
    }

    pub(crate) fn set_queued(&self, objects: usize) {
        self.queued.set(i64::try_from(objects).unwrap_or(i64::MAX));
    }

    pub(crate) fn count_api_request(&self, method: &str) {
        self.requests.get_or_create(&ApiRequestLabels { method: method.to_owned() }).inc();
    }

    pub(crate) fn watch_failed(&self, kind: ResourceKind) {
        self.watch_failures.get_or_create(&KindLabels { kind: kind.name() }).inc();
    }

    pub(crate) fn set_leading(&self, is_leading: bool) {
        self.leading.set(is_leading.into());
    }

    pub(crate) fn set_synced(&self) {
        self.synced.store(true, Ordering::Relaxed);
    }

    pub(crate) fn event_dropped(&self) {
        self.events_dropped.inc();
    }

    pub(crate) fn count_fault_action(&self, action: &'static str) {
        self.fault_actions.get_or_create(&FaultActionLabels { action }).inc();
    }

    pub(crate) fn count_webhook_request(&self, webhook: &'static str, result: &'static str) {
        self.webhooks.get_or_create(&WebhookLabels { webhook, result }).inc();
    }

    pub(crate) fn set_webhooks_owned(&self, is_owned: bool) {
        self.webhooks_owned.set(is_owned.into());
    }

    /// Sets the release that this one waits for.
    pub(crate) fn set_waiting_for(&self, owner: Option<String>) {
        *self.waiting_for.lock() = owner;
    }

    pub(crate) fn set_webhooks_pending(&self, is_pending: bool) {
        self.webhooks_pending.store(is_pending, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_requires_synced_leader_and_registered_webhooks() {
        let metrics = OperatorMetrics::default();
        assert!(metrics.is_ready());
        metrics.set_leading(true);
        assert!(!metrics.is_ready());
        metrics.set_synced();
        assert!(metrics.is_ready());
        metrics.set_webhooks_pending(true);
        assert!(!metrics.is_ready());
        metrics.set_webhooks_pending(false);
        metrics.set_waiting_for(Some("n/s".to_owned()));
        assert!(metrics.unready_reason().unwrap().contains("release n/s owns"));
        metrics.set_waiting_for(None);
        assert!(metrics.is_ready());
    }
}
