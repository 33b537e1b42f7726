//! Rendering of roles beyond the recorded ones: every pattern and workload, and upstream's defects.

mod groups;
mod pods;

use moongate_render::{
    GangScheduler, GroupContext, Manifest, PreservedFields, RenderError, ResolvedRole, RoleTarget,
    RuntimeProfiles, instance, pod, render_workload,
};
use rbg_api::conversion::{ApiVersion, convert};
use rbg_api::v1alpha2::{RoleBasedGroup, RoleInstance, RoleInstanceSet};
use serde_json::{Value, json};

fn group(annotations: Value, spec: Value) -> RoleBasedGroup {
    serde_json::from_value(json!({
        "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroup",
        "metadata": { "name": "g", "namespace": "ns", "uid": "u", "annotations": annotations },
        "spec": spec,
    }))
    .unwrap()
}

fn template(image: &str) -> Value {
    json!({ "spec": { "containers": [{ "name": "c", "image": image }] } })
}

fn workload_with(
    object: &RoleBasedGroup,
    profiles: &RuntimeProfiles,
    kept: &PreservedFields,
) -> Result<Manifest, RenderError> {
    let role = &object.spec.roles[0];
    let group = GroupContext::new(object, profiles, GangScheduler::default())?;
    render_workload(&ResolvedRole::new(group, role)?, &RoleTarget::of(role), kept)
}

fn workload(object: &RoleBasedGroup) -> Result<Value, RenderError> {
    workload_with(object, &RuntimeProfiles::new(), &PreservedFields::default())
        .map(|manifest| Value::Object(manifest.0))
}

fn at<'a>(value: &'a Value, pointer: &str) -> &'a Value {
    value.pointer(pointer).unwrap_or(&Value::Null)
}

const TEMPLATE: &str = "/spec/roleInstanceTemplate/components/0/template";

fn in_template<'a>(workload: &'a Value, pointer: &str) -> &'a Value {
    at(at(workload, TEMPLATE), pointer)
}

#[test]
fn role_templates_are_patched() {
    let object = group(
        json!({}),
        json!({
            "roleTemplates": [{ "name": "base", "template": template("i:1") }],
            "roles": [{ "name": "r", "standalonePattern": { "templateRef": {
                "name": "base",
                "patch": { "spec": { "containers": [{ "name": "c", "image": "i:2" }, { "name": "d", "image": "j" }] } },
            } } }],
        }),
    );
    let workload = workload(&object).unwrap();
    let images: Vec<&Value> =
        in_template(&workload, "/spec/containers").as_array().unwrap().iter().map(|c| &c["image"]).collect();
    assert_eq!(images, ["i:2", "j"]);
}

#[test]
fn leader_and_workers_have_their_patches_and_services() {
    let role = |selection: Value| {
        let mut pattern = json!({
            "size": 3,
            "template": template("i"),
            "leaderTemplatePatch": { "metadata": { "labels": { "who": "leader" } } },
            "workerTemplatePatch": { "metadata": { "labels": { "who": "worker" } } },
        });
        if !selection.is_null() {
            pattern["sharedServiceSelection"] = selection;
        }
        group(json!({}), json!({ "roles": [{ "name": "r", "leaderWorkerPattern": pattern }] }))
    };
    let rendered = workload(&role(Value::Null)).unwrap();
    let components = at(&rendered, "/spec/roleInstanceTemplate/components");
    assert_eq!(at(components, "/0/template/metadata/labels/who"), "leader");
    assert_eq!(at(components, "/1/template/metadata/labels/who"), "worker");
    assert_eq!(at(components, "/1/size"), 2);
    assert_eq!(at(components, "/1/serviceName"), &Value::Null);
    let all = workload(&role("All".into())).unwrap();
    assert_eq!(at(&all, "/spec/roleInstanceTemplate/components/1/serviceName"), "s-g-r");
}

