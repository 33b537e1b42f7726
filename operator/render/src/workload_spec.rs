//! Specs of workloads, for each kind of workload.

use rbg_api::v1alpha2::{RestartPolicy, RestartPolicyConfig, RollingUpdate};
use rbg_api::{IntOrPercent, RoundingMode, keys};
use serde_json::{Value, json};

use crate::error::RenderError;
use crate::pod_template::PodTemplates;
use crate::role::{ResolvedRole, RolePattern, RoleTarget};
use crate::workload_kind::PreservedFields;

pub(crate) fn role_instance_set(role: &ResolvedRole<'_>, target: &RoleTarget) -> Result<Value, RenderError> {
    Ok(json!({
        "selector": { "matchLabels": role.selector() },
        "replicas": target.replicas,
        "minReadySeconds": role.spec.min_ready_seconds,
        "podManagementPolicy": role.spec.pod_management_policy.as_deref().unwrap_or("Parallel"),
        "revisionHistoryLimit": 10,
        "updateStrategy": update_strategy(role, target)?,
        "roleInstanceTemplate": instance_template(role)?,
    }))
}

fn update_strategy(role: &ResolvedRole<'_>, target: &RoleTarget) -> Result<Value, RenderError> {
    let rolling = role.rolling_update();
    let kind = rolling.and_then(|rolling| rolling.kind.as_deref()).filter(|kind| !kind.is_empty());
    let kind = match kind {
        // Name in v1alpha1, as upstream's conversion stored it.
        Some("Recreate") => "RecreatePod",
        Some(kind) => kind,
        None => "InPlaceIfPossible",
    };
    let role_bound = |value: fn(&RollingUpdate) -> &Option<IntOrPercent>| {
        rolling.and_then(|rolling| value(rolling).clone())
    };
    let unavailable =
        target.max_unavailable.clone().or_else(|| role_bound(|rolling| &rolling.max_unavailable));
    let unavailable = unavailable.unwrap_or(IntOrPercent::Int(1));
    let surge = role_bound(|rolling| &rolling.max_surge).unwrap_or(IntOrPercent::Int(0));
    if is_zero_bound(&unavailable) && is_zero_bound(&surge) {
        return Err(RenderError::NoProgress(role.spec.name.clone()));
    }
    let partition = target.partition.clone().or_else(|| role_bound(|rolling| &rolling.partition));
    Ok(json!({
        "type": kind,
        "paused": rolling.is_some_and(|rolling| rolling.paused),
        "partition": partition.unwrap_or(IntOrPercent::Int(0)),
        "maxUnavailable": unavailable,
        "maxSurge": surge,
        "inPlaceUpdateStrategy": rolling.and_then(|rolling| rolling.in_place_update_strategy.clone()),
    }))
}

fn restart_policy(role: &ResolvedRole<'_>) -> RestartPolicyConfig {
    match role.pattern {
        RolePattern::Standalone(_) => RestartPolicyConfig::resolve(None, None, RestartPolicy::None),
        RolePattern::LeaderWorker(pattern) => RestartPolicyConfig::resolve(
            pattern.restart_policy_config.as_ref(),
            pattern.restart_policy.as_deref(),
            RestartPolicy::Recreate,
        ),
        RolePattern::Custom(pattern) => RestartPolicyConfig::resolve(
            pattern.restart_policy_config.as_ref(),
            pattern.restart_policy.as_deref(),
            RestartPolicy::Recreate,
        ),
    }
}

fn instance_template(role: &ResolvedRole<'_>) -> Result<Value, RenderError> {
    let templates = PodTemplates::new(role, role.selector());
    let service = &role.names.service;
    let components = match role.pattern {
        RolePattern::Standalone(_) => {
            let template = templates.single(&[(keys::COMPONENT_SIZE, "1".to_owned())])?;
            json!([{ "name": role.spec.name, "size": 1, "serviceName": service, "template": template }])
        }
        RolePattern::LeaderWorker(pattern) => {
            let size = pattern.size.unwrap_or(1).max(1);
            let labels = |name: &str| {
                [(keys::COMPONENT_NAME, name.to_owned()), (keys::COMPONENT_SIZE, size.to_string())]
            };
            let leader = templates.leader(pattern, &labels("leader"))?;
            let worker = templates.worker(pattern, &labels("worker"))?;
            let worker_service = (!role.serves_leaders_only()).then_some(service);
            json!([
                { "name": "leader", "size": 1, "serviceName": service, "template": leader },
                { "name": "worker", "size": size - 1, "serviceName": worker_service, "template": worker },
            ])
        }
        RolePattern::Custom(pattern) => {
            let components = pattern.components.iter().map(|component| {
                let service_name = component.service_name.as_ref().filter(|name| !name.is_empty());
                Ok(json!({
                    "name": component.name,
                    "size": component.size(),
                    "serviceName": service_name.unwrap_or(service),
                    "labels": (!component.labels.is_empty()).then_some(&component.labels),
                    "annotations": (!component.annotations.is_empty()).then_some(&component.annotations),
                    "template": templates.component(component)?,
                }))
            });
            components.collect::<Result<Value, RenderError>>()?
        }
    };
    Ok(json!({ "restartPolicyConfig": restart_policy(role), "components": components }))
}

