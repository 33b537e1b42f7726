//! Groups from articles about RoleBasedGroup, unchanged: v1alpha1, through the webhooks.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use axum::http::Request;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, PostParams};
use moongate_operator::{GangScheduler, SizeLimits, webhooks};
use moongate_runtime::{Supervisor, bind};
use moongate_testkit::{ControlPlane, TestNamespace};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};

use super::test_operator::TestOperator;
use super::{eventually, is_settled, restarts};

const TESTDATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata");

/// The webhooks of an operator, behind a Service that points to this machine.
pub(crate) async fn webhooks(namespace: &TestNamespace) -> Supervisor {
    let service: Service = serde_json::from_value(json!({ "metadata": { "name": "webhooks" },
        "spec": { "type": "ExternalName", "externalName": "localhost" } }))
    .unwrap();
    Api::default_namespaced(namespace.client.clone()).create(&PostParams::default(), &service).await.unwrap();
    let supervisor = Supervisor::new();
    let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let options = webhooks::WebhookOptions {
        namespace: namespace.name.clone(),
        service: "webhooks".to_owned(),
        port: listener.local_addr().unwrap().port(),
        secret: "certificate".to_owned(),
        size_limits: SizeLimits::default(),
        gang_scheduler: GangScheduler::default(),
        ownership: webhooks::OwnershipTiming::default(),
    };
    webhooks::start(listener, namespace.client.clone(), options, Arc::default(), &supervisor).unwrap();
    supervisor
}

/// Applies a file with a group and a Service.
pub(crate) async fn apply(stage: &TestOperator, file: &str) {
    let text = std::fs::read_to_string(Path::new(TESTDATA).join(file)).unwrap();
    let objects: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    for mut object in objects {
        object["metadata"].as_object_mut().unwrap().remove("namespace");
        let text = |member: &str| object[member].as_str().unwrap().to_owned();
        let (version, kind) = (text("apiVersion"), text("kind"));
        let (group, version) = version.split_once('/').unwrap_or(("", &version));
        let resource = ApiResource::from_gvk_with_plural(
            &GroupVersionKind::gvk(group, version, &kind),
            &format!("{}s", kind.to_lowercase()),
        );
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        let api: Api<DynamicObject> = Api::default_namespaced_with(stage.client.clone(), &resource);
        eventually("the object is created", async || {
            match api.create(&PostParams::default(), &object).await {
                Ok(_) => Some(()),
                Err(kube::Error::Api(status)) if status.message.contains("webhook") => None,
                Err(other) => unreachable!("{other}"),
            }
        })
        .await;
    }
}

/// Waits until the API server calls the conversion webhook. Before that, it stores objects without conversion.
pub(crate) async fn converts(namespace: &TestNamespace) {
    let crds: Api<CustomResourceDefinition> = Api::all(namespace.client.clone());
    eventually("the webhook is registered", async || {
        let crd = crds.get("rolebasedgroups.workloads.x-k8s.io").await.unwrap();
        (crd.spec.conversion?.strategy == "Webhook").then_some(())
    })
    .await;
    let older: DynamicObject = serde_json::from_value(json!({ "metadata": { "name": "probe" },
        "apiVersion": "workloads.x-k8s.io/v1alpha1", "kind": "RoleBasedGroup",
        "spec": { "roles": [{ "name": "r", "replicas": 0, "template": { "spec": { "containers": [] } } }] } }))
    .unwrap();
    let gvk = GroupVersionKind::gvk("workloads.x-k8s.io", "v1alpha1", "RoleBasedGroup");
    let resource = ApiResource::from_gvk_with_plural(&gvk, "rolebasedgroups");
    let of_then: Api<DynamicObject> = Api::default_namespaced_with(namespace.client.clone(), &resource);
    let of_now: Api<RoleBasedGroup> = Api::default_namespaced(namespace.client.clone());
    eventually("objects are converted", async || {
        of_then.create(&PostParams::default(), &older).await.ok()?;
        let stored = of_now.get("probe").await.ok();
        eventually("the probe is deleted", async || {
            of_now.delete("probe", &DeleteParams::default()).await.err().map(drop)
        })
        .await;
        stored?.metadata.annotations?.contains_key(rbg_api::conversion::ORIGIN).then_some(())
    })
    .await;
}

