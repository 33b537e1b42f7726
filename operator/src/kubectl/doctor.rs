//! Whether the cluster has what groups need, and how to mend what is wrong.

use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams};
use kube::{Client, Error};
use serde::Serialize;
use serde_json::Value;

use super::output_format::count;
use super::{ClusterClient, GroupReport};

/// Definitions that the operator works with.
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
/// Those of them that upstream does not have: nothing else misses them.
const OURS_ONLY: [&str; 3] = ["instances", "instancesets", "rolebasedgroupwarmups"];
/// Those with two versions that differ.
pub(super) const CONVERTED: [&str; 2] = ["rolebasedgroups", "rolebasedgroupsets"];
/// The Lease of the operator that works, ours or upstream's.
const LEASE: &str = "rbg-controller";
/// The configuration of the operator's webhooks.
const WEBHOOKS: &str = "rbgs-validating-webhook-configuration";

/// What was looked at, and how it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DoctorFinding {
    /// What it is about.
    pub about: &'static str,
    /// Whether something is wrong.
    pub is_fault: bool,
    /// How it is.
    pub what: String,
    /// How to mend it; empty if nothing is to be done.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mend: String,
}

/// What was read of a cluster. `Err` says why something could not be read.
#[derive(Debug, Clone)]
pub struct DoctorSnapshot {
    /// CustomResourceDefinitions.
    pub definitions: Result<Vec<Value>, String>,
    /// Leases named as the operator's.
    pub leases: Result<Vec<Value>, String>,
    /// ValidatingWebhookConfigurations.
    pub webhooks: Result<Vec<Value>, String>,
    /// EndpointSlices of all namespaces, of which webhooks need some.
    pub endpoints: Result<Vec<Value>, String>,
    /// Groups of the namespace, by name, with what each waits for.
    pub groups: Result<Vec<(String, Vec<String>)>, String>,
}

impl DoctorSnapshot {
    /// Looks at the cluster.
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
        let groups = groups.map_err(|error| error.to_string());
        let groups = groups.map(|all| all.into_iter().map(|group| (group.name, group.waits_for)).collect());
        Self { definitions, leases, webhooks, endpoints, groups }
    }

    /// What is to be said of it.
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
            let what = format!("without {}, which groups as RBG has them do not need", missing.join(", "));
            findings.push_ok("definitions", what);
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
                let mend = "start the operator with its webhooks: until it has registered them, objects of the other version lose what differs";
                findings.push_problem(
                    "definitions",
                    format!("{plural} has {versions} versions and nobody converts them"),
                    mend,
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
                "groups are not checked when they are written; the operator does it with its webhooks on"
                    .to_owned(),
            );
            return;
        };
        for webhook in configuration["webhooks"].as_array().into_iter().flatten() {
            let name = webhook["name"].as_str().unwrap_or_default();
            self.reachable(findings, name, &webhook["clientConfig"]["service"]);
        }
    }

    /// Whether somebody answers behind a Service that the API server asks.
    fn reachable(&self, findings: &mut DoctorFindings, what: &str, service: &Value) {
        let (Some(namespace), Some(name)) = (service["namespace"].as_str(), service["name"].as_str()) else {
            // By URL: outside of the cluster.
            return;
        };
        let endpoints = match &self.endpoints {
            Ok(endpoints) => endpoints,
            Err(why) => return findings.push_unreadable("webhooks", why),
        };
        let is_ready = |endpoint: &Value| endpoint["conditions"]["ready"] != false;
        let answering = endpoints
            .iter()
            .filter(|slice| {
                slice["metadata"]["namespace"] == namespace
                    && slice["metadata"]["labels"]["kubernetes.io/service-name"] == name
            })
            .flat_map(|slice| slice["endpoints"].as_array().into_iter().flatten())
            .filter(|endpoint| is_ready(endpoint))
            .count();
        match answering {
            0 => findings.push_problem(
                "webhooks",
                format!("nobody answers at Service {namespace}/{name}, which the API server asks for {what}"),
                "start the operator there, or delete what it has left behind: groups cannot be written until then",
            ),
            some => findings.push_ok("webhooks", format!("{what}: {} of {namespace}/{name}", count(some, "endpoint"))),
        }
    }
}