#[test]
fn exclusive_groups_carry_the_label_they_select() {
    for key in [rbg_api::keys::GROUP_EXCLUSIVE_TOPOLOGY, rbg_api::keys::legacy::EXCLUSIVE_TOPOLOGY] {
        let spec = |metadata: Value| {
            let mut template = template("i");
            template["metadata"] = metadata;
            json!({ "roles": [{ "name": "r", "standalonePattern": { "template": template } }] })
        };
        let workload_of = |metadata| workload(&group(json!({ key: "zone" }), spec(metadata))).unwrap();
        let rendered = workload_of(json!({}));
        let label = in_template(&rendered, "/metadata/labels/rbg.workloads.x-k8s.io~1group-unique-hash");
        let term = "/spec/affinity/podAffinity/requiredDuringSchedulingIgnoredDuringExecution/0";
        let term = in_template(&rendered, term);
        assert_eq!(term["topologyKey"], "zone");
        assert_eq!(at(term, "/labelSelector/matchExpressions/0/values/0"), label);
        assert!(label.is_string());
        let out = workload_of(
            json!({ "annotations": { rbg_api::keys::legacy::DISABLE_EXCLUSIVE_TOPOLOGY: "true" } }),
        );
        assert!(in_template(&out, "/spec/affinity").is_null());
    }
}

