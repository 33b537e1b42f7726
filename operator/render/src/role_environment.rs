//! Environment variables that describe a container's group, role and instance.

use rbg_api::{env, keys};
use serde_json::{Value, json};

use crate::role::ResolvedRole;
use crate::workload_kind::WorkloadKind;

/// Label with the ordinal of a StatefulSet's pod.
const POD_INDEX: &str = "apps.kubernetes.io/pod-index";

fn literal(name: &str, value: &str) -> Value {
    json!({ "name": name, "value": value })
}

fn label(name: &str, key: &str) -> Value {
    let path = format!("metadata.labels['{key}']");
    json!({ "name": name, "valueFrom": { "fieldRef": { "fieldPath": path } } })
}

/// Variables of every container of a role, sorted by name. They contain no number that changes with scaling: that would
/// recreate the pods.
pub(crate) fn role_variables(role: &ResolvedRole<'_>) -> Vec<Value> {
    let is_role_instance_set = role.kind == WorkloadKind::RoleInstanceSet;
    let mut variables = Vec::new();
    if is_role_instance_set {
        variables.push(label(env::COMPONENT_INDEX, keys::COMPONENT_ID));
        variables.push(label(env::COMPONENT_NAME, keys::COMPONENT_NAME));
    }
    variables.push(literal(env::GROUP_NAME, role.group.name));
    if role.is_ordered() {
        variables.push(label(
            env::ROLE_INDEX,
            if is_role_instance_set { keys::ROLE_INSTANCE_INDEX } else { POD_INDEX },
        ));
    }
    if is_role_instance_set {
        variables.push(label(env::ROLE_INSTANCE_NAME, keys::ROLE_INSTANCE_NAME));
    }
    variables.push(literal(env::ROLE_NAME, &role.spec.name));
    variables
}

/// Additional variables of leaders and workers.
pub(crate) fn leader_worker_variables(role: &ResolvedRole<'_>) -> Vec<Value> {
    let leader = format!("$({})-0.{}.{}", env::ROLE_INSTANCE_NAME, role.names.service, role.group.namespace);
    vec![
        literal(env::LWP_LEADER_ADDRESS, &leader),
        label(env::LWP_WORKER_INDEX, keys::COMPONENT_INDEX),
        label(env::LWP_GROUP_SIZE, keys::COMPONENT_SIZE),
    ]
}