#[derive(Default)]
struct DoctorFindings(Vec<DoctorFinding>);

impl DoctorFindings {
    fn push_ok(&mut self, about: &'static str, what: String) {
        self.0.push(DoctorFinding { about, is_fault: false, what, mend: String::new() });
    }

    fn push_problem(&mut self, about: &'static str, what: String, mend: &str) {
        self.0.push(DoctorFinding { about, is_fault: true, what, mend: mend.to_owned() });
    }

    fn push_unreadable(&mut self, about: &'static str, why: &str) {
        self.push_problem(
            about,
            format!("cannot be looked at: {why}"),
            "use an account that may list them, or ask who has one",
        );
    }
}

/// Whether one operator works.
fn operator(findings: &mut DoctorFindings, leases: &[Value], now: Timestamp) {
    let mut working = Vec::new();
    for lease in leases {
        let spec = &lease["spec"];
        let place = format!("{}/{LEASE}", lease["metadata"]["namespace"].as_str().unwrap_or_default());
        let holder = spec["holderIdentity"].as_str().unwrap_or_default();
        let renewed = spec["renewTime"].as_str().and_then(|time| time.parse::<Timestamp>().ok());
        let age = renewed.map(|renewed| now.duration_since(renewed).as_secs());
        let lasts = spec["leaseDurationSeconds"].as_i64().unwrap_or(15);
        if !holder.is_empty() && age.is_some_and(|age| age <= lasts) {
            working.push(format!("{holder} (Lease {place})"));
        }
    }
    match working.as_slice() {
        [] if leases.is_empty() => findings.push_problem(
            "operator",
            format!("there is no Lease {LEASE}: no operator has worked here, or only one without --leader-elect"),
            "start moongate operator; without --leader-elect it has no Lease, which is all right while it is the only one",
        ),
        [] => findings.push_problem(
            "operator",
            "the Lease has run out: groups go on as they are, and nothing is updated, scaled or replaced".to_owned(),
            "look at the operator's pods and their logs",
        ),
        [one] => findings.push_ok("operator", format!("{one} works")),
        several => findings.push_problem(
            "operator",
            format!("{} operators work at the same time: {}", several.len(), several.join(", ")),
            "stop all but one: they undo each other's work",
        ),
    }
}

fn groups_of(findings: &mut DoctorFindings, groups: &[(String, Vec<String>)]) {
    if groups.is_empty() {
        findings.push_ok("groups", "there is none in this namespace".to_owned());
    }
    for (name, waits_for) in groups {
        match waits_for.is_empty() {
            true => findings.push_ok("groups", format!("{name} is ready")),
            false => {
                let why = waits_for.join("; ");
                findings.push_problem(
                    "groups",
                    format!("{name} is not ready: {why}"),
                    &format!("kubectl moongate status {name} tells more"),
                );
            }
        }
    }
}

/// As a person reads it.
#[must_use]
pub fn findings_text(findings: &[DoctorFinding]) -> String {
    let mut text = String::new();
    let mut about = "";
    for finding in findings {
        if finding.about != about {
            about = finding.about;
            text += &format!("{about}\n");
        }
        let mark = if finding.is_fault { "FAULT" } else { "ok   " };
        text += &format!("  {mark} {}\n", finding.what);
        if !finding.mend.is_empty() {
            text += &format!("        mend: {}\n", finding.mend);
        }
    }
    let faults = findings.iter().filter(|finding| finding.is_fault).count();
    text + &match faults {
        0 => "\nNothing is wrong.\n".to_owned(),
        faults => format!("\n{}.\n", count(faults, "fault")),
    }
}

async fn list(
    client: &Client,
    group: &str,
    version: &str,
    kind: &str,
    plural: &str,
    name: Option<&str>,
) -> Result<Vec<Value>, String> {
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural);
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let mut params = ListParams::default();
    if let Some(name) = name {
        params = params.fields(&format!("metadata.name={name}"));
    }
    let list = api.list(&params).await.map_err(|error| match error {
        Error::Api(status) => status.message.clone(),
        error => error.to_string(),
    })?;
    Ok(list.items.into_iter().map(|object| serde_json::to_value(object).unwrap_or_default()).collect())
}
