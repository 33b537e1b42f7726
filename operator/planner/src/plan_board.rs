//! The last step of each deployment, for `GET /plan` and readiness.

use std::collections::BTreeMap;

use moongate_capacity::{PlannerDecision, PlannerInput};
use parking_lot::RwLock;
use serde::Serialize;

use crate::deployments_file::DeploymentKey;

/// Reports of all deployments.
#[derive(Debug, Default)]
pub struct PlanBoard {
    /// `None` until the first step.
    reports: RwLock<BTreeMap<DeploymentKey, Option<PlanReport>>>,
}

/// What one step has observed, decided and written.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct PlanReport {
    /// Unix time of the step in seconds.
    pub(crate) time_s: f64,
    pub(crate) dry_run: bool,
    /// Gateways without a sample, and why.
    pub(crate) unreachable_gateways: BTreeMap<String, String>,
    /// Why nothing was decided.
    pub(crate) problem: Option<String>,
    pub(crate) input: Option<PlannerInput>,
    pub(crate) decision: Option<PlannerDecision>,
    /// Roles by name.
    pub(crate) roles: BTreeMap<&'static str, RoleReport>,
}

/// The part of a step for one scale target.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct RoleReport {
    pub(crate) target: String,
    /// Replicas of the target before the step.
    pub(crate) replicas: u32,
    pub(crate) wanted: u32,
    /// `unchanged`, `dry_run`, `written`, `overtaken` or `failed`.
    pub(crate) result: &'static str,
}

#[derive(Serialize)]
struct NamedReport<'a> {
    namespace: &'a str,
    name: &'a str,
    #[serde(flatten)]
    report: &'a Option<PlanReport>,
}

impl PlanBoard {
    pub(crate) fn add(&self, deployment: &DeploymentKey) {
        self.reports.write().entry(deployment.clone()).or_default();
    }

    pub(crate) fn remove(&self, deployment: &DeploymentKey) {
        self.reports.write().remove(deployment);
    }

    pub(crate) fn publish(&self, deployment: &DeploymentKey, report: PlanReport) {
        if let Some(current) = self.reports.write().get_mut(deployment) {
            *current = Some(report);
        }
    }

    /// Whether every deployment has had a step, successful or not.
    pub(crate) fn has_all_reports(&self) -> bool {
        self.reports.read().values().all(Option::is_some)
    }

    /// All reports as JSON.
    pub(crate) fn json(&self) -> String {
        let reports = self.reports.read();
        let named: Vec<NamedReport<'_>> = reports
            .iter()
            .map(|(key, report)| NamedReport { namespace: &key.namespace, name: &key.name, report })
            .collect();
        serde_json::json!({ "deployments": named }).to_string()
    }
}
