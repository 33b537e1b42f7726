//! Every group of the example manifests renders to its objects, and a real API server accepts them.

mod manifests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{
    Api, ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams, ValidationDirective,
};
use kube::{Client, Error};
use manifests::{ManifestExample, groups};
use moongate_render::{
    GangScheduler, GroupContext, Manifest, PreservedFields, ResolvedRole, RoleTarget, coordinated_policy,
    discovery_config_map, headless_service, instance, pod, pod_group, render_workload, scaling_adapter,
};
use moongate_testkit::ControlPlane;
use rbg_api::v1alpha2::{RoleInstance, RoleInstanceSet};
use serde_json::Value;

/// Generous, since it expires only if something hangs.
const TIMEOUT: Duration = Duration::from_secs(60);
/// A folder of other CRDs to test against, for example upstream's.
const OTHER_CRDS: &str = "MOONGATE_CRDS";

/// All objects of a group, including its pods.
fn objects(example: &ManifestExample) -> Vec<Manifest> {
    let expect_ok = |result: Result<Manifest, moongate_render::RenderError>| {
        result.unwrap_or_else(|error| panic!("{}: {error}", example.path.display()))
    };
    let group = GroupContext::new(&example.group, &example.profiles, GangScheduler::default()).unwrap();
    let mut all = Vec::new();
    for spec in &example.group.spec.roles {
        let role = ResolvedRole::new(group, spec)
            .unwrap_or_else(|error| panic!("{}: {error}", example.path.display()));
        let target = RoleTarget::of(spec);
        let workload = expect_ok(render_workload(&role, &target, &PreservedFields::default()));
        assert_eq!(
            workload,
            expect_ok(render_workload(&role, &target, &PreservedFields::default())),
            "rendering is deterministic"
        );
        if workload.kind() == "RoleInstanceSet" && spec.replicas > 0 {
            let mut object = Value::Object(workload.0.clone());
            object["metadata"]["uid"] = "0b0b0b0b-0000-4000-8000-000000000000".into();
            let set: RoleInstanceSet = serde_json::from_value(object).unwrap();
            let rendered = match role.is_ordered() {
                true => expect_ok(instance::ordered(&set, 0, "revision-0")),
                false => expect_ok(instance::unordered(&set, "bcdfg", "revision", "2026-01-01T00:00:00Z")),
            };
            let mut object = Value::Object(rendered.0.clone());
            object["metadata"]["uid"] = "0c0c0c0c-0000-4000-8000-000000000000".into();
            let parent: RoleInstance = serde_json::from_value(object).unwrap();
            all.push(rendered);
            for component in &parent.spec.components {
                for id in 0..component.size() {
                    all.push(expect_ok(pod::pod(
                        &parent,
                        component,
                        id,
                        "revision",
                        &pod::NodePlacement::default(),
                    )));
                }
            }
        }
        all.push(workload);
        all.extend(headless_service(&role, &target, "0d0d0d0d-0000-4000-8000-000000000000"));
        all.extend(scaling_adapter(&role));
    }
    all.extend(discovery_config_map(group, &BTreeMap::new(), &BTreeMap::new()).unwrap());
    all.extend(coordinated_policy(group).unwrap());
    all.extend(pod_group(group));
    all
}

#[test]
fn every_group_renders_to_distinct_objects() {
    let groups = groups();
    assert!(groups.len() > 40, "only {} groups", groups.len());
    for example in &groups {
        let mut names = BTreeSet::new();
        for object in objects(example) {
            let name = format!("{} {}", object.kind(), object.name());
            assert!(
                names.insert(name.clone()),
                "{}: two objects have the name {name}",
                example.path.display()
            );
        }
    }
}

async fn install(client: &Client) {
    let crds: Vec<CustomResourceDefinition> = match std::env::var_os(OTHER_CRDS) {
        Some(folder) => read_crds(Path::new(&folder)),
        None => rbg_api::crds::all(),
    };
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    for crd in &crds {
        api.create(&PostParams::default(), crd).await.unwrap();
    }
    let started = Instant::now();
    for name in crds.iter().filter_map(|crd| crd.metadata.name.as_deref()) {
        loop {
            let conditions =
                api.get(name).await.unwrap().status.and_then(|status| status.conditions).unwrap_or_default();
            if conditions
                .iter()
                .any(|condition| condition.type_ == "Established" && condition.status == "True")
            {
                break;
            }
            assert!(started.elapsed() < TIMEOUT, "{name} is not served: {conditions:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

fn read_crds(folder: &Path) -> Vec<CustomResourceDefinition> {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.map(|path| serde_saphyr::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()).collect()
}

/// Dry run of a write. Unknown fields are rejected.
async fn try_apply(client: &Client, namespace: &str, manifest: &Manifest) -> Result<DynamicObject, Error> {
    let mut object = Value::Object(manifest.0.clone());
    object["metadata"]["namespace"] = namespace.into();
    let api_version = object["apiVersion"].as_str().unwrap();
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let kind = manifest.kind();
    let plural = match kind {
        "CoordinatedPolicy" => "coordinatedpolicies".to_owned(),
        kind => format!("{}s", kind.to_lowercase()),
    };
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), &plural);
    let api = Api::<DynamicObject>::namespaced_with(client.clone(), namespace, &resource);
    if kind == "Pod" {
        // Created instead of applied: one example has a misplaced field, which the server drops with a warning on a create only.
        let parameters = PostParams { dry_run: true, ..PostParams::default() };
        return api.create(&parameters, &serde_json::from_value(object).unwrap()).await;
    }
    let mut parameters = PatchParams::apply("test").dry_run();
    parameters.field_validation = Some(ValidationDirective::Strict);
    api.patch(manifest.name(), &parameters, &Patch::Apply(&object)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_server_accepts_every_object() {
    let plane = ControlPlane::start().await.unwrap();
    let namespace = plane.namespace("render").await.unwrap();
    install(&namespace.client).await;
    let (mut accepted, mut refused) = (0, Vec::new());
    for example in groups() {
        for object in objects(&example) {
            // Kinds of other projects, whose CRDs are not installed.
            if ["LeaderWorkerSet", "PodGroup"].contains(&object.kind()) {
                continue;
            }
            match try_apply(&namespace.client, &namespace.name, &object).await {
                Ok(_) => accepted += 1,
                Err(error) => {
                    refused.push(format!(
                        "{}: {} {}: {error}",
                        example.path.display(),
                        object.kind(),
                        object.name()
                    ));
                }
            }
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
    assert!(accepted > 300, "only {accepted} objects");
}
