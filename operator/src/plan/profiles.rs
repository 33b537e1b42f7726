//! Runtime profiles that a role's pods are created with.
//!
//! A change of a profile with `NoUpdate` must not affect running pods. The workload therefore stores the profiles that its
//! template was
//! created with, and these apply until the role itself changes.

use moongate_render::{
    Manifest, PreservedFields, ResolvedRole, RoleTarget, RuntimeProfiles, render_workload,
};
use rbg_api::keys;
use rbg_api::template::member_object;
use rbg_api::v1alpha2::RoleSpec;
use serde_json::Value;

use super::{GroupInput, PlanError};

/// Annotation of a workload: the profiles that its template was created with, as JSON.
const MADE_WITH: &str = "moongate.io/engine-runtime-profiles";

pub(super) fn workload(
    input: GroupInput<'_>,
    spec: &RoleSpec,
    role: &ResolvedRole<'_>,
    target: &RoleTarget,
    (live, stored): (Option<&Value>, &PreservedFields),
) -> Result<Manifest, PlanError> {
    if spec.engine_runtimes.is_empty() {
        return render_workload(role, target, stored);
    }
    let profiles = role_profiles(spec, &role.revision(), input.profiles, live);
    let group = input.context(&profiles)?;
    let role = ResolvedRole::with_names(group, spec, role.names().clone())?;
    let mut manifest = render_workload(&role, target, stored)?;
    let created_with = serde_json::to_string(&profiles).unwrap_or_default();
    member_object(member_object(&mut manifest.0, "metadata"), "annotations")
        .insert(MADE_WITH.to_owned(), created_with.into());
    Ok(manifest)
}

fn role_profiles(
    spec: &RoleSpec,
    revision: &str,
    current: &RuntimeProfiles,
    live: Option<&Value>,
) -> RuntimeProfiles {
    let metadata = live.map(|live| &live["metadata"]);
    let label = format!("{}{}", keys::ROLE_REVISION_PREFIX, spec.name);
    let same_revision = metadata.filter(|metadata| metadata["labels"][label.as_str()] == revision);
    let text = same_revision.and_then(|metadata| metadata["annotations"][MADE_WITH].as_str());
    let mut before: RuntimeProfiles =
        text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let names = spec.engine_runtimes.iter().map(|runtime| &runtime.profile_name);
    let profile = |name: &String| {
        let current = current.get(name);
        let rolls = current.is_some_and(|current| current.update_strategy == "RollingUpdate");
        let stored = if rolls { None } else { before.remove(name) };
        Some((name.clone(), stored.or_else(|| current.cloned())?))
    };
    names.filter_map(profile).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn profiles(image: &str, strategy: &str) -> RuntimeProfiles {
        let profile =
            json!({ "containers": [{ "name": "sidecar", "image": image }], "updateStrategy": strategy });
        serde_json::from_value(json!({ "p": profile })).unwrap()
    }

    #[test]
    fn pods_keep_their_profile_until_it_rolls_or_the_role_changes() {
        let role = json!({ "name": "r", "engineRuntimes": [{ "profileName": "p" }] });
        let role: RoleSpec = serde_json::from_value(role).unwrap();
        let (old, new) = (profiles("i:1", "NoUpdate"), profiles("i:2", "NoUpdate"));
        let live = json!({ "metadata": {
            "labels": { "rbg.workloads.x-k8s.io/role-revision-r": "a" },
            "annotations": { MADE_WITH: serde_json::to_string(&old).unwrap() },
        } });
        assert_eq!(role_profiles(&role, "a", &new, None), new);
        assert_eq!(role_profiles(&role, "a", &new, Some(&live)), old);
        assert_eq!(role_profiles(&role, "b", &new, Some(&live)), new, "the role has changed");
        let rolling = profiles("i:2", "RollingUpdate");
        assert_eq!(role_profiles(&role, "a", &rolling, Some(&live)), rolling);
        assert_eq!(
            role_profiles(&role, "a", &RuntimeProfiles::new(), Some(&live)),
            old,
            "the profile was deleted"
        );
        assert_eq!(role_profiles(&role, "b", &RuntimeProfiles::new(), Some(&live)), RuntimeProfiles::new());
        let invalid = json!({ "metadata": { "annotations": { MADE_WITH: "invalid" } } });
        assert_eq!(role_profiles(&role, "a", &new, Some(&invalid)), new);
    }
}
