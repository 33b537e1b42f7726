//! Status report of a group: its roles, their pods, and what they wait for.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;
use rbg_api::keys;
use serde::Serialize;
use serde_json::Value;

use super::cluster::{ClusterClient, GroupSnapshot};
use super::edit::text;
use super::images::{images, name_of};
use super::output_format::{age, indented, table};
use super::wait::RolloutProgress;
use super::{KubectlError, RevisionHistory};
use crate::{ResourceKind, status};

/// Number of events to show.
const EVENTS: usize = 10;

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupReport {
    pub namespace: String,
    pub name: String,
    /// Whether all roles match the group's spec and are ready.
    pub ready: bool,
    /// What the group waits for, as text lines.
    pub waiting_for: Vec<String>,
    /// The fault that the group recovers from, or why its policy does not act on faults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
    /// Number of the revision that equals the present spec.
    pub revision: Option<i64>,
    /// The RoleBasedGroupSet that controls the group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_set: Option<String>,
    /// Seconds since the group's creation.
    pub age_seconds: i64,
    pub roles: Vec<RoleReport>,
    /// The latest events about the group and its objects, oldest first.
    pub events: Vec<EventReport>,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RoleReport {
    pub name: String,
    /// Kind of the role's workload.
    pub workload: String,
    pub replicas: i64,
    pub ready: i64,
    /// Number of instances at the present spec.
    pub updated: i64,
    /// Images of the role's containers.
    pub images: Vec<String>,
    /// Why the role is not ready or not updated.
    pub waiting_for: Vec<String>,
    pub instances: Vec<InstanceReport>,
}

/// An instance with its pods.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InstanceReport {
    pub name: String,
    pub pods: Vec<PodReport>,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodReport {
    pub name: String,
    /// Phase of the pod, or the reason for which it does not run.
    pub state: String,
    /// Whether the pod's `Ready` condition is true.
    pub ready: bool,
    /// Total restarts of its containers.
    pub restarts: i64,
    /// Name of the pod's node.
    pub node: String,
    /// Revision hash of the pod.
    pub revision: String,
    pub images: Vec<String>,
    /// Seconds since the pod's creation.
    pub age_seconds: i64,
}

/// An event about the group or one of its objects.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EventReport {
    /// Seconds since the event was last observed.
    pub age_seconds: i64,
    /// `Normal` or `Warning`, as in the event.
    #[serde(rename = "type")]
    pub kind: String,
    /// Reason as one CamelCase word.
    pub reason: String,
    /// The regarded object as `Kind/name`.
    pub object: String,
    pub message: String,
}

impl GroupReport {
    /// Reads the status of a group.
    ///
    /// # Errors
    /// [`KubectlError`].
    pub async fn read(cluster: &ClusterClient, name: &str) -> Result<Self, KubectlError> {
        let group = cluster.group(name).await?;
        let snapshot = cluster.group_snapshot(name).await?;
        // Accounts with access to groups may lack permission for events.
        let events = cluster.events(&uids(&snapshot)).await.unwrap_or_default();
        Self::of(&group, &snapshot, &events, Timestamp::now())
    }

    /// Reads the status of all groups of the namespace, or of all namespaces; without events.
    ///
    /// # Errors
    /// [`KubectlError`].
    pub async fn all(cluster: &ClusterClient, all_namespaces: bool) -> Result<Vec<Self>, KubectlError> {
        let mut by_namespace: BTreeMap<String, Vec<Value>> = BTreeMap::new();
        for group in cluster.groups(all_namespaces).await? {
            by_namespace.entry(text(&group["metadata"]["namespace"])).or_default().push(group);
        }
        let mut reports = Vec::new();
        for (namespace, groups) in by_namespace {
            let namespace_snapshot = cluster.in_namespace(&namespace).namespace_snapshot().await?;
            for group in groups {
                let snapshot = namespace_snapshot.group_snapshot(&text(&group["metadata"]["name"]));
                reports.push(Self::of(&group, &snapshot, &[], Timestamp::now())?);
            }
        }
        Ok(reports)
    }

