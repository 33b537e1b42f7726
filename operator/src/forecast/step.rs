//! Effect of a plan's step, for display.

use rbg_api::keys;
use serde::Serialize;
use serde_json::Value;

use super::{SimulatedApiServer, role};
use crate::ResourceKind;
use crate::plan::{IN_PLACE_GRACE, PlanStep, WriteAction};

/// Effect of a step on an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StepEffect {
    /// Containers with new images restart; the pod stays on its node.
    RestartInPlace,
    /// The pod is taken out of service, and restarts or is deleted when it has drained or after its grace period.
    Drain,
    /// The update of a pod has finished waiting.
    Settle,
    /// Labels or annotations change; nothing restarts.
    Relabel,
    /// An object that does not exist is created.
    Create,
    /// An object is deleted, also if that takes a grace period.
    Delete,
    /// A workload's template changes: its own controller recreates its pods.
    ReplacePods,
    /// Any other change of an object.
    Change,
}

impl StepEffect {
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

/// Change of one container's image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImageChange {
    pub container: String,
    pub from: String,
    pub to: String,
}

/// One step of a forecast.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ForecastStep {
    /// Delay since the start of the rollout, in seconds: grace periods, `minReadySeconds`, back-off. Restarts count as 0 s.
    pub delay_seconds: i64,
    pub effect: StepEffect,
    pub kind: &'static str,
    pub name: String,
    /// Role of the object; empty if it has none.
    pub role: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<ImageChange>,
    pub reason: String,
}

/// Effect of a step before it is carried out. Empty for changes of the operator's internal objects.
pub(super) fn for_step(
    step: &PlanStep,
    server: &SimulatedApiServer,
    delay_seconds: i64,
) -> Vec<ForecastStep> {
    let forecast_step = |effect, kind: ResourceKind, name: &str, role: &str, reason: String| ForecastStep {
        delay_seconds,
        effect,
        kind: kind.name(),
        name: name.to_owned(),
        role: role.to_owned(),
        images: Vec::new(),
        reason,
    };
    match &step.action {
        WriteAction::Patch { kind: ResourceKind::Pod, name, status: false, body } => {
            let live = server.get(ResourceKind::Pod, name).unwrap_or(&Value::Null);
            let (effect, images, reason) = pod_effect(live, body, &step.reason);
            vec![ForecastStep {
                images,
                ..forecast_step(effect, ResourceKind::Pod, name, role(live), reason)
            }]
        }
        WriteAction::Patch { kind: ResourceKind::Instance, status: false, body, .. }
            if body["metadata"]["annotations"][keys::LIFECYCLE_DRAIN] == "true" =>
        {
            let uid = body["metadata"]["uid"].as_str().unwrap_or_default();
            let has_hooks = |pod: &&Value| pod["metadata"]["annotations"].get(keys::UPGRADE_HOOKS).is_some();
            let drained = pods_of(server, uid).into_iter().filter(has_hooks);
            let drain = |pod: &Value| {
                let name = pod["metadata"]["name"].as_str().unwrap_or_default();
                forecast_step(StepEffect::Drain, ResourceKind::Pod, name, role(pod), step.reason.clone())
            };
            drained.map(drain).collect()
        }
        WriteAction::Apply(manifest) | WriteAction::Create(manifest) => {
            let Some(kind) = ResourceKind::from_manifest(manifest).filter(|kind| is_reported(*kind)) else {
                return Vec::new();
            };
            let wanted = Value::Object(manifest.0.clone());
            let live = server.get(kind, manifest.name());
            let effect = match live {
                None => StepEffect::Create,
                Some(live) if makes_pods(kind) && !manifest_template_is_in(&wanted, live) => {
                    StepEffect::ReplacePods
                }
                Some(_) => StepEffect::Change,
            };
            vec![forecast_step(effect, kind, manifest.name(), role(&wanted), step.reason.clone())]
        }
        WriteAction::Replace { kind: ResourceKind::Group, name, .. } => {
            vec![forecast_step(StepEffect::Change, ResourceKind::Group, name, "", step.reason.clone())]
        }
        WriteAction::Delete { kind, name, uid } if *kind != ResourceKind::Revision => {
            let current =
                matches!(kind, ResourceKind::Pod).then(|| server.get(ResourceKind::Pod, name)).flatten();
            let pods = current.into_iter().chain(pods_of(server, uid));
            let pods = pods.filter_map(|pod| Some((pod["metadata"]["name"].as_str()?, role(pod))));
            let mut all: Vec<ForecastStep> = pods
                .map(|(name, role)| {
                    forecast_step(StepEffect::Delete, ResourceKind::Pod, name, role, step.reason.clone())
                })
                .collect();
            if is_reported(*kind) && *kind != ResourceKind::Pod {
                let live = server.get(*kind, name).unwrap_or(&Value::Null);
                all.push(forecast_step(StepEffect::Delete, *kind, name, role(live), step.reason.clone()));
            }
            all
        }
        _ => Vec::new(),
    }
}

/// Sets, instances, revisions and pull pods are internal; only the roles' pods are reported.
fn is_reported(kind: ResourceKind) -> bool {
    !matches!(
        kind,
        ResourceKind::Set | ResourceKind::Instance | ResourceKind::Revision | ResourceKind::WarmupPod
    )
}

/// Workloads whose pods are created by other controllers.
fn makes_pods(kind: ResourceKind) -> bool {
    matches!(kind, ResourceKind::StatefulSet | ResourceKind::Deployment | ResourceKind::LeaderWorkerSet)
}

pub(super) fn manifest_template_is_in(wanted: &Value, live: &Value) -> bool {
    let template = |object: &Value| {
        let spec = &object["spec"];
        let template = spec.get("template").or_else(|| spec.get("leaderWorkerTemplate"));
        template.and_then(Value::as_object).cloned().unwrap_or_default()
    };
    moongate_render::Manifest(template(wanted)).is_subset_of(&Value::Object(template(live)))
}

/// Effect of a pod patch: restart, drain, settle or relabel.
fn pod_effect(live: &Value, body: &Value, reason: &str) -> (StepEffect, Vec<ImageChange>, String) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let containers = |object: &Value| object["spec"]["containers"].as_array().cloned().unwrap_or_default();
    let mut images = Vec::new();
    for wanted in containers(body) {
        let current =
            containers(live).into_iter().find(|one| one["name"] == wanted["name"]).unwrap_or_default();
        if current["image"] != wanted["image"] {
            images.push(ImageChange {
                container: text(&wanted["name"]),
                from: text(&current["image"]),
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
        Some(0) => (StepEffect::Drain, images, "restarts when it has drained".to_owned()),
        Some(seconds) => (StepEffect::Drain, images, format!("restarts after a grace period of {seconds} s")),
        // Later patches of an update do not set labels: the first one has set them.
        None if body["metadata"]["labels"].is_null() => (StepEffect::Settle, images, reason.to_owned()),
        None => (StepEffect::Relabel, images, "no container differs".to_owned()),
    }
}

/// Pods owned by the object with that UID, directly or indirectly.
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
