//! Containers that a role's runtime profiles add to the engine's pod.

use rbg_api::PodTemplate;
use rbg_api::template::member_list;
use rbg_api::v1alpha2::{ClusterEngineRuntimeProfileSpec, EngineRuntime};
use serde_json::Value;

use crate::environment::name;
use crate::error::RenderError;
use crate::role::ResolvedRole;

/// Adds the profile's containers and volumes whose names the pod does not have, then the role's additions to them.
pub(crate) fn inject(role: &ResolvedRole<'_>, template: &mut PodTemplate) -> Result<(), RenderError> {
    for runtime in &role.spec.engine_runtimes {
        let profile = role.group.profiles.get(&runtime.profile_name);
        let profile = profile.ok_or_else(|| RenderError::UnknownProfile {
            role: role.spec.name.clone(),
            profile: runtime.profile_name.clone(),
        })?;
        for (list, items) in [
            ("initContainers", &profile.init_containers),
            ("containers", &profile.containers),
            ("volumes", &profile.volumes),
        ] {
            for item in items {
                let present = template.list_mut(list);
                if !present.iter().any(|other| name(other) == name(item)) {
                    present.push(item.clone());
                }
            }
        }
        add_to_containers(runtime, profile, template);
    }
    Ok(())
}

fn add_to_containers(
    runtime: &EngineRuntime,
    profile: &ClusterEngineRuntimeProfileSpec,
    template: &mut PodTemplate,
) {
    let of_profile = |container: &&Value| {
        profile
            .containers
            .iter()
            .chain(&profile.init_containers)
            .any(|profile_container| name(profile_container) == name(container))
    };
    for wanted in runtime.containers.iter().filter(of_profile) {
        let mut containers = template.list_mut("containers").iter_mut();
        let Some(container) = containers.find(|container| name(container) == name(wanted)) else { continue };
        let Some(container) = container.as_object_mut() else { continue };
        for list in ["env", "args"] {
            if let Some(Value::Array(more)) = wanted.get(list)
                && !more.is_empty()
            {
                member_list(container, list).extend(more.iter().cloned());
            }
        }
    }
}
