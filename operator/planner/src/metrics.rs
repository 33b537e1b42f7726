//! Metrics of the planner. `docs/metrics.md` lists them.

use std::sync::atomic::{AtomicBool, Ordering};

use moongate_capacity::{DecisionReason, MissingSignal};
use moongate_runtime::metrics::MetricsRegistry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use serde::Serialize;

use crate::deployments_file::{DeploymentKey, ScaledRole};

const STEP_OUTCOMES: [&str; 2] = ["decided", "unknown_replicas"];
const WRITE_RESULTS: [&str; 4] = ["written", "conflict", "refused", "failed"];
const STATE_FAILURES: [&str; 3] = ["damaged", "read", "write"];
const REASONS: [DecisionReason; 11] = [
    DecisionReason::Steady,
    DecisionReason::Demand,
    DecisionReason::Backlog,
    DecisionReason::LatencyTarget,
    DecisionReason::KvMemory,
    DecisionReason::Surplus,
    DecisionReason::BreakEven,
    DecisionReason::MissingMetric,
    DecisionReason::Minimum,
    DecisionReason::Maximum,
    DecisionReason::GpuBudget,
];
const MISSING: [MissingSignal; 4] =
    [MissingSignal::Demand, MissingSignal::Backlog, MissingSignal::Capacity, MissingSignal::Latency];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RoleLabels {
    target_namespace: String,
    deployment: String,
    role: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    target_namespace: String,
    deployment: String,
    role: &'static str,
    reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SignalLabels {
    target_namespace: String,
    deployment: String,
    role: &'static str,
    signal: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabels {
    target_namespace: String,
    deployment: String,
    role: &'static str,
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeploymentLabels {
    target_namespace: String,
    deployment: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    target_namespace: String,
    deployment: String,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReloadLabels {
    result: &'static str,
}

/// Metrics of one planner process.
#[derive(Debug)]
pub struct PlannerMetrics {
    registry: MetricsRegistry,
    wanted: Family<RoleLabels, Gauge>,
    current: Family<RoleLabels, Gauge>,
    ready: Family<RoleLabels, Gauge>,
    decisions: Family<ReasonLabels, Counter>,
    missing: Family<SignalLabels, Counter>,
    writes: Family<ResultLabels, Counter>,
    steps: Family<OutcomeLabels, Counter>,
    scrape_failures: Family<DeploymentLabels, Counter>,
    state_failures: Family<OutcomeLabels, Counter>,
    reloads: Family<ReloadLabels, Counter>,
    dry_run: Gauge,
    started: AtomicBool,
}

impl Default for PlannerMetrics {
    fn default() -> Self {
        let mut registry = MetricsRegistry::default();
        Self {
            wanted: registry.register(
                "moongate_planner_wanted_replicas",
                "Wanted replicas by `role`: `prefill`, `decode` or `plain`. No sample while the replicas of the deployment are not known",
                Family::default(),
            ),
            current: registry.register(
                "moongate_planner_current_replicas",
                "Ready and starting replicas",
                Family::default(),
            ),
            ready: registry.register("moongate_planner_ready_replicas", "Ready replicas", Family::default()),
            decisions: registry.register(
                "moongate_planner_decisions_total",
                "Decisions by `reason`: `steady`, `demand`, `backlog`, `latency_target`, `kv_memory`, `surplus`, `break_even`, `missing_metric`, `minimum`, `maximum` or `gpu_budget`",
                Family::default(),
            ),
            missing: registry.register(
                "moongate_planner_missing_signals_total",
                "Decisions for which a signal was missing: `demand`, `backlog`, `capacity` or `latency`. Such a decision never removes replicas",
                Family::default(),
            ),
            writes: registry.register(
                "moongate_planner_scale_writes_total",
                "Writes of scale subresources by `result`: `written`, `conflict` (changed at the same time, and repeated at once), `refused` (by the API server) or `failed` (no response); the last two are repeated in the next interval",
                Family::default(),
            ),
            steps: registry.register(
                "moongate_planner_steps_total",
                "Steps by `outcome`: `decided`, or `unknown_replicas` (the scale subresource or the pods cannot be read, and nothing is changed)",
                Family::default(),
            ),
            scrape_failures: registry.register(
                "moongate_planner_scrape_failures_total",
                "Failed scrapes of gateways",
                Family::default(),
            ),
            state_failures: registry.register(
                "moongate_planner_state_failures_total",
                "Learned states that were `damaged` (and discarded), or whose `read` or `write` failed, by `outcome`",
                Family::default(),
            ),
            reloads: registry.register(
                "moongate_planner_deployments_reloads_total",
                "Reloads of `--deployments`. `result` is `ok` or `invalid` (the previous deployments stay)",
                Family::default(),
            ),
            dry_run: registry.register(
                "moongate_planner_dry_run",
                "1 with `--dry-run`, which writes nothing",
                Gauge::default(),
            ),
            started: AtomicBool::new(false),
            registry,
        }
    }
}

impl PlannerMetrics {
    /// Metrics in the OpenMetrics text format.
    #[must_use]
    pub fn text(&self) -> String {
        self.registry.open_metrics()
    }

    /// All metrics in the scrape format, each with a sample: input of the table in `docs/metrics.md`.
    #[must_use]
    pub fn sample_text() -> String {
        let metrics = Self::default();
        let key = DeploymentKey { namespace: String::new(), name: String::new() };
        metrics.set_replicas(&key, ScaledRole::Prefill, 0, 0, 0);
        metrics.count_decision(&key, ScaledRole::Prefill, DecisionReason::Steady, &MISSING);
        metrics.count_write(&key, ScaledRole::Prefill, WRITE_RESULTS[0]);
        metrics.count_step(&key, true);
        metrics.count_scrape_failures(&key, 1);
        metrics.count_state_failure(&key, STATE_FAILURES[0]);
        metrics.count_reload(true);
        metrics.text()
    }

    pub(crate) fn set_replicas(
        &self,
        key: &DeploymentKey,
        role: ScaledRole,
        wanted: u32,
        current: u32,
        ready: u32,
    ) {
        let labels = role_labels(key, role);
        self.wanted.get_or_create(&labels).set(wanted.into());
        self.current.get_or_create(&labels).set(current.into());
        self.ready.get_or_create(&labels).set(ready.into());
    }

    pub(crate) fn count_decision(
        &self,
        key: &DeploymentKey,
        role: ScaledRole,
        reason: DecisionReason,
        missing: &[MissingSignal],
    ) {
        self.decisions.get_or_create(&reason_labels(key, role, reason)).inc();
        for &signal in missing {
            self.missing.get_or_create(&signal_labels(key, role, signal)).inc();
        }
    }

    pub(crate) fn count_write(&self, key: &DeploymentKey, role: ScaledRole, result: &'static str) {
        self.writes.get_or_create(&result_labels(key, role, result)).inc();
    }

    pub(crate) fn count_step(&self, key: &DeploymentKey, is_decided: bool) {
        let outcome = STEP_OUTCOMES[usize::from(!is_decided)];
        self.steps.get_or_create(&outcome_labels(key, outcome)).inc();
    }

    pub(crate) fn count_scrape_failures(&self, key: &DeploymentKey, failures: usize) {
        self.scrape_failures.get_or_create(&deployment_labels(key)).inc_by(failures as u64);
    }

    /// `failure` is `damaged`, `read` or `write`.
    pub(crate) fn count_state_failure(&self, key: &DeploymentKey, failure: &'static str) {
        self.state_failures.get_or_create(&outcome_labels(key, failure)).inc();
    }

    pub(crate) fn count_reload(&self, is_valid: bool) {
        let result = if is_valid { "ok" } else { "invalid" };
        self.reloads.get_or_create(&ReloadLabels { result }).inc();
    }

    pub(crate) fn set_dry_run(&self, dry_run: bool) {
        self.dry_run.set(dry_run.into());
    }

    pub(crate) fn set_started(&self) {
        self.started.store(true, Ordering::Relaxed);
    }

    /// Whether the file of deployments has been read.
    pub(crate) fn has_started(&self) -> bool {
        self.started.load(Ordering::Relaxed)
    }

    /// Removes the gauges of a deployment whose replicas are not known, so that autoscalers do not follow old numbers.
    pub(crate) fn clear_replicas(&self, key: &DeploymentKey) {
        for role in ScaledRole::ALL {
            let labels = role_labels(key, role);
            self.wanted.remove(&labels);
            self.current.remove(&labels);
            self.ready.remove(&labels);
        }
    }

    /// Removes all series of a deployment.
    pub(crate) fn remove(&self, key: &DeploymentKey) {
        self.clear_replicas(key);
        for role in ScaledRole::ALL {
            for reason in REASONS {
                self.decisions.remove(&reason_labels(key, role, reason));
            }
            for signal in MISSING {
                self.missing.remove(&signal_labels(key, role, signal));
            }
            for result in WRITE_RESULTS {
                self.writes.remove(&result_labels(key, role, result));
            }
        }
        for outcome in STEP_OUTCOMES {
            self.steps.remove(&outcome_labels(key, outcome));
        }
        for outcome in STATE_FAILURES {
            self.state_failures.remove(&outcome_labels(key, outcome));
        }
        self.scrape_failures.remove(&deployment_labels(key));
    }
}

fn role_labels(key: &DeploymentKey, role: ScaledRole) -> RoleLabels {
    RoleLabels { target_namespace: key.namespace.clone(), deployment: key.name.clone(), role: role.name() }
}

fn reason_labels(key: &DeploymentKey, role: ScaledRole, reason: DecisionReason) -> ReasonLabels {
    let RoleLabels { target_namespace, deployment, role } = role_labels(key, role);
    ReasonLabels { target_namespace, deployment, role, reason: name_of(reason) }
}

fn signal_labels(key: &DeploymentKey, role: ScaledRole, signal: MissingSignal) -> SignalLabels {
    let RoleLabels { target_namespace, deployment, role } = role_labels(key, role);
    SignalLabels { target_namespace, deployment, role, signal: name_of(signal) }
}

fn result_labels(key: &DeploymentKey, role: ScaledRole, result: &'static str) -> ResultLabels {
    let RoleLabels { target_namespace, deployment, role } = role_labels(key, role);
    ResultLabels { target_namespace, deployment, role, result }
}

fn outcome_labels(key: &DeploymentKey, outcome: &'static str) -> OutcomeLabels {
    OutcomeLabels { target_namespace: key.namespace.clone(), deployment: key.name.clone(), outcome }
}

fn deployment_labels(key: &DeploymentKey) -> DeploymentLabels {
    DeploymentLabels { target_namespace: key.namespace.clone(), deployment: key.name.clone() }
}

/// The name that a value without content has in JSON.
fn name_of(value: impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_of_a_removed_deployment_end() {
        let metrics = PlannerMetrics::default();
        let key = DeploymentKey { namespace: "models".to_owned(), name: "llama".to_owned() };
        metrics.set_replicas(&key, ScaledRole::Decode, 3, 2, 1);
        for reason in REASONS {
            metrics.count_decision(&key, ScaledRole::Decode, reason, &MISSING);
        }
        WRITE_RESULTS.into_iter().for_each(|result| metrics.count_write(&key, ScaledRole::Decode, result));
        STATE_FAILURES.into_iter().for_each(|failure| metrics.count_state_failure(&key, failure));
        metrics.count_step(&key, true);
        metrics.count_step(&key, false);
        metrics.count_scrape_failures(&key, 2);
        let text = metrics.text();
        let labels = r#"{target_namespace="models",deployment="llama",role="decode""#;
        assert!(text.contains(&format!("moongate_planner_wanted_replicas{labels}}} 3\n")), "{text}");
        assert!(
            text.contains(&format!("moongate_planner_decisions_total{labels},reason=\"gpu_budget\"}} 1\n")),
            "{text}"
        );
        metrics.clear_replicas(&key);
        assert!(!metrics.text().contains(&format!("replicas{labels}")));
        metrics.remove(&key);
        assert!(!metrics.text().contains("llama"), "{}", metrics.text());
    }
}
