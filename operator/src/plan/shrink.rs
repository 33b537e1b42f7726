//! Writes to workloads of which instances are removed.

use moongate_render::Manifest;
use rbg_api::keys;
use rbg_api::template::member_object;
use serde_json::{Value, json};

use super::desired_roles::{DesiredRole, is_observed};
use super::{ReconcilePlan, WriteAction};
use crate::ResourceKind;

/// Records the removal in steps that the role takes part in.
pub(super) fn record(target: &DesiredRole, manifest: &mut Manifest) {
    if let Some(scale_in) = target.scale_in {
        let metadata = member_object(&mut manifest.0, "metadata");
        member_object(metadata, "annotations").insert(keys::SCALE_IN.to_owned(), scale_in.to_string().into());
    }
}

/// Removes instances of a role that waits for another one. Only its other changes wait: the other role may be waiting for this
/// removal.
pub(super) fn shrink_blocked(
    role: &str,
    live: Option<&Value>,
    manifest: &Manifest,
    plan: &mut ReconcilePlan,
) {
    let Some(live) = live else { return };
    let wanted = Value::Object(manifest.0.clone());
    let (replicas, before) = (wanted["spec"]["replicas"].as_i64(), live["spec"]["replicas"].as_i64());
    if replicas.zip(before).is_none_or(|(replicas, before)| replicas >= before) {
        return;
    }
    let annotations = &wanted["metadata"]["annotations"];
    let kept = [keys::ROLE_SIZE, keys::SCALE_IN].map(|key| (key.to_owned(), annotations[key].clone()));
    let annotations: serde_json::Map<String, Value> = kept.into_iter().collect();
    push_replicas(live, &replicas.into(), annotations, format!("{role}: it has too many instances"), plan);
}

/// Drains the instances of a set whose role was removed, if they have upgrade hooks. Returns whether there are any.
pub(super) fn drain_orphan(set: &Value, plan: &mut ReconcilePlan) -> bool {
    let components = set["spec"]["roleInstanceTemplate"]["components"].as_array().into_iter().flatten();
    let has_hooks = |component: &Value| {
        component["template"]["metadata"]["annotations"].get(keys::UPGRADE_HOOKS).is_some()
    };
    if !components.into_iter().any(has_hooks) {
        return false;
    }
    if set["spec"]["replicas"] != 0 {
        let reason = "no role of the group uses this workload any more: its instances drain".to_owned();
        push_replicas(set, &0.into(), serde_json::Map::new(), reason, plan);
        return true;
    }
    !is_observed(set) || set["status"]["replicas"].as_i64().is_some_and(|replicas| replicas > 0)
}

fn push_replicas(
    live: &Value,
    replicas: &Value,
    annotations: serde_json::Map<String, Value>,
    reason: String,
    plan: &mut ReconcilePlan,
) {
    let (Some(kind), Some(name)) =
        (live["kind"].as_str().and_then(ResourceKind::parse), live["metadata"]["name"].as_str())
    else {
        return;
    };
    let body = json!({ "metadata": { "uid": live["metadata"]["uid"], "annotations": annotations },
        "spec": { "replicas": replicas } });
    plan.push(WriteAction::Patch { kind, name: name.to_owned(), status: false, body }, reason);
}
