//! Checks whether the cluster has what groups need, with a fix for each problem.

use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams};
use kube::{Client, Error};
use serde::Serialize;
use serde_json::Value;

use super::output_format::count;
use super::{ClusterClient, GroupReport, KubectlError};

/// CRDs that the operator uses.
pub(super) const DEFINITIONS: [&str; 10] = [
    "clusterengineruntimeprofiles",
    "coordinatedpolicies",
    "instances",
    "instancesets",
    "rolebasedgroups",
    "rolebasedgroupscalingadapters",
    "rolebasedgroupsets",
    "rolebasedgroupwarmups",
    "roleinstances",
    "roleinstancesets",
];
/// CRDs of ours that upstream does not have; RBG groups do not need them.
const OURS_ONLY: [&str; 3] = ["instances", "instancesets", "rolebasedgroupwarmups"];
/// CRDs with two versions that need conversion.
pub(super) const CONVERTED: [&str; 2] = ["rolebasedgroups", "rolebasedgroupsets"];
/// The leader Lease of the operator, ours or upstream's.
const LEASE: &str = "rbg-controller";
/// Name of the operator's webhook configuration.
const WEBHOOKS: &str = "rbgs-validating-webhook-configuration";

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DoctorFinding {
    /// Name of the check, for example `webhooks`.
    pub check: &'static str,
    /// Whether the check found a problem.
    pub is_problem: bool,
    pub message: String,
    /// How to fix it; empty if nothing has to be done.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub fix: String,
}