#[test]
fn v1alpha1_groups_have_v1alpha1_labels_and_names() {
    let object = json!({
        "apiVersion": "workloads.x-k8s.io/v1alpha1", "kind": "RoleBasedGroup",
        "metadata": { "name": "g", "namespace": "ns", "uid": "u" },
        "spec": { "roles": [
            { "name": "router", "template": template("i") },
            { "name": "store", "template": template("i"),
              "annotations": { "instance.rolebasedgroup.workloads.x-k8s.io/pattern": "Stateless" },
              "workload": { "apiVersion": "workloads.x-k8s.io/v1alpha1", "kind": "InstanceSet" } },
        ] },
    });
    let object: RoleBasedGroup =
        serde_json::from_value(convert(&object, ApiVersion::V1alpha2).unwrap()).unwrap();
    let profiles = RuntimeProfiles::new();
    let group = GroupContext::new(&object, &profiles, GangScheduler::default()).unwrap();
    let rendered = |index: usize, kept: &PreservedFields| {
        let role = &object.spec.roles[index];
        let resolved = ResolvedRole::new(group, role).unwrap();
        Value::Object(render_workload(&resolved, &RoleTarget::of(role), kept).unwrap().0)
    };
    let router = rendered(0, &PreservedFields::default());
    let old = "/spec/template/metadata/labels/rolebasedgroup.workloads.x-k8s.io~1role";
    assert_eq!(at(&router, old), "router");
    assert!(at(&router, "/spec/selector/matchLabels/rolebasedgroup.workloads.x-k8s.io~1role").is_null());
    let names: Vec<&str> = at(&router, "/spec/template/spec/containers/0/env")
        .as_array()
        .unwrap()
        .iter()
        .map(|variable| variable["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        ["RBG_GROUP_NAME", "RBG_ROLE_INDEX", "RBG_ROLE_NAME", "GROUP_NAME", "ROLE_INDEX", "ROLE_NAME"]
    );
    let adopted = rendered(0, &PreservedFields { legacy: Some(false), ..PreservedFields::default() });
    assert!(at(&adopted, old).is_null(), "an existing StatefulSet without them is not changed");

    let mut store = rendered(1, &PreservedFields::default());
    assert!(!store.to_string().contains("rolebasedgroup.workloads.x-k8s.io/role\""), "not in hashed data");
    store["metadata"]["uid"] = "s".into();
    let set: RoleInstanceSet = serde_json::from_value(store).unwrap();
    let manifest = instance::unordered(&set, "abcde", "h", "2026-01-01T00:00:00Z").unwrap();
    let instance: RoleInstance = serde_json::from_value(Value::Object(manifest.0)).unwrap();
    let component = &instance.spec.components[0];
    let pod =
        Value::Object(pod::pod(&instance, component, 0, "h", &pod::NodePlacement::default()).unwrap().0);
    assert_eq!(pod["metadata"]["name"], "g-store-abcde");
    assert_eq!(pod["metadata"]["labels"]["rolebasedgroup.workloads.x-k8s.io/name"], "g");
    assert_eq!(pod["metadata"]["labels"]["rolebasedgroup.workloads.x-k8s.io/role"], "store");
    assert!(pod["spec"]["containers"][0]["env"].to_string().contains("\"INSTANCE_NAME\""));
}

#[test]
fn runtime_profiles_add_missing_containers() {
    let object = group(
        json!({}),
        json!({ "roles": [{
        "name": "r",
        "engineRuntimes": [{ "profileName": "p", "containers": [
            { "name": "side", "args": ["--more"], "env": [{ "name": "X", "value": "1" }] },
            { "name": "c", "args": ["never"] },
        ] }],
        "standalonePattern": { "template": template("i") },
    }] }),
    );
    let profile = json!({
        "containers": [{ "name": "side", "image": "s", "args": ["--some"] }, { "name": "c", "image": "other" }],
        "initContainers": [{ "name": "init", "image": "t" }],
        "volumes": [{ "name": "v", "emptyDir": {} }],
    });
    let profiles = RuntimeProfiles::from([("p".to_owned(), serde_json::from_value(profile).unwrap())]);
    let rendered = Value::Object(workload_with(&object, &profiles, &PreservedFields::default()).unwrap().0);
    let spec = in_template(&rendered, "/spec");
    assert_eq!(at(spec, "/containers/0/image"), "i", "existing containers of the pod stay");
    assert_eq!(at(spec, "/containers/1/args"), &json!(["--some", "--more"]));
    assert!(at(spec, "/containers/1/env").to_string().contains("RBG_GROUP_NAME"));
    assert_eq!(at(spec, "/initContainers/0/name"), "init");
    assert_eq!(at(spec, "/volumes/1/name"), "v");
    assert_eq!(workload(&object), Err(RenderError::UnknownProfile { role: "r".into(), profile: "p".into() }));
}

#[test]
fn other_workloads_are_rendered() {
    let role = |kind: &str, pattern: &str| {
        group(
            json!({}),
            json!({ "roles": [{
            "name": "r", "replicas": 4,
            "annotations": { rbg_api::keys::ROLE_WORKLOAD_TYPE: kind },
            "rolloutStrategy": { "type": "RollingUpdate", "rollingUpdate": { "maxUnavailable": "50%", "partition": "30%" } },
            pattern: { "template": template("i") },
        }] }),
        )
    };
    let deployment = workload(&role("apps/v1/Deployment", "standalonePattern")).unwrap();
    assert_eq!(deployment["kind"], "Deployment");
    assert_eq!(at(&deployment, "/spec/strategy/rollingUpdate/maxUnavailable"), "50%");
    assert!(
        at(&deployment, "/spec/template/spec/volumes").is_null(),
        "no discovery file for unordered roles"
    );
    let leaders =
        workload(&role("leaderworkerset.x-k8s.io/v1/LeaderWorkerSet", "leaderWorkerPattern")).unwrap();
    assert_eq!(leaders["apiVersion"], "leaderworkerset.x-k8s.io/v1");
    assert_eq!(at(&leaders, "/spec/leaderWorkerTemplate/restartPolicy"), "RecreateGroupOnPodRestart");
    assert_eq!(
        at(&leaders, "/spec/rolloutStrategy/rollingUpdateConfiguration/partition"),
        2,
        "30 % of 4, as a number"
    );
    assert_eq!(
        workload(&role("batch/v1/Job", "standalonePattern")),
        Err(RenderError::UnknownWorkload { role: "r".into(), kind: "batch/v1/Job".into() })
    );
}

#[test]
fn invalid_specs_are_rejected_with_the_reason() {
    let of = |role: Value| workload(&group(json!({}), json!({ "roles": [role] })));
    assert_eq!(of(json!({ "name": "r" })), Err(RenderError::NoPattern("r".into())));
    assert_eq!(of(json!({ "name": "r", "standalonePattern": {} })), Err(RenderError::NoTemplate("r".into())));
    let reference = json!({ "name": "r", "standalonePattern": { "templateRef": { "name": "t" } } });
    assert_eq!(of(reference), Err(RenderError::UnknownTemplate { role: "r".into(), template: "t".into() }));
    let stuck = json!({
        "name": "r", "standalonePattern": { "template": template("i") },
        "rolloutStrategy": { "type": "RollingUpdate", "rollingUpdate": { "maxUnavailable": 0, "maxSurge": "0%" } },
    });
    assert_eq!(of(stuck), Err(RenderError::NoProgress("r".into())));
}