    /// Builds the report from a v1alpha2 group, its objects, and their events.
    pub fn of(
        group: &Value,
        snapshot: &GroupSnapshot,
        events: &[Value],
        now: Timestamp,
    ) -> Result<Self, KubectlError> {
        let history = RevisionHistory::read(group, snapshot)?;
        let roles = group["spec"]["roles"].as_array().into_iter().flatten();
        let roles: Vec<RoleReport> = roles.map(|spec| role(group, spec, snapshot, now)).collect();
        let waiting_for = match RolloutProgress::for_group(group) {
            RolloutProgress::Done => Vec::new(),
            RolloutProgress::Stuck(why) => vec![why],
            RolloutProgress::InProgress(lines) => lines,
        };
        let labels = &group["metadata"]["labels"];
        let latest = events.iter().skip(events.len().saturating_sub(EVENTS));
        Ok(Self {
            namespace: text(&group["metadata"]["namespace"]),
            name: text(&group["metadata"]["name"]),
            ready: waiting_for.is_empty(),
            waiting_for,
            fault: fault(group),
            revision: history.revisions.iter().find(|one| one.is_current).map(|one| one.number),
            group_set: labels[keys::GROUPSET_NAME].as_str().map(str::to_owned),
            age_seconds: seconds_since(&group["metadata"]["creationTimestamp"], now),
            roles,
            events: latest.map(|event| event_report(event, now)).collect(),
        })
    }

    /// Table row for a list of groups, with the columns of [`Self::TABLE_HEADER`].
    #[must_use]
    pub fn row(&self) -> Vec<String> {
        let sum = |number: &dyn Fn(&RoleReport) -> i64| self.roles.iter().map(number).sum::<i64>();
        let (all, ready) = (sum(&|role| role.replicas), sum(&|role| role.ready));
        vec![
            self.namespace.clone(),
            self.name.clone(),
            self.roles.len().to_string(),
            format!("{ready}/{all}"),
            sum(&|role| role.updated.min(role.replicas)).to_string(),
            self.revision.map(|number| number.to_string()).unwrap_or_default(),
            age(self.age_seconds),
            if self.ready { "ready".to_owned() } else { self.waiting_for.join("; ") },
        ]
    }

    pub const TABLE_HEADER: [&str; 8] =
        ["NAMESPACE", "NAME", "ROLES", "READY", "UPDATED", "REVISION", "AGE", "WAITING FOR"];

    /// Full text format of the report.
    #[must_use]
    pub fn text(&self) -> String {
        let revision = self.revision.map(|number| format!(", revision {number}")).unwrap_or_default();
        let of_set = self.group_set.as_ref().map(|set| format!(", of the set {set}")).unwrap_or_default();
        let state = if self.ready { "ready" } else { "not ready" };
        let mut text = format!(
            "{} in {}: {state}{revision}{of_set}, {} old\n",
            self.name,
            self.namespace,
            age(self.age_seconds)
        );
        for line in &self.waiting_for {
            text.push_str(&format!("  {line}\n"));
        }
        if let Some(fault) = &self.fault {
            text.push_str(&format!("  fault: {fault}\n"));
        }
        let rows = self.roles.iter().map(|role| {
            let images = role.images.join(", ");
            let ready = format!("{}/{}", role.ready, role.replicas);
            let reasons = role.waiting_for.join("; ");
            vec![role.name.clone(), ready, role.updated.to_string(), role.workload.clone(), images, reasons]
        });
        let rows: Vec<Vec<String>> = rows.collect();
        let head = ["ROLE", "READY", "UPDATED", "WORKLOAD", "IMAGES", "WAITING FOR"];
        text.push_str(&format!("\nRoles\n{}", indented(&table(&head, &rows))));
        let rows: Vec<Vec<String>> = self.roles.iter().flat_map(pod_rows).collect();
        if !rows.is_empty() {
            let head = ["ROLE", "INSTANCE", "POD", "READY", "STATE", "RESTARTS", "REVISION", "NODE", "AGE"];
            text.push_str(&format!("\nPods\n{}", indented(&table(&head, &rows))));
        }
        let rows = self.events.iter().map(|event| {
            let object = [&event.kind, &event.reason, &event.object, &event.message].map(String::clone);
            std::iter::once(age(event.age_seconds)).chain(object).collect()
        });
        let rows: Vec<Vec<String>> = rows.collect();
        if !rows.is_empty() {
            let head = ["AGE", "TYPE", "REASON", "OBJECT", "MESSAGE"];
            text.push_str(&format!("\nEvents\n{}", indented(&table(&head, &rows))));
        }
        text
    }
}

