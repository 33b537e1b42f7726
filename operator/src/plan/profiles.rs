//! The runtime profiles that a role's pods are made with.
//!
//! A profile that says `NoUpdate` shall not touch pods that run. So the workload keeps the profiles that its template was made
//! with, and they count until the role itself changes.

use moongate_render::{GroupRenderer, Manifest, PreservedFields, RoleRenderer, RoleTarget, RuntimeProfiles};
use rbg_api::keys;
use rbg_api::template::member_object;
use rbg_api::v1alpha2::RoleSpec;
use serde_json::Value;

use super::{GroupInput, PlanError};

/// Annotation of a workload: the profiles that its template was made with, as JSON.
const MADE_WITH: &str = "moongate.io/engine-runtime-profiles";

/// The role's workload.
pub(super) fn workload(
    input: GroupInput<'_>,
    spec: &RoleSpec,
    role: &RoleRenderer<'_>,
    target: &RoleTarget,
    (live, kept): (Option<&Value>, &PreservedFields),
) -> Result<Manifest, PlanError> {
    if spec.engine_runtimes.is_empty() {
        return role.workload(target, kept);
    }
    let profiles = role_profiles(spec, &role.revision(), input.profiles, live);
    let group = GroupRenderer::new(input.group, &profiles, input.gang)?;
    let mut manifest = RoleRenderer::new(group, spec, role.names().clone())?.workload(target, kept)?;
    let made_with = serde_json::to_string(&profiles).unwrap_or_default();
    member_object(member_object(&mut manifest.0, "metadata"), "annotations")
        .insert(MADE_WITH.to_owned(), made_with.into());
    Ok(manifest)
}

fn role_profiles(
    spec: &RoleSpec,
    revision: &str,
    present: &RuntimeProfiles,
    live: Option<&Value>,
) -> RuntimeProfiles {
    let metadata = live.map(|live| &live["metadata"]);
    let label = format!("{}{}", keys::ROLE_REVISION_PREFIX, spec.name);
    let same = metadata.filter(|metadata| metadata["labels"][label.as_str()] == revision);
    let text = same.and_then(|metadata| metadata["annotations"][MADE_WITH].as_str());
    let mut before: RuntimeProfiles =
        text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let names = spec.engine_runtimes.iter().map(|runtime| &runtime.profile_name);
    let profile = |name: &String| {
        let present = present.get(name);
        let rolls = present.is_some_and(|present| present.update_strategy == "RollingUpdate");
        let kept = if rolls { None } else { before.remove(name) };
        Some((name.clone(), kept.or_else(|| present.cloned())?))
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
        assert_eq!(role_profiles(&role, "a", &RuntimeProfiles::new(), Some(&live)), old, "it is deleted");
        assert_eq!(role_profiles(&role, "b", &RuntimeProfiles::new(), Some(&live)), RuntimeProfiles::new());
        let unlike = json!({ "metadata": { "annotations": { MADE_WITH: "rubbish" } } });
        assert_eq!(role_profiles(&role, "a", &new, Some(&unlike)), new);
    }
}
