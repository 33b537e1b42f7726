//! The profile in `operator/manifests/engine-sidecar.yaml`, rendered into a role's pods.

use moongate_render::{
    GangScheduler, GroupContext, PreservedFields, ResolvedRole, RoleTarget, RuntimeProfiles, render_workload,
};
use rbg_api::v1alpha2::{ClusterEngineRuntimeProfile, RoleBasedGroup};
use serde_json::{Value, json};

const MANIFEST: &str = include_str!("../../../manifests/engine-sidecar.yaml");

fn named<'a>(list: &'a Value, name: &str) -> Option<(usize, &'a Value)> {
    list.as_array().unwrap().iter().enumerate().find(|(_, item)| item["name"] == name)
}

#[test]
fn the_sidecar_is_added_with_pod_and_group_names() {
    let profile: ClusterEngineRuntimeProfile = serde_saphyr::from_str(MANIFEST).unwrap();
    let name = profile.metadata.name.unwrap();
    let object: RoleBasedGroup = serde_json::from_value(json!({
        "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroup",
        "metadata": { "name": "g", "namespace": "ns", "uid": "u" },
        "spec": { "roles": [{
            "name": "decode",
            "engineRuntimes": [{ "profileName": name, "containers": [
                { "name": name, "env": [{ "name": "MOONGATE_SIDECAR_GATEWAY_ROLE", "value": "gateway" }] },
            ] }],
            "standalonePattern": { "template": { "spec": { "containers": [{ "name": "engine", "image": "i" }] } } },
        }] },
    }))
    .unwrap();
    let profiles = RuntimeProfiles::from([(name.clone(), profile.spec)]);
    let group = GroupContext::new(&object, &profiles, GangScheduler::default()).unwrap();
    let role = &object.spec.roles[0];
    let workload = render_workload(
        &ResolvedRole::new(group, role).unwrap(),
        &RoleTarget::of(role),
        &PreservedFields::default(),
    )
    .unwrap();
    let workload = Value::Object(workload.0);
    let spec = workload.pointer("/spec/roleInstanceTemplate/components/0/template/spec").unwrap();

    assert_eq!(spec["containers"][0]["name"], "engine");
    let (_, sidecar) = named(&spec["containers"], &name).unwrap();
    assert_eq!(sidecar["args"], json!(["sidecar"]));
    let env = &sidecar["env"];
    assert_eq!(
        named(env, "MOONGATE_SIDECAR_GATEWAY_ROLE").unwrap().1["value"],
        "gateway",
        "the role's variables come last"
    );
    let (id, _) = named(env, "MOONGATE_SIDECAR_ID").unwrap();
    for used in ["POD_NAMESPACE", "POD_NAME", "POD_UID"] {
        assert!(named(env, used).unwrap().0 < id, "{used} must be defined before it is referenced");
    }
    assert!(named(env, "RBG_ROLE_NAME").is_some());
    for mount in sidecar["volumeMounts"].as_array().unwrap() {
        assert!(named(&spec["volumes"], mount["name"].as_str().unwrap()).is_some(), "{mount}");
    }
    let (_, file) = named(&sidecar["volumeMounts"], "rbg-cluster-config").unwrap();
    assert_eq!(file["mountPath"], "/etc/rbg", "the sidecar finds gateways through the group's file");
}
