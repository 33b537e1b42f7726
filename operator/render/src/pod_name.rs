//! Names of an instance's pods, and their positions in it.

use rbg_api::keys;
use rbg_api::v1alpha2::RoleInstance;

/// Name of one of the pods of an instance.
#[must_use]
pub fn pod_name(instance: &RoleInstance, component: &str, id: i32) -> String {
    let instance_name = instance.metadata.name.as_deref().unwrap_or_default();
    match role_type(instance) {
        "LeaderWorkerSet" => format!("{instance_name}-{}", position(component, id)),
        "Components" => format!("{instance_name}-{component}-{id}"),
        _ => instance_name.to_owned(),
    }
}

/// Position in the instance: 0 is the leader, workers follow.
pub(crate) fn position(component: &str, id: i32) -> i32 {
    if component == "worker" { id.saturating_add(1) } else { id }
}

pub(crate) fn role_type(instance: &RoleInstance) -> &str {
    label(instance, keys::ROLE_TYPE).unwrap_or("PodTemplate")
}

pub(crate) fn label<'a>(instance: &'a RoleInstance, key: &str) -> Option<&'a str> {
    instance.metadata.labels.as_ref()?.get(key).map(String::as_str)
}
