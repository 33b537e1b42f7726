//! Inserts environment variables into the containers of a pod template.

use rbg_api::PodTemplate;
use rbg_api::template::member_list;
use serde_json::Value;

const PREFIX: &str = "RBG_";
const LEADER_WORKER_PREFIX: &str = "RBG_LWP_";

/// Inserts variables into every container before the container's own, so that those may reference them by `$(NAME)`.
/// Variables with the same name are replaced.
pub(crate) fn inject(template: &mut PodTemplate, variables: Vec<Value>) {
    for container in template.list_mut("containers").iter_mut().filter_map(Value::as_object_mut) {
        let container_env = member_list(container, "env");
        let unique = deduplicate_by_name(std::mem::take(container_env));
        let unique =
            unique.into_iter().filter(|variable| !variables.iter().any(|new| name(new) == name(variable)));
        // Variables inserted earlier come first: the new ones may reference them.
        let (group_variables, user_variables): (Vec<Value>, Vec<Value>) =
            unique.partition(|variable| name(variable).starts_with(PREFIX));
        let (late, early): (Vec<Value>, Vec<Value>) = group_variables
            .into_iter()
            .partition(|variable| name(variable).starts_with(LEADER_WORKER_PREFIX));
        container_env.extend(early);
        container_env.extend(variables.iter().cloned());
        container_env.extend(late);
        container_env.extend(user_variables);
    }
}

pub(crate) fn name(variable: &Value) -> &str {
    variable.get("name").and_then(Value::as_str).unwrap_or_default()
}

fn deduplicate_by_name(variables: Vec<Value>) -> Vec<Value> {
    let mut unique: Vec<Value> = Vec::with_capacity(variables.len());
    for variable in variables.into_iter().rev() {
        if !unique.iter().any(|later| name(later) == name(&variable)) {
            unique.push(variable);
        }
    }
    unique.reverse();
    unique
}

/// Inserts variables into every container and init container before the container's own. Variables with the same name are
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
            let container_env = member_list(container, "env");
            container_env.retain(|variable| !variables.iter().any(|new| name(new) == name(variable)));
            container_env.splice(0..0, variables.iter().cloned());
        }
    }
}
