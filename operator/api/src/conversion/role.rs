//! Conversion of one role.

use serde_json::{Map, Value, json};

use super::spec::{drop_empty, put_object, take_object};
use crate::keys::ROLE_WORKLOAD_TYPE;
use crate::template::member_object;

type JsonObject = Map<String, Value>;

/// Default workload of a role in v1alpha1.
const V1ALPHA1_WORKLOAD: (&str, &str) = ("apps/v1", "StatefulSet");
/// Default workload of a role in v1alpha2.
const V1ALPHA2_WORKLOAD: (&str, &str) = ("workloads.x-k8s.io/v1alpha2", "RoleInstanceSet");

/// Restart policy of early releases, with its present equivalent.
const RECREATE_GROUP: &str = "RecreateRBGOnPodRestart";
const RECREATE_INSTANCE: &str = "RecreateRoleInstanceOnPodRestart";

/// Update type that recreates pods, in v1alpha1 and v1alpha2.
const RECREATE: (&str, &str) = ("Recreate", "RecreatePod");

/// Converts a role from v1alpha1 to v1alpha2.
pub(super) fn role_to_v1alpha2(role: &mut JsonObject) {
    let workload = take_object(role, "workload").unwrap_or_default();
    let text = |name: &str, default: &str| {
        let text = workload.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
        text.unwrap_or(default).to_owned()
    };
    let kind = format!("{}/{}", text("apiVersion", V1ALPHA1_WORKLOAD.0), text("kind", V1ALPHA1_WORKLOAD.1));
    member_object(role, "annotations").insert(ROLE_WORKLOAD_TYPE.to_owned(), kind.into());
    rename_update(role, RECREATE.0, RECREATE.1);

    let restart = role.remove("restartPolicy").filter(|policy| policy != "");
    let restart =
        restart.map(|policy| if policy == RECREATE_GROUP { RECREATE_INSTANCE.into() } else { policy });
    if let Some(mut pattern) = take_object(role, "leaderWorkerSet") {
        rename(&mut pattern, "patchLeaderTemplate", "leaderTemplatePatch");
        rename(&mut pattern, "patchWorkerTemplate", "workerTemplatePatch");
        template_to_v1alpha2(role, &mut pattern);
        restart_policy_to_v1alpha2(&mut pattern, restart);
        put_object(role, "leaderWorkerPattern", Some(pattern));
    } else if role
        .get("components")
        .and_then(Value::as_array)
        .is_some_and(|components| !components.is_empty())
    {
        let mut pattern = JsonObject::new();
        pattern.extend(role.remove("components").map(|components| ("components".to_owned(), components)));
        restart_policy_to_v1alpha2(&mut pattern, restart);
        put_object(role, "customComponentsPattern", Some(pattern));
    } else {
        let mut pattern = JsonObject::new();
        template_to_v1alpha2(role, &mut pattern);
        put_object(role, "standalonePattern", Some(pattern));
    }
}

fn restart_policy_to_v1alpha2(pattern: &mut JsonObject, restart: Option<Value>) {
    if let Some(kind) = restart {
        pattern.insert("restartPolicyConfig".to_owned(), json!({ "type": kind }));
    }
}

fn template_to_v1alpha2(role: &mut JsonObject, pattern: &mut JsonObject) {
    if let Some(template) = role.remove("template") {
        pattern.insert("template".to_owned(), template);
    }
    let patch = role.remove("templatePatch");
    if let Some(mut reference) = take_object(role, "templateRef") {
        reference.extend(patch.map(|patch| ("patch".to_owned(), patch)));
        put_object(pattern, "templateRef", Some(reference));
    }
}

/// Converts a role from v1alpha2 to v1alpha1.
pub(super) fn role_to_v1alpha1(role: &mut JsonObject) {
    let workload = take_workload(role);
    put_object(role, "workload", Some(workload));
    rename_update(role, RECREATE.1, RECREATE.0);

    let leader_worker = take_object(role, "leaderWorkerPattern");
    let custom = take_object(role, "customComponentsPattern");
    let standalone = take_object(role, "standalonePattern");
    if let Some(mut pattern) = leader_worker {
        rename(&mut pattern, "leaderTemplatePatch", "patchLeaderTemplate");
        rename(&mut pattern, "workerTemplatePatch", "patchWorkerTemplate");
        template_to_v1alpha1(role, &mut pattern);
        restart_policy_to_v1alpha1(role, &mut pattern);
        pattern.remove("sharedServiceSelection");
        put_object(role, "leaderWorkerSet", Some(pattern));
    } else if let Some(mut pattern) = custom {
        role.extend(pattern.remove("components").map(|components| ("components".to_owned(), components)));
        components_to_v1alpha1(role);
        restart_policy_to_v1alpha1(role, &mut pattern);
    } else if let Some(mut pattern) = standalone {
        template_to_v1alpha1(role, &mut pattern);
    }
    role.remove("podManagementPolicy");
    if let Some(Value::Object(adapter)) = role.get_mut("scalingAdapter") {
        adapter.remove("labels");
    }
}

/// The `workload` field of v1alpha1, from the annotation.
fn take_workload(role: &mut JsonObject) -> JsonObject {
    let annotations = role.get_mut("annotations").and_then(Value::as_object_mut);
    let kind = annotations.and_then(|annotations| annotations.remove(ROLE_WORKLOAD_TYPE));
    drop_empty(role, "annotations");
    let split = kind.as_ref().and_then(Value::as_str).and_then(|kind| kind.rsplit_once('/'));
    let (api_version, kind) = split.unwrap_or(V1ALPHA2_WORKLOAD);
    [("apiVersion", api_version), ("kind", kind)]
        .map(|(name, value)| (name.to_owned(), value.into()))
        .into_iter()
        .collect()
}

fn restart_policy_to_v1alpha1(role: &mut JsonObject, pattern: &mut JsonObject) {
    let deprecated = pattern.remove("restartPolicy");
    let kind = take_object(pattern, "restartPolicyConfig").and_then(|mut config| config.remove("type"));
    let named = |policy: &Value| policy.as_str().is_some_and(|policy| !policy.is_empty());
    if let Some(policy) = kind.filter(named).or(deprecated.filter(named)) {
        role.insert("restartPolicy".to_owned(), policy);
    }
}

fn template_to_v1alpha1(role: &mut JsonObject, pattern: &mut JsonObject) {
    if let Some(template) = pattern.remove("template") {
        role.insert("template".to_owned(), template);
    }
    if let Some(mut reference) = take_object(pattern, "templateRef") {
        role.extend(reference.remove("patch").map(|patch| ("templatePatch".to_owned(), patch)));
        put_object(role, "templateRef", Some(reference));
    }
}

/// Removes labels and annotations, which components of v1alpha1 do not have.
fn components_to_v1alpha1(role: &mut JsonObject) {
    let components = role.get_mut("components").and_then(Value::as_array_mut);
    for component in components.into_iter().flatten().filter_map(Value::as_object_mut) {
        component.remove("labels");
        component.remove("annotations");
    }
}

fn rename(object: &mut JsonObject, from: &str, to: &str) {
    if let Some(value) = object.remove(from) {
        object.insert(to.to_owned(), value);
    }
}

fn rename_update(role: &mut JsonObject, from: &str, to: &str) {
    let update = role.get_mut("rolloutStrategy").and_then(|strategy| strategy.get_mut("rollingUpdate"));
    if let Some(kind) = update.and_then(|update| update.get_mut("type"))
        && kind == from
    {
        *kind = to.into();
    }
}
