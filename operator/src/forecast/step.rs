//! What a step of a plan means to a person.

use serde::Serialize;
use serde_json::Value;

use super::{SimulatedApiServer, role};
use crate::ResourceKind;
use crate::plan::{IN_PLACE_GRACE, PlanStep, WriteAction};

/// What is done to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StepEffect {
    /// The containers whose images change restart; the pod stays where it is.
    RestartInPlace,
    /// The pod serves nobody any more, and restarts when it has drained, or after its grace period.
    Drain,
    /// What the update of a pod waited for is over.
    Settle,
    /// Labels or annotations change; nothing restarts.
    Relabel,
    /// A new object.
    Create,
    /// The end of one.
    Delete,
    /// A workload gets another template: its own controller makes its pods anew.
    ReplacePods,
    /// Anything else that changes.
    Change,
}

impl StepEffect {
    /// In a few words.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RestartInPlace => "restart in place",
            Self::Drain => "drain",
            Self::Settle => "settle",
            Self::Relabel => "relabel",
            Self::Create => "create",
            Self::Delete => "delete",
            Self::ReplacePods => "replace pods",
            Self::Change => "change",
        }
    }
}

/// The image of one container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImageChange {
    /// The container.
    pub container: String,
    /// What it runs now.
    pub from: String,
    /// What it will run.
    pub to: String,
}

/// One thing that will be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ForecastStep {
    /// Seconds that were waited until then: grace periods, `minReadySeconds`, back-off. Restarts take none here.
    pub waited_seconds: i64,
    /// What.
    pub what: StepEffect,
    /// Kind of the object.
    pub kind: &'static str,
    /// Its name.
    pub name: String,
    /// Its role; empty if it is of none.
    pub role: String,
    /// Images that change.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<ImageChange>,
    /// Why.
    pub reason: String,
}

/// What the step means, before it is done. Nothing, if only the operator's own bookkeeping changes.
pub(super) fn for_step(
    step: &PlanStep,
    server: &SimulatedApiServer,
    waited_seconds: i64,
) -> Vec<ForecastStep> {
    let about = |what, kind: ResourceKind, name: &str, role: &str, reason: String| ForecastStep {
        waited_seconds,
        what,
        kind: kind.name(),
        name: name.to_owned(),
        role: role.to_owned(),
        images: Vec::new(),
        reason,
    };
    match &step.action {
        WriteAction::Patch { kind: ResourceKind::Pod, name, status: false, body } => {
            let live = server.get(ResourceKind::Pod, name).unwrap_or(&Value::Null);
            let (what, images, reason) = pod_effect(live, body, &step.reason);
            vec![ForecastStep { images, ..about(what, ResourceKind::Pod, name, role(live), reason) }]
        }
        WriteAction::Apply(manifest) | WriteAction::Create(manifest) => {
            let Some(kind) = ResourceKind::from_manifest(manifest).filter(|kind| is_reported(*kind)) else {
                return Vec::new();
            };
            let wanted = Value::Object(manifest.0.clone());
            let live = server.get(kind, manifest.name());
            let what = match live {
                None => StepEffect::Create,
                Some(live) if makes_pods(kind) && !manifest_template_is_in(&wanted, live) => {
                    StepEffect::ReplacePods
                }
                Some(_) => StepEffect::Change,
            };
            vec![about(what, kind, manifest.name(), role(&wanted), step.reason.clone())]
        }
        WriteAction::Replace { kind: ResourceKind::Group, name, .. } => {
            vec![about(StepEffect::Change, ResourceKind::Group, name, "", step.reason.clone())]
        }
        WriteAction::Delete { kind, name, uid } if *kind != ResourceKind::Revision => {
            let own =
                matches!(kind, ResourceKind::Pod).then(|| server.get(ResourceKind::Pod, name)).flatten();
            let pods = own.into_iter().chain(pods_of(server, uid));
            let pods = pods.filter_map(|pod| Some((pod["metadata"]["name"].as_str()?, role(pod))));
            let mut all: Vec<ForecastStep> = pods
                .map(|(name, role)| {
                    about(StepEffect::Delete, ResourceKind::Pod, name, role, step.reason.clone())
                })
                .collect();
            if is_reported(*kind) && *kind != ResourceKind::Pod {
                let live = server.get(*kind, name).unwrap_or(&Value::Null);
                all.push(about(StepEffect::Delete, *kind, name, role(live), step.reason.clone()));
            }
            all
        }
        _ => Vec::new(),
    }
}

/// Sets, instances, revisions and pods that pull images are the operator's own means; the roles' pods tell.
fn is_reported(kind: ResourceKind) -> bool {
    !matches!(
        kind,
        ResourceKind::Set | ResourceKind::Instance | ResourceKind::Revision | ResourceKind::WarmupPod
    )
}

/// Workloads whose pods others make.
fn makes_pods(kind: ResourceKind) -> bool {
    matches!(kind, ResourceKind::StatefulSet | ResourceKind::Deployment | ResourceKind::LeaderWorkerSet)
}

fn manifest_template_is_in(wanted: &Value, live: &Value) -> bool {
    let template = |object: &Value| {
        let spec = &object["spec"];
        let template = spec.get("template").or_else(|| spec.get("leaderWorkerTemplate"));
        template.and_then(Value::as_object).cloned().unwrap_or_default()
    };
    moongate_render::Manifest(template(wanted)).is_subset_of(&Value::Object(template(live)))
}

/// Restart, drain or new labels: what a patch of a pod comes to.
fn pod_effect(live: &Value, body: &Value, why: &str) -> (StepEffect, Vec<ImageChange>, String) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let containers = |object: &Value| object["spec"]["containers"].as_array().cloned().unwrap_or_default();
    let mut images = Vec::new();
    for wanted in containers(body) {
        let own = containers(live).into_iter().find(|one| one["name"] == wanted["name"]).unwrap_or_default();
        if own["image"] != wanted["image"] {
            images.push(ImageChange {
                container: text(&wanted["name"]),
                from: text(&own["image"]),
                to: text(&wanted["image"]),
            });
        }
    }
    if !images.is_empty() {
        return (StepEffect::RestartInPlace, images, "only images differ".to_owned());
    }
    let grace = body["metadata"]["annotations"][IN_PLACE_GRACE].as_str();
    let grace: Option<Value> = grace.and_then(|text| serde_json::from_str(text).ok());
    match grace.and_then(|grace| grace["graceSeconds"].as_u64()) {
        Some(0) => (StepEffect::Drain, images, "it restarts when it has drained".to_owned()),
        Some(seconds) => (StepEffect::Drain, images, format!("its grace period is {seconds} s")),
        // An update that goes on has set the labels when it began.
        None if body["metadata"]["labels"].is_null() => (StepEffect::Settle, images, why.to_owned()),
        None => (StepEffect::Relabel, images, "no container differs".to_owned()),
    }
}

/// Pods that belong to the owner of that UID, however far down.
fn pods_of<'a>(server: &'a SimulatedApiServer, owner: &str) -> Vec<&'a Value> {
    let is_owned = |object: &Value, owner: &str| {
        let owners = object["metadata"]["ownerReferences"].as_array().into_iter().flatten();
        owners.into_iter().any(|one| one["uid"] == owner)
    };
    let mut pods = Vec::new();
    for (kind, object) in server.objects().filter(|(_, object)| is_owned(object, owner)) {
        match kind {
            ResourceKind::Pod => pods.push(object),
            _ => pods.extend(pods_of(server, object["metadata"]["uid"].as_str().unwrap_or_default())),
        }
    }
    pods
}