/// Why objects that are checked could not be listed.
#[derive(Debug, thiserror::Error)]
pub enum DoctorReadError {
    #[error("{}", list_text(.0))]
    List(#[from] Error),
    #[error(transparent)]
    Groups(#[from] KubectlError),
}

/// A group that is checked.
#[derive(Debug, Default)]
pub struct DoctorGroup {
    pub name: String,
    /// What it waits for; empty if it is ready.
    pub waiting_for: Vec<String>,
    /// The fault that it recovers from, or why its policy does not act on faults.
    pub fault: Option<String>,
}

/// Objects of the cluster that are checked. `Err` contains the error of the request.
#[derive(Debug)]
pub struct DoctorSnapshot {
    pub definitions: Result<Vec<Value>, DoctorReadError>,
    /// Leases with the operator's name.
    pub leases: Result<Vec<Value>, DoctorReadError>,
    pub webhooks: Result<Vec<Value>, DoctorReadError>,
    /// EndpointSlices of all namespaces, for the webhooks' Services.
    pub endpoints: Result<Vec<Value>, DoctorReadError>,
    /// Groups of the namespace.
    pub groups: Result<Vec<DoctorGroup>, DoctorReadError>,
}

impl DoctorSnapshot {
    /// Reads the objects from the cluster.
    pub async fn read(cluster: &ClusterClient) -> Self {
        let client = cluster.client();
        let list =
            |group, version, kind, plural, selector| list(client, group, version, kind, plural, selector);
        let (definitions, leases, webhooks, endpoints, groups) = tokio::join!(
            list("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions", None),
            list("coordination.k8s.io", "v1", "Lease", "leases", Some(LEASE)),
            list(
                "admissionregistration.k8s.io",
                "v1",
                "ValidatingWebhookConfiguration",
                "validatingwebhookconfigurations",
                Some(WEBHOOKS)
            ),
            list("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices", None),
            GroupReport::all(cluster, false),
        );
        let groups = groups.map_err(DoctorReadError::from);
        let group = |report: GroupReport| DoctorGroup {
            name: report.name,
            waiting_for: report.waiting_for,
            fault: report.fault,
        };
        let groups = groups.map(|all| all.into_iter().map(group).collect());
        Self { definitions, leases, webhooks, endpoints, groups }
    }

    #[must_use]
    pub fn findings(&self, now: Timestamp) -> Vec<DoctorFinding> {
        let mut findings = DoctorFindings::default();
        match &self.definitions {
            Ok(definitions) => self.definitions(&mut findings, definitions),
            Err(why) => findings.push_unreadable("definitions", why),
        }
        match &self.leases {
            Ok(leases) => operator(&mut findings, leases, now),
            Err(why) => findings.push_unreadable("operator", why),
        }
        match &self.webhooks {
            Ok(webhooks) => self.webhooks(&mut findings, webhooks),
            Err(why) => findings.push_unreadable("webhooks", why),
        }
        match &self.groups {
            Ok(groups) => groups_of(&mut findings, groups),
            Err(why) => findings.push_unreadable("groups", why),
        }
        findings.0
    }

    fn definitions(&self, findings: &mut DoctorFindings, definitions: &[Value]) {
        let found = |plural: &str| {
            let name = format!("{plural}.workloads.x-k8s.io");
            definitions.iter().find(|definition| definition["metadata"]["name"] == name.as_str())
        };
        let missing: Vec<&str> = DEFINITIONS.into_iter().filter(|plural| found(plural).is_none()).collect();
        let apply = "kubectl apply --server-side -f operator/crds/";
        if missing.is_empty() {
            findings.push_ok("definitions", format!("all {} kinds", DEFINITIONS.len()));
        } else if missing.iter().all(|plural| OURS_ONLY.contains(plural)) {
            let message = format!("without {}, which RBG groups do not need", missing.join(", "));
            findings.push_ok("definitions", message);
        } else {
            findings.push_problem("definitions", format!("missing: {}", missing.join(", ")), apply);
        }
        for plural in CONVERTED {
            let Some(definition) = found(plural) else { continue };
            let versions = definition["spec"]["versions"].as_array().map_or(0, Vec::len);
            let conversion = &definition["spec"]["conversion"];
            if versions < 2 {
                continue;
            }
            if conversion["strategy"] != "Webhook" {
                let fix = "start the operator with --webhook-service: until its webhooks are registered, objects of the other version lose fields";
                findings.push_problem(
                    "definitions",
                    format!("{plural} has {versions} versions and no conversion webhook"),
                    fix,
                );
            } else {
                let service = &conversion["webhook"]["clientConfig"]["service"];
                self.reachable(findings, &format!("conversion of {plural}"), service);
            }
        }
    }

    fn webhooks(&self, findings: &mut DoctorFindings, webhooks: &[Value]) {
        let Some(configuration) = webhooks.first() else {
            findings.push_ok(
                "webhooks",
                "no webhook validates groups when they are written; start the operator with --webhook-service to validate them"
                    .to_owned(),
            );
            return;
        };
        for webhook in configuration["webhooks"].as_array().into_iter().flatten() {
            let name = webhook["name"].as_str().unwrap_or_default();
            self.reachable(findings, name, &webhook["clientConfig"]["service"]);
        }
    }

    /// Checks whether a webhook's Service has ready endpoints.
    fn reachable(&self, findings: &mut DoctorFindings, what: &str, service: &Value) {
        let (Some(namespace), Some(name)) = (service["namespace"].as_str(), service["name"].as_str()) else {
            // Webhooks with a URL are outside of the cluster.
            return;
        };
        let endpoints = match &self.endpoints {
            Ok(endpoints) => endpoints,
            Err(why) => return findings.push_unreadable("webhooks", why),
        };
        let is_ready = |endpoint: &Value| endpoint["conditions"]["ready"] != false;
        let ready_endpoints = endpoints
            .iter()
            .filter(|slice| {
                slice["metadata"]["namespace"] == namespace
                    && slice["metadata"]["labels"]["kubernetes.io/service-name"] == name
            })
            .flat_map(|slice| slice["endpoints"].as_array().into_iter().flatten())
            .filter(|endpoint| is_ready(endpoint))
            .count();
        match ready_endpoints {
            0 => findings.push_problem(
                "webhooks",
                format!("Service {namespace}/{name} has no ready endpoints; the API server calls it for {what}"),
                "start the operator behind the Service, or delete its webhook configuration: until then groups cannot be written",
            ),
            ready => findings.push_ok("webhooks", format!("{what}: {} of {namespace}/{name}", count(ready, "endpoint"))),
        }
    }
}

#[derive(Default)]
struct DoctorFindings(Vec<DoctorFinding>);

impl DoctorFindings {
    fn push_ok(&mut self, check: &'static str, message: String) {
        self.0.push(DoctorFinding { check, is_problem: false, message, fix: String::new() });
    }

    fn push_problem(&mut self, check: &'static str, message: String, fix: &str) {
        self.0.push(DoctorFinding { check, is_problem: true, message, fix: fix.to_owned() });
    }

    fn push_unreadable(&mut self, check: &'static str, why: &DoctorReadError) {
        self.push_problem(
            check,
            format!("cannot be listed: {why}"),
            "use an account with permission to list them",
        );
    }
}

/// Checks whether exactly one operator leads.
fn operator(findings: &mut DoctorFindings, leases: &[Value], now: Timestamp) {
    let mut leaders = Vec::new();
    for lease in leases {
        let spec = &lease["spec"];
        let lease_name = format!("{}/{LEASE}", lease["metadata"]["namespace"].as_str().unwrap_or_default());
        let holder = spec["holderIdentity"].as_str().unwrap_or_default();
        let renewed = spec["renewTime"].as_str().and_then(|time| time.parse::<Timestamp>().ok());
        let age = renewed.map(|renewed| now.duration_since(renewed).as_secs());
        let duration = spec["leaseDurationSeconds"].as_i64().unwrap_or(15);
        if !holder.is_empty() && age.is_some_and(|age| age <= duration) {
            leaders.push(format!("{holder} (Lease {lease_name})"));
        }
    }
    match leaders.as_slice() {
        [] if leases.is_empty() => findings.push_problem(
            "operator",
            format!(
                "there is no Lease {LEASE}: no operator has run here, or only one without --leader-elect"
            ),
            "start moongate operator; a single replica may run without --leader-elect, and then has no Lease",
        ),
        [] => findings.push_problem(
            "operator",
            "the Lease has expired: groups keep running, but nothing is updated, scaled or replaced"
                .to_owned(),
            "check the operator's pods and their logs",
        ),
        [leader] => findings.push_ok("operator", format!("{leader} leads")),
        several => findings.push_problem(
            "operator",
            format!("{} operators lead at the same time: {}", several.len(), several.join(", ")),
            "stop all but one: they overwrite each other's changes",
        ),
    }
}

fn groups_of(findings: &mut DoctorFindings, groups: &[DoctorGroup]) {
    if groups.is_empty() {
        findings.push_ok("groups", "no groups in this namespace".to_owned());
    }
    for DoctorGroup { name, waiting_for, fault } in groups {
        if let Some(fault) = fault {
            let fix = "fix its cause; see docs/fault-recovery.md for what a policy does about it";
            findings.push_problem("groups", format!("{name} has a fault: {fault}"), fix);
        }
        match waiting_for.is_empty() {
            true => findings.push_ok("groups", format!("{name} is ready")),
            false => {
                let reasons = waiting_for.join("; ");
                findings.push_problem(
                    "groups",
                    format!("{name} is not ready: {reasons}"),
                    &format!("run kubectl moongate status {name} for details"),
                );
            }
        }
    }
}

/// Text output of the checks.
#[must_use]
pub fn findings_text(findings: &[DoctorFinding]) -> String {
    let mut text = String::new();
    let mut check = "";
    for finding in findings {
        if finding.check != check {
            check = finding.check;
            text += &format!("{check}\n");
        }
        let mark = if finding.is_problem { "FAIL " } else { "ok   " };
        text += &format!("  {mark} {}\n", finding.message);
        if !finding.fix.is_empty() {
            text += &format!("        fix: {}\n", finding.fix);
        }
    }
    let problems = findings.iter().filter(|finding| finding.is_problem).count();
    text + &match problems {
        0 => "\nNo problems found.\n".to_owned(),
        problems => format!("\n{}.\n", count(problems, "problem")),
    }
}

async fn list(
    client: &Client,
    group: &str,
    version: &str,
    kind: &str,
    plural: &str,
    name: Option<&str>,
) -> Result<Vec<Value>, DoctorReadError> {
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural);
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let mut params = ListParams::default();
    if let Some(name) = name {
        params = params.fields(&format!("metadata.name={name}"));
    }
    let list = api.list(&params).await?;
    Ok(list.items.into_iter().map(|object| serde_json::to_value(object).unwrap_or_default()).collect())
}

fn list_text(error: &Error) -> String {
    match error {
        Error::Api(status) => status.message.clone(),
        error => error.to_string(),
    }
}
