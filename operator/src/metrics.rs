//! What the operator counts, and whether it is ready. `docs/metrics.md` lists the metrics.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::Kind;

/// Seconds for a plan, and for a plan and its writes.
const BUCKETS: [f64; 16] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 30.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reconciled {
    kind: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfKind {
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Asked {
    method: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    webhook: &'static str,
    answer: &'static str,
}

/// How a look at an object ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// All of its steps were taken, if there were any.
    Done,
    /// The object cannot be planned for.
    Unplanned,
    /// The API server refused a step, or could not be asked.
    Failed,
}

/// Metrics of one operator.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    reconciles: Family<Reconciled, Counter>,
    durations: Family<OfKind, Histogram>,
    plans: Family<OfKind, Histogram>,
    queued: Gauge,
    requests: Family<Asked, Counter>,
    watch_failures: Family<OfKind, Counter>,
    leading: Gauge,
    events_dropped: Counter,
    webhooks: Family<Answered, Counter>,
    listed: AtomicBool,
    waits_for_webhooks: AtomicBool,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("moongate_operator");
        let metrics = Self {
            reconciles: Family::default(),
            durations: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            plans: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            queued: Gauge::default(),
            requests: Family::default(),
            watch_failures: Family::default(),
            leading: Gauge::default(),
            events_dropped: Counter::default(),
            webhooks: Family::default(),
            listed: AtomicBool::new(false),
            waits_for_webhooks: AtomicBool::new(false),
            registry: Registry::default(),
        };
        registry.register(
            "reconciles",
            "Looks at objects: `done`, `unplanned` (the spec cannot be run), `failed` (a write was refused)",
            metrics.reconciles.clone(),
        );
        let text = "A plan and its writes";
        registry.register_with_unit("reconcile", text, Unit::Seconds, metrics.durations.clone());
        let text = "A plan alone: what of it is the operator's own time";
        registry.register_with_unit("plan", text, Unit::Seconds, metrics.plans.clone());
        registry.register("queued", "Objects that wait for a look", metrics.queued.clone());
        registry.register("api_requests", "Requests to the API server", metrics.requests.clone());
        registry.register("watch_failures", "Watches that were begun anew", metrics.watch_failures.clone());
        registry.register("leading", "1 while this operator works", metrics.leading.clone());
        registry.register(
            "events_dropped",
            "Events for which there was no room",
            metrics.events_dropped.clone(),
        );
        registry.register(
            "webhook_requests",
            "Questions of the API server: `converted`, `allowed`, `refused`, or `rubbish` from somebody else",
            metrics.webhooks.clone(),
        );
        Self { registry, ..metrics }
    }
}

impl Metrics {
    /// In OpenMetrics' text format.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        moongate_runtime::append_process_metrics(&mut text);
        text
    }

    /// All metrics of an operator as Prometheus scrapes them, each with a sample: what the table in `docs/metrics.md` is made of.
    #[must_use]
    pub fn all() -> String {
        let metrics = Self::default();
        metrics.reconciled(Kind::Group, Ended::Done, Duration::ZERO);
        metrics.planned(Kind::Group, Duration::ZERO);
        metrics.asked("");
        metrics.watch_failed(Kind::Group);
        metrics.webhook_answered("", "");
        metrics.text()
    }

    /// Whether the operator does all that it is there for: it leads and has seen every object, or it stands by; and its webhooks,
    /// if it has any, can be asked.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let works = self.leading.get() == 0 || self.listed.load(Ordering::Relaxed);
        works && !self.waits_for_webhooks.load(Ordering::Relaxed)
    }

    pub(crate) fn reconciled(&self, kind: Kind, ended: Ended, took: Duration) {
        let kind = kind.name();
        let outcome = match ended {
            Ended::Done => "done",
            Ended::Unplanned => "unplanned",
            Ended::Failed => "failed",
        };
        self.reconciles.get_or_create(&Reconciled { kind, outcome }).inc();
        self.durations.get_or_create(&OfKind { kind }).observe(took.as_secs_f64());
    }

    pub(crate) fn planned(&self, kind: Kind, took: Duration) {
        self.plans.get_or_create(&OfKind { kind: kind.name() }).observe(took.as_secs_f64());
    }

    pub(crate) fn queued(&self, objects: usize) {
        self.queued.set(i64::try_from(objects).unwrap_or(i64::MAX));
    }

    pub(crate) fn asked(&self, method: &str) {
        self.requests.get_or_create(&Asked { method: method.to_owned() }).inc();
    }

    pub(crate) fn watch_failed(&self, kind: Kind) {
        self.watch_failures.get_or_create(&OfKind { kind: kind.name() }).inc();
    }

    pub(crate) fn leads(&self, leads: bool) {
        self.leading.set(leads.into());
    }

    pub(crate) fn all_are_listed(&self) {
        self.listed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn event_dropped(&self) {
        self.events_dropped.inc();
    }

    pub(crate) fn webhook_answered(&self, webhook: &'static str, answer: &'static str) {
        self.webhooks.get_or_create(&Answered { webhook, answer }).inc();
    }

    pub(crate) fn waits_for_webhooks(&self, waits: bool) {
        self.waits_for_webhooks.store(waits, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_is_who_stands_by_or_has_seen_all_and_can_be_asked() {
        let metrics = Metrics::default();
        assert!(metrics.is_ready());
        metrics.leads(true);
        assert!(!metrics.is_ready());
        metrics.all_are_listed();
        assert!(metrics.is_ready());
        metrics.waits_for_webhooks(true);
        assert!(!metrics.is_ready());
    }
}