fn pod_rows(role: &RoleReport) -> impl Iterator<Item = Vec<String>> {
    role.instances.iter().flat_map(move |instance| {
        instance.pods.iter().map(move |pod| {
            vec![
                role.name.clone(),
                instance.name.clone(),
                pod.name.clone(),
                if pod.ready { "yes" } else { "no" }.to_owned(),
                pod.state.clone(),
                pod.restarts.to_string(),
                pod.revision.clone(),
                pod.node.clone(),
                age(pod.age_seconds),
            ]
        })
    })
}

fn seconds_since(time: &Value, now: Timestamp) -> i64 {
    let time: Option<Timestamp> = time.as_str().and_then(|time| time.parse().ok());
    time.map_or(0, |time| now.duration_since(time).as_secs())
}

fn label<'a>(object: &'a Value, key: &str) -> &'a str {
    object["metadata"]["labels"][key].as_str().unwrap_or_default()
}

fn role(group: &Value, spec: &Value, snapshot: &GroupSnapshot, now: Timestamp) -> RoleReport {
    let name = name_of(spec);
    let statuses = group["status"]["roleStatuses"].as_array().into_iter().flatten();
    let status = statuses.into_iter().find(|status| status["name"] == name.as_str());
    let number = |member: &str| status.and_then(|status| status[member].as_i64()).unwrap_or(0);
    let kinds = [
        ResourceKind::Set,
        ResourceKind::StatefulSet,
        ResourceKind::Deployment,
        ResourceKind::LeaderWorkerSet,
    ];
    let mut workloads = kinds.into_iter().flat_map(|kind| snapshot.server.all(kind));
    let workload = workloads.find(|live| label(live, keys::ROLE_NAME) == name);
    let mut instances: BTreeMap<String, Vec<PodReport>> = BTreeMap::new();
    let pods =
        [ResourceKind::Pod, ResourceKind::ForeignPod].into_iter().flat_map(|kind| snapshot.server.all(kind));
    for pod in pods.filter(|pod| label(pod, keys::ROLE_NAME) == name) {
        let names =
            [label(pod, keys::ROLE_INSTANCE_NAME), pod["metadata"]["name"].as_str().unwrap_or_default()];
        let instance = names.into_iter().find(|name| !name.is_empty()).unwrap_or_default();
        instances.entry(instance.to_owned()).or_default().push(pod_report(pod, now));
    }
    let mut report = RoleReport {
        replicas: spec["replicas"].as_i64().unwrap_or(1),
        ready: number("readyReplicas"),
        updated: number("updatedReplicas"),
        workload: workload.map(|live| text(&live["kind"])).unwrap_or_default(),
        images: images(spec, &group["spec"]["roleTemplates"]),
        waiting_for: Vec::new(),
        instances: instances.into_iter().map(|(name, pods)| InstanceReport { name, pods }).collect(),
        name,
    };
    report.waiting_for = waiting_for(group, spec, &report);
    report
}

/// What a role waits for: other roles, its pods, or the end of a pause or partition.
fn waiting_for(group: &Value, spec: &Value, role: &RoleReport) -> Vec<String> {
    let mut reasons = Vec::new();
    let is_ready = |name: &str| {
        let statuses = group["status"]["roleStatuses"].as_array().into_iter().flatten();
        let roles = group["spec"]["roles"].as_array().into_iter().flatten();
        let wanted = roles.into_iter().find(|role| role["name"] == name).map(|role| &role["replicas"]);
        statuses.into_iter().any(|one| one["name"] == name && Some(&one["readyReplicas"]) == wanted)
    };
    if role.ready < role.replicas || role.updated < role.replicas {
        let others = spec["dependencies"].as_array().into_iter().flatten().filter_map(Value::as_str);
        reasons.extend(others.filter(|name| !is_ready(name)).map(|name| format!("role {name}")));
    }
    let pods = role.instances.iter().flat_map(|instance| &instance.pods);
    reasons.extend(pods.filter(|pod| !pod.ready).map(|pod| format!("pod {}: {}", pod.name, pod.state)));
    let rolling = &spec["rolloutStrategy"]["rollingUpdate"];
    if role.updated < role.replicas && role.ready > 0 {
        if rolling["paused"] == true {
            reasons.push("its update is paused".to_owned());
        } else if rolling["partition"].as_i64().unwrap_or(0) > 0 || rolling["partition"].is_string() {
            reasons.push(format!("its partition, {}", rolling["partition"]));
        }
    }
    reasons
}