pub(crate) fn stateful_set(
    role: &ResolvedRole<'_>,
    target: &RoleTarget,
    preserved: &PreservedFields,
) -> Result<Value, RenderError> {
    let selector = preserved.selector.clone().unwrap_or_else(|| role.selector());
    let template = PodTemplates::new(role, selector.clone()).external_pod(preserved)?;
    Ok(json!({
        "serviceName": role.names.service,
        "replicas": target.replicas,
        "podManagementPolicy": "Parallel",
        "minReadySeconds": min_ready_seconds(role),
        "selector": { "matchLabels": selector },
        "template": template,
        "updateStrategy": {
            "type": "RollingUpdate",
            "rollingUpdate": { "partition": resolve_count(target.partition.as_ref(), target.replicas).unwrap_or(0) },
        },
    }))
}

pub(crate) fn deployment(
    role: &ResolvedRole<'_>,
    target: &RoleTarget,
    preserved: &PreservedFields,
) -> Result<Value, RenderError> {
    let selector = preserved.selector.clone().unwrap_or_else(|| role.selector());
    let template = PodTemplates::new(role, selector.clone()).external_pod(preserved)?;
    let rolling = role.rolling_update();
    let strategy = rolling.map(|rolling| {
        let bounds = json!({
            "maxSurge": rolling.max_surge,
            "maxUnavailable": target.max_unavailable.as_ref().or(rolling.max_unavailable.as_ref()),
        });
        json!({ "type": "RollingUpdate", "rollingUpdate": bounds })
    });
    Ok(json!({
        "replicas": target.replicas,
        "minReadySeconds": min_ready_seconds(role),
        "selector": { "matchLabels": selector },
        "template": template,
        "strategy": strategy,
    }))
}

pub(crate) fn leader_worker_set(
    role: &ResolvedRole<'_>,
    target: &RoleTarget,
    preserved: &PreservedFields,
) -> Result<Value, RenderError> {
    let templates = PodTemplates::new(role, role.selector());
    let (size, leader, worker) = match role.pattern {
        RolePattern::LeaderWorker(pattern) => {
            let leader = templates.external_leader(pattern, preserved)?;
            (pattern.size.unwrap_or(1), Some(leader), templates.external_worker(pattern, preserved)?)
        }
        _ => (1, None, templates.external_pod(preserved)?),
    };
    let policy = restart_policy(role).kind;
    let policy = match policy.as_deref().and_then(RestartPolicy::parse) {
        Some(RestartPolicy::Recreate) => "RecreateGroupOnPodRestart",
        Some(RestartPolicy::None) | None => "None",
    };
    let rolling = role.rolling_update();
    let partition =
        target.partition.as_ref().or_else(|| rolling.and_then(|rolling| rolling.partition.as_ref()));
    let bounds = json!({
        "partition": resolve_count(partition, target.replicas),
        "maxUnavailable": target
            .max_unavailable
            .as_ref()
            .or_else(|| rolling.and_then(|rolling| rolling.max_unavailable.as_ref())),
        "maxSurge": rolling.and_then(|rolling| rolling.max_surge.as_ref()),
    });
    let strategy = json!({ "type": "RollingUpdate", "rollingUpdateConfiguration": bounds });
    let has_bounds = rolling.is_some() || target.partition.is_some() || target.max_unavailable.is_some();
    Ok(json!({
        "replicas": target.replicas,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": has_bounds.then_some(strategy),
        "leaderWorkerTemplate": {
            "size": size,
            "restartPolicy": policy,
            "leaderTemplate": leader,
            "workerTemplate": worker,
        },
    }))
}

/// `None` for 0: the API server omits the default.
fn min_ready_seconds(role: &ResolvedRole<'_>) -> Option<i32> {
    Some(role.spec.min_ready_seconds).filter(|seconds| *seconds != 0)
}

/// Resolves a bound to a number, for kinds that accept no percentage.
fn resolve_count(bound: Option<&IntOrPercent>, replicas: i32) -> Option<i32> {
    bound.and_then(|bound| bound.of(replicas, RoundingMode::Up))
}

fn is_zero_bound(bound: &IntOrPercent) -> bool {
    match bound {
        IntOrPercent::Int(count) => *count <= 0,
        IntOrPercent::Text(_) => bound.percent().is_some_and(|percent| percent <= 0),
    }
}
