//! Additional labels and variables for pods of v1alpha1 groups, for Services and programs that still use them.

use rbg_api::template::member_list;
use rbg_api::{PodTemplate, env, keys};
use serde_json::Value;

use crate::environment::name;
use crate::manifest::StringMap;

/// Present names of variables, with their names in v1alpha1.
const NAMES: [(&str, &str); 9] = [
    (env::GROUP_NAME, env::legacy::GROUP_NAME),
    (env::ROLE_NAME, env::legacy::ROLE_NAME),
    (env::ROLE_INDEX, env::legacy::ROLE_INDEX),
    (env::ROLE_INSTANCE_NAME, env::legacy::INSTANCE_NAME),
    (env::COMPONENT_NAME, env::legacy::COMPONENT_NAME),
    (env::COMPONENT_INDEX, env::legacy::COMPONENT_INDEX),
    (env::LWP_LEADER_ADDRESS, env::legacy::LWS_LEADER_ADDRESS),
    (env::LWP_WORKER_INDEX, env::legacy::LWS_WORKER_INDEX),
    (env::LWP_GROUP_SIZE, env::legacy::LWS_GROUP_SIZE),
];

/// The labels that v1alpha1 Services select by.
pub(crate) fn labels(group: &str, role: &str, unique_key: &str) -> StringMap {
    StringMap::from([
        (keys::legacy::GROUP_NAME.to_owned(), group.to_owned()),
        (keys::legacy::ROLE_NAME.to_owned(), role.to_owned()),
        (keys::legacy::GROUP_UNIQUE_KEY.to_owned(), unique_key.to_owned()),
    ])
}

/// Adds the group's variables under their v1alpha1 names, after the last of them. Existing variables of a container take
/// precedence.
pub(crate) fn add_environment(template: &mut PodTemplate) {
    for container in template.list_mut("containers").iter_mut().filter_map(Value::as_object_mut) {
        let variables = member_list(container, "env");
        let aliases: Vec<Value> = variables.iter().filter_map(alias).collect();
        let new = aliases
            .into_iter()
            .filter(|alias| !variables.iter().any(|variable| name(variable) == name(alias)));
        let new: Vec<Value> = new.collect();
        let after =
            variables.iter().rposition(|variable| alias(variable).is_some()).map_or(0, |last| last + 1);
        variables.splice(after..after, new);
    }
}

fn alias(variable: &Value) -> Option<Value> {
    let (_, old) = NAMES.iter().find(|(present, _)| *present == name(variable))?;
    let mut alias = variable.clone();
    alias.as_object_mut()?.insert("name".to_owned(), (*old).into());
    Some(alias)
}