fn pod_report(pod: &Value, now: Timestamp) -> PodReport {
    let statuses = || pod["status"]["containerStatuses"].as_array().into_iter().flatten();
    let containers = pod["spec"]["containers"].as_array().into_iter().flatten();
    PodReport {
        name: text(&pod["metadata"]["name"]),
        state: state(pod),
        ready: crate::forecast::has(pod, "Ready"),
        restarts: statuses().filter_map(|status| status["restartCount"].as_i64()).sum(),
        node: text(&pod["spec"]["nodeName"]),
        revision: label(pod, keys::CONTROLLER_REVISION_HASH).to_owned(),
        images: containers.map(|container| text(&container["image"])).collect(),
        age_seconds: seconds_since(&pod["metadata"]["creationTimestamp"], now),
    }
}

/// Message of the group's condition for faults, unless it has recovered.
fn fault(group: &Value) -> Option<String> {
    let mut conditions = group["status"]["conditions"].as_array()?.iter();
    let condition = conditions.find(|condition| condition["type"] == status::FAULT_RECOVERY)?;
    let reasons = [status::INSTANCE_FAULT, status::FAULT_BUDGET_EXHAUSTED, status::INVALID_POLICY];
    reasons.iter().any(|reason| condition["reason"] == *reason).then(|| text(&condition["message"]))
}

/// The reason for which a pod is not ready, as kubectl shows it; otherwise its phase.
fn state(pod: &Value) -> String {
    if pod["metadata"].get("deletionTimestamp").is_some() {
        return "Terminating".to_owned();
    }
    let statuses = pod["status"]["containerStatuses"].as_array().into_iter().flatten();
    let reasons = statuses.filter_map(|status| {
        let state = &status["state"];
        state["waiting"]["reason"].as_str().or_else(|| state["terminated"]["reason"].as_str())
    });
    if let Some(reason) = reasons.into_iter().next() {
        return reason.to_owned();
    }
    let conditions = || pod["status"]["conditions"].as_array().into_iter().flatten();
    let unscheduled = conditions().find(|one| one["type"] == "PodScheduled" && one["status"] == "False");
    if let Some(unscheduled) = unscheduled {
        return text(&unscheduled["reason"]);
    }
    let gates = pod["spec"]["readinessGates"].as_array().into_iter().flatten();
    let mut closed = gates.filter_map(|gate| gate["conditionType"].as_str());
    let closed =
        closed.find(|gate| crate::forecast::has(pod, "ContainersReady") && !crate::forecast::has(pod, gate));
    closed.map_or_else(|| text(&pod["status"]["phase"]), |gate| format!("gate {gate} is closed"))
}

/// Time of an event's last observation, RFC 3339.
pub(super) fn event_time(event: &Value) -> &str {
    let times = ["/series/lastObservedTime", "/lastTimestamp", "/eventTime", "/metadata/creationTimestamp"];
    times.into_iter().find_map(|time| event.pointer(time)?.as_str()).unwrap_or_default()
}

fn event_report(event: &Value, now: Timestamp) -> EventReport {
    let object = &event["involvedObject"];
    EventReport {
        age_seconds: seconds_since(&event_time(event).into(), now),
        kind: text(&event["type"]),
        reason: text(&event["reason"]),
        object: format!("{}/{}", text(&object["kind"]), text(&object["name"])),
        message: text(&event["message"]),
    }
}

/// UIDs of a group and its objects.
fn uids(snapshot: &GroupSnapshot) -> BTreeSet<String> {
    snapshot
        .server
        .objects()
        .filter_map(|(_, object)| Some(object["metadata"]["uid"].as_str()?.to_owned()))
        .collect()
}