async fn own_pods(stage: &TestOperator, group: &str) -> BTreeMap<String, Pod> {
    let label = ListParams::default().labels(&format!("rolebasedgroup.workloads.x-k8s.io/name={group}"));
    let pods = stage.api::<Pod>().list(&label).await.unwrap().items;
    pods.into_iter().map(|pod| (pod.metadata.name.clone().unwrap(), pod)).collect()
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True")
}

/// Waits until the group has this many pods and reports it.
pub(crate) async fn ready(stage: &TestOperator, group: &str, count: usize) -> BTreeMap<String, Pod> {
    let groups: Api<RoleBasedGroup> = stage.api();
    eventually("the group is ready", async || {
        let settled = is_settled(&groups.get(group).await.unwrap());
        let pods = own_pods(stage, group).await;
        (settled && pods.len() == count && pods.values().all(is_ready)).then_some(pods)
    })
    .await
}

/// Names of pods with random suffixes replaced.
fn families(pods: &BTreeMap<String, Pod>, random: &str) -> Vec<String> {
    let family = |name: &String| match name.strip_prefix(random) {
        Some(end) if end.len() == 5 => format!("{random}?"),
        _ => name.clone(),
    };
    pods.keys().map(family).collect()
}

/// A JSON patch, as `kubectl patch --type=json` sends it for the v1alpha1 resource.
async fn patch(stage: &TestOperator, group: &str, patch: &Value) {
    let namespace = &stage.namespace.name;
    let path = format!("/apis/workloads.x-k8s.io/v1alpha1/namespaces/{namespace}/rolebasedgroups/{group}");
    let request = Request::patch(path).header("content-type", "application/json-patch+json");
    let request = request.body(patch.to_string().into_bytes()).unwrap();
    let _: Value = stage.client.request(request).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_of_articles_run_and_are_updated() {
    // A control plane of its own: these webhooks stop before it does.
    let plane = ControlPlane::start().await.unwrap();
    let stage = TestOperator::begin_on(&plane, "articles").await;
    let webhooks = webhooks(&stage.namespace).await;
    converts(&stage.namespace).await;
    disaggregated(&stage).await;
    standalone(&stage).await;
    webhooks.token().cancel();
    stage.end().await;
}

async fn disaggregated(stage: &TestOperator) {
    const GROUP: &str = "sglang-pd-with-mooncake-demo";
    apply(stage, "examples/deprecated/v1alpha1/mooncake/pd-disaggregated-with-mooncake.yaml").await;
    let before = ready(stage, GROUP, 7).await;
    let store = format!("{GROUP}-mooncake-store-");
    let expected =
        ["decode-0", "mooncake-master-0", "mooncake-store-?", "mooncake-store-?", "mooncake-store-?"];
    let expected = expected.into_iter().chain(["prefill-0", "router-0"]).map(|end| format!("{GROUP}-{end}"));
    assert_eq!(families(&before, &store), expected.collect::<Vec<_>>());
    let of_service = ListParams::default().labels(&format!("kubernetes.io/service-name={GROUP}"));
    eventually("the Service selects the router", async || {
        let slices = stage.api::<EndpointSlice>().list(&of_service).await.unwrap().items;
        let mut found = slices.iter().flat_map(|slice| &slice.endpoints);
        let router = found.next()?.target_ref.clone()?.name?;
        (router == format!("{GROUP}-router-0")).then_some(())
    })
    .await;

    let image = json!([{ "op": "replace", "path": "/spec/roles/1/template/spec/containers/0/image",
        "value": "lmsysorg/sglang:v0.5.6" }]);
    patch(stage, GROUP, &image).await;
    let after = ready(stage, GROUP, 7).await;
    for (name, pod) in &after {
        let before = &before[name];
        assert_eq!(pod.metadata.uid, before.metadata.uid, "{name} was not recreated");
        let place = |pod: &Pod| {
            (pod.spec.as_ref().unwrap().node_name.clone(), pod.status.as_ref().unwrap().pod_ip.clone())
        };
        assert_eq!(place(pod), place(before), "{name} has not moved");
        assert_eq!(restarts(pod), i32::from(name.starts_with(&store)), "{name}");
    }
}

async fn standalone(stage: &TestOperator) {
    apply(stage, "articles/standalone-with-mooncake.yaml").await;
    let pods = ready(stage, "sglang-demo", 5).await;
    let ends =
        ["mooncake-master-0", "mooncake-store-0", "mooncake-store-1", "mooncake-store-2", "sglang-backend-0"];
    assert_eq!(pods.into_keys().collect::<Vec<_>>(), ends.map(|end| format!("sglang-demo-{end}")));
}
