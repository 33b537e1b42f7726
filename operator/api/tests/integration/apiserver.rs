//! Our CRDs on a real API server: it accepts them and every example, and rejects invalid objects.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{
    Api, ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams, ValidationDirective,
};
use kube::{Client, Error};
use moongate_testkit::ControlPlane;
use rbg_api::conversion::{ApiVersion, convert};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};

/// Generous, since it expires only if something hangs.
const PATIENCE: Duration = Duration::from_secs(60);

async fn install(client: &Client) {
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    for crd in rbg_api::crds::all() {
        api.create(&PostParams::default(), &crd).await.unwrap();
    }
    let begun = Instant::now();
    for crd in rbg_api::crds::all() {
        let name = crd.metadata.name.unwrap();
        loop {
            let conditions =
                api.get(&name).await.unwrap().status.and_then(|status| status.conditions).unwrap_or_default();
            let violations = conditions.iter().find(|condition| condition.type_ == "NonStructuralSchema");
            assert!(violations.is_none(), "{name}: {violations:?}");
            if conditions
                .iter()
                .any(|condition| condition.type_ == "Established" && condition.status == "True")
            {
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "{name} is not served: {conditions:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

fn examples() -> Vec<(PathBuf, Value)> {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/examples")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let text = std::fs::read_to_string(&path).unwrap();
                let objects: Vec<Option<Value>> = serde_saphyr::from_multiple(&text).unwrap();
                found.extend(objects.into_iter().flatten().map(|object| (path.clone(), object)));
            }
        }
    }
    let ours = |object: &Value| object["apiVersion"].as_str().and_then(ApiVersion::parse).is_some();
    found.retain(|(_, object)| ours(object));
    found
}

/// Dry run of an apply. Unknown fields are rejected.
async fn try_apply(client: &Client, namespace: &str, object: &Value) -> Result<DynamicObject, Error> {
    let mut object = object.clone();
    let text = |name: &str| object[name].as_str().unwrap().to_owned();
    let (group, version) =
        text("apiVersion").split_once('/').map(|(g, v)| (g.to_owned(), v.to_owned())).unwrap();
    let kind = text("kind");
    let plural = match kind.as_str() {
        "CoordinatedPolicy" => "coordinatedpolicies".to_owned(),
        kind => format!("{}s", kind.to_lowercase()),
    };
    let resource =
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(&group, &version, &kind), &plural);
    let api: Api<DynamicObject> = if kind == "ClusterEngineRuntimeProfile" {
        Api::all_with(client.clone(), &resource)
    } else {
        object["metadata"]["namespace"] = namespace.into();
        Api::namespaced_with(client.clone(), namespace, &resource)
    };
    let mut parameters = PatchParams::apply("test").dry_run();
    parameters.field_validation = Some(ValidationDirective::Strict);
    api.patch(object["metadata"]["name"].as_str().unwrap(), &parameters, &Patch::Apply(&object)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_server_accepts_the_crds_and_every_example() {
    let plane = ControlPlane::start().await.unwrap();
    let namespace = plane.namespace("crds").await.unwrap();
    let (client, name) = (&namespace.client, namespace.name.as_str());
    install(client).await;

    let examples = examples();
    assert!(examples.len() > 60, "only {} examples", examples.len());
    let mut refused = Vec::new();
    for (path, object) in &examples {
        if let Err(error) = try_apply(client, name, object).await {
            refused.push(format!("{}: {error}", path.display()));
        }
        if let Ok(converted) = convert(object, ApiVersion::V1alpha2)
            && let Err(error) = try_apply(client, name, &converted).await
        {
            refused.push(format!("{}, converted: {error}", path.display()));
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));

    defaults_are_filled_in(client, name).await;
    let mut wrong = Vec::new();
    let unknown =
        ("a member that nobody knows", json!({ "roles": [{ "name": "r" }], "rolls": [] }), "not declared");
    let specs =
        refused_roles().into_iter().map(|(what, roles, message)| (what, json!({ "roles": roles }), message));
    for (what, spec, message) in specs.chain([unknown]) {
        let group = json!({
            "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroup",
            "metadata": { "name": "g" }, "spec": spec,
        });
        match try_apply(client, name, &group).await.err().map(|error| error.to_string()) {
            Some(error) if error.contains(message) => {}
            other => wrong.push(format!("{what}: {other:?}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    older_roles_are_refused(client, name).await;
}

async fn defaults_are_filled_in(client: &Client, namespace: &str) {
    let group: RoleBasedGroup = serde_json::from_value(json!({
        "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroup",
        "metadata": { "name": "defaults" },
        "spec": { "roles": [{
            "name": "r",
            "rolloutStrategy": { "rollingUpdate": {} },
            "leaderWorkerPattern": {
                "template": { "spec": { "containers": [{ "name": "c", "futureField": { "kept": true } }] } },
                "restartPolicyConfig": {},
            },
        }] },
    }))
    .unwrap();
    let api = Api::<RoleBasedGroup>::namespaced(client.clone(), namespace);
    let made = api.create(&PostParams::default(), &group).await.unwrap();
    let role = serde_json::to_value(&made.spec.roles[0]).unwrap();
    assert_eq!(
        role,
        json!({
            "name": "r", "replicas": 1, "podManagementPolicy": "Parallel",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdate": { "partition": 0, "maxUnavailable": 1, "maxSurge": 0 },
            },
            "leaderWorkerPattern": {
                "size": 1,
                "template": { "spec": { "containers": [{ "name": "c", "futureField": { "kept": true } }] } },
                "restartPolicyConfig": { "baseDelaySeconds": 30, "maxDelaySeconds": 600 },
            },
        })
    );
    let listed = api.list(&Default::default()).await.unwrap();
    assert_eq!(listed.items.len(), 1);
}

/// Description, roles, and the expected error.
fn refused_roles() -> Vec<(&'static str, Value, &'static str)> {
    let template = json!({ "spec": { "containers": [{ "name": "c", "image": "i" }] } });
    vec![
        ("no role", json!([]), "should have at least 1 items"),
        (
            "a negative number of replicas",
            json!([{ "name": "r", "replicas": -1 }]),
            "greater than or equal to 0",
        ),
        ("two roles of one name", json!([{ "name": "r" }, { "name": "r" }]), "duplicate"),
        (
            "two patterns",
            json!([{ "name": "r", "standalonePattern": { "template": template }, "leaderWorkerPattern": {} }]),
            "standalonePattern and leaderWorkerPattern are mutually exclusive",
        ),
        (
            "two templates",
            json!([{ "name": "r", "standalonePattern": { "template": template, "templateRef": { "name": "t" } } }]),
            "template and templateRef are mutually exclusive",
        ),
        (
            "leaders only, for a workload without leader labels",
            json!([{
                "name": "r",
                "annotations": { "rbg.workloads.x-k8s.io/role-workload-type": "apps/v1/StatefulSet" },
                "leaderWorkerPattern": { "template": template, "sharedServiceSelection": "LeaderOnly" },
            }]),
            "only supported for RoleInstanceSet",
        ),
        (
            "a maximum delay below the base delay",
            json!([{ "name": "r", "customComponentsPattern": {
                "components": [{ "name": "x", "template": template }],
                "restartPolicyConfig": { "baseDelaySeconds": 9, "maxDelaySeconds": 3 },
            } }]),
            "maxDelaySeconds must be greater than or equal to baseDelaySeconds",
        ),
        (
            "a container without a name",
            json!([{ "name": "r", "standalonePattern": { "template": { "spec": { "containers": [{}] } } } }]),
            "name",
        ),
        (
            "a label that is not a string",
            json!([{ "name": "r", "standalonePattern": { "template": { "metadata": { "labels": { "a": 1 } } } } }]),
            "labels",
        ),
    ]
}

async fn older_roles_are_refused(client: &Client, namespace: &str) {
    for (role, message) in [
        (json!({ "name": "r" }), "template or templateRef must be set"),
        (
            json!({ "name": "r", "templateRef": { "name": "t" }, "workload": { "kind": "InstanceSet" } }),
            "templateRef is not supported for InstanceSet",
        ),
        (json!({ "name": "r", "template": {}, "templateRef": { "name": "t" } }), "mutually exclusive"),
    ] {
        let group = json!({
            "apiVersion": "workloads.x-k8s.io/v1alpha1", "kind": "RoleBasedGroup",
            "metadata": { "name": "g" }, "spec": { "roles": [role] },
        });
        let error = try_apply(client, namespace, &group).await.err().map(|error| error.to_string());
        assert!(error.as_ref().is_some_and(|error| error.contains(message)), "{message}: {error:?}");
    }
}
