//! What a container learns of its place by its environment.

use rbg_api::template::member_list;
use rbg_api::{PodTemplate, env, keys};
use serde_json::{Value, json};

use crate::role::RoleRenderer;
use crate::workload::WorkloadKind;

const PREFIX: &str = "RBG_";
const LEADER_WORKER_PREFIX: &str = "RBG_LWP_";
/// What StatefulSets label their pods' ordinals with.
const POD_INDEX: &str = "apps.kubernetes.io/pod-index";

fn literal(name: &str, value: &str) -> Value {
    json!({ "name": name, "value": value })
}

fn label(name: &str, key: &str) -> Value {
    let path = format!("metadata.labels['{key}']");
    json!({ "name": name, "valueFrom": { "fieldRef": { "fieldPath": path } } })
}

/// What every container of a role gets, by name. Never a number that changes with scaling: pods would be made anew.
pub(crate) fn role_variables(role: &RoleRenderer<'_>) -> Vec<Value> {
    let ours = role.kind == WorkloadKind::RoleInstanceSet;
    let mut variables = Vec::new();
    if ours {
        variables.push(label(env::COMPONENT_INDEX, keys::COMPONENT_ID));
        variables.push(label(env::COMPONENT_NAME, keys::COMPONENT_NAME));
    }
    variables.push(literal(env::GROUP_NAME, role.group.name));
    if role.is_ordered() {
        variables.push(label(env::ROLE_INDEX, if ours { keys::ROLE_INSTANCE_INDEX } else { POD_INDEX }));
    }
    if ours {
        variables.push(label(env::ROLE_INSTANCE_NAME, keys::ROLE_INSTANCE_NAME));
    }
    variables.push(literal(env::ROLE_NAME, &role.spec.name));
    variables
}

/// What containers of a leader and its workers get besides.
pub(crate) fn leader_worker_variables(role: &RoleRenderer<'_>) -> Vec<Value> {
    let leader = format!("$({})-0.{}.{}", env::ROLE_INSTANCE_NAME, role.names.service, role.group.namespace);
    vec![
        literal(env::LWP_LEADER_ADDRESS, &leader),
        label(env::LWP_WORKER_INDEX, keys::COMPONENT_INDEX),
        label(env::LWP_GROUP_SIZE, keys::COMPONENT_SIZE),
    ]
}

/// Puts variables into every container, before the container's own, so that those may refer to them by `$(NAME)`. A variable
/// of the same name is replaced.
pub(crate) fn inject(template: &mut PodTemplate, variables: Vec<Value>) {
    for container in template.list_mut("containers").iter_mut().filter_map(Value::as_object_mut) {
        let own = member_list(container, "env");
        let kept = deduplicate_by_name(std::mem::take(own));
        let kept =
            kept.into_iter().filter(|variable| !variables.iter().any(|new| name(new) == name(variable)));
        // Earlier ones of the group come first: those put in now may refer to them.
        let (of_group, of_user): (Vec<Value>, Vec<Value>) =
            kept.partition(|variable| name(variable).starts_with(PREFIX));
        let (late, early): (Vec<Value>, Vec<Value>) =
            of_group.into_iter().partition(|variable| name(variable).starts_with(LEADER_WORKER_PREFIX));
        own.extend(early);
        own.extend(variables.iter().cloned());
        own.extend(late);
        own.extend(of_user);
    }
}

pub(crate) fn name(variable: &Value) -> &str {
    variable.get("name").and_then(Value::as_str).unwrap_or_default()
}

fn deduplicate_by_name(variables: Vec<Value>) -> Vec<Value> {
    let mut kept: Vec<Value> = Vec::with_capacity(variables.len());
    for variable in variables.into_iter().rev() {
        if !kept.iter().any(|later| name(later) == name(&variable)) {
            kept.push(variable);
        }
    }
    kept.reverse();
    kept
}

/// Puts variables into every container and init container, before the container's own. A variable of the same name is
/// replaced.
pub(crate) fn add_to_all_containers(template: &mut PodTemplate, variables: &[Value]) {
    if variables.is_empty() {
        return;
    }
    for list in ["initContainers", "containers"] {
        if list == "initContainers" && template.init_containers().is_empty() {
            continue;
        }
        for container in template.list_mut(list).iter_mut().filter_map(Value::as_object_mut) {
            let own = member_list(container, "env");
            own.retain(|known| !variables.iter().any(|new| name(new) == name(known)));
            own.splice(0..0, variables.iter().cloned());
        }
    }
}
