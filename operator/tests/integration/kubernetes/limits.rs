//! Objects that request more than the operator or the API server can hold. They are reported, and other groups are served.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use moongate_operator::ResourceKind;
use moongate_testkit::{ControlPlane, FakeKubelet, KubeletTimings, TestNamespace};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};

use super::process::OperatorProcess;
use super::{eventually, group, install, is_settled, role, settled};

/// A debug build needs about 70 MiB.
const MAX_MEMORY: u64 = 300 << 20;

fn api(client: &Client, kind: ResourceKind) -> Api<DynamicObject> {
    Api::default_namespaced_with(client.clone(), &kind.resource())
}

async fn create(client: &Client, kind: ResourceKind, name: &str, spec: Value) {
    let object = json!({ "apiVersion": kind.api_version(), "kind": kind.name(), "metadata": { "name": name },
        "spec": spec });
    let object = serde_json::from_value(object).unwrap();
    api(client, kind).create(&PostParams::default(), &object).await.unwrap();
}

/// Waits for a condition with that reason, and returns its message.
async fn condition(client: &Client, kind: ResourceKind, name: &str, wanted: (&str, &str)) -> String {
    eventually(&format!("{name} has the condition {wanted:?}"), async || {
        let object = api(client, kind).get(name).await.unwrap();
        let conditions = object.data["status"]["conditions"].as_array()?.clone();
        let one = conditions.into_iter().find(|one| one["type"] == wanted.0 && one["reason"] == wanted.1)?;
        Some(one["message"].as_str().unwrap_or_default().to_owned())
    })
    .await
}

async fn begin(name: &str) -> (Arc<ControlPlane>, TestNamespace) {
    let plane = ControlPlane::shared().await.unwrap();
    let namespace = plane.namespace(name).await.unwrap();
    install(&namespace.client).await;
    (plane, namespace)
}

fn leader_worker(size: i32) -> Value {
    let template = role("r", 1, "engine:1")["standalonePattern"]["template"].clone();
    json!({ "name": "r", "replicas": 1, "leaderWorkerPattern": { "size": size, "template": template } })
}

#[tokio::test(flavor = "multi_thread")]
async fn huge_numbers_are_reported_and_others_are_served() {
    let (plane, namespace) = begin("limits").await;
    let client = namespace.client.clone();
    let _kubelet =
        FakeKubelet::start(client.clone(), &namespace.name, KubeletTimings::default()).await.unwrap();
    let huge = |role| json!({ "roles": [role] });
    create(&client, ResourceKind::Group, "replicas", huge(role("r", i32::MAX, "engine:1"))).await;
    create(&client, ResourceKind::Group, "many", huge(role("r", 100_000, "engine:1"))).await;
    create(&client, ResourceKind::Group, "size", huge(leader_worker(i32::MAX))).await;
    let template = json!({ "spec": huge(role("r", 1, "engine:1")) });
    let set = json!({ "replicas": i32::MAX, "groupTemplate": template });
    create(&client, ResourceKind::GroupSet, "groups", set).await;
    let component = |size| {
        let template = json!({ "spec": { "containers": [{ "name": "c", "image": "engine:1" }] } });
        json!({ "components": [{ "name": "c", "size": size, "template": template }] })
    };
    let set = json!({ "replicas": i32::MAX, "selector": { "matchLabels": { "app": "s" } },
        "roleInstanceTemplate": component(1) });
    create(&client, ResourceKind::Set, "instances", set).await;
    create(&client, ResourceKind::Instance, "pods", component(i32::MAX)).await;

    let operator = OperatorProcess::start(&plane.kubeconfig(), &namespace.name);
    let groups: Api<RoleBasedGroup> = Api::default_namespaced(client.clone());
    groups.create(&PostParams::default(), &group(json!([role("a", 2, "engine:1")]))).await.unwrap();
    settled(&groups).await;
    let ready = ("Ready", "LimitExceeded");
    let message = condition(&client, ResourceKind::Group, "replicas", ready).await;
    assert!(
        message.contains("role `r` with 2147483647 replicas") && message.contains("--max-pods-per-group")
    );
    condition(&client, ResourceKind::Group, "many", ready).await;
    let message = condition(&client, ResourceKind::Group, "size", ready).await;
    assert!(message.contains("an instance has 2147483647 pods"), "{message}");
    condition(&client, ResourceKind::GroupSet, "groups", ready).await;
    let stalled = ("Stalled", "LimitExceeded");
    condition(&client, ResourceKind::GroupSet, "groups", stalled).await;
    condition(&client, ResourceKind::Set, "instances", stalled).await;
    condition(&client, ResourceKind::Instance, "pods", stalled).await;

    let all = |kind| {
        let api = api(&client, kind);
        async move { api.list(&ListParams::default()).await.unwrap().items.len() }
    };
    let pods = Api::<Pod>::default_namespaced(client.clone()).list(&ListParams::default()).await.unwrap();
    assert_eq!(pods.items.len(), 2);
    assert_eq!((all(ResourceKind::Group).await, all(ResourceKind::Instance).await), (4, 3));
    let memory = operator.peak_memory();
    eprintln!("peak memory of the operator: {} MiB", memory >> 20);
    assert!(memory < MAX_MEMORY);

    // Without a restart of the operator.
    let lower = Patch::Merge(json!({ "spec": huge(role("r", 1, "engine:1")) }));
    groups.patch("many", &PatchParams::default(), &lower).await.unwrap();
    eventually("the corrected group is ready", async || {
        Some(groups.get("many").await.unwrap()).filter(is_settled)
    })
    .await;
    condition(&client, ResourceKind::Group, "many", ("Stalled", "PlanCarriedOut")).await;
    namespace.delete().await.unwrap();
}

/// An existing group keeps its pods when its new spec exceeds a limit.
#[tokio::test(flavor = "multi_thread")]
async fn a_limit_deletes_nothing() {
    let (plane, namespace) = begin("limits-scaled").await;
    let client = namespace.client.clone();
    let _kubelet =
        FakeKubelet::start(client.clone(), &namespace.name, KubeletTimings::default()).await.unwrap();
    let _operator = OperatorProcess::start(&plane.kubeconfig(), &namespace.name);
    let groups: Api<RoleBasedGroup> = Api::default_namespaced(client.clone());
    let mut roles = json!([role("a", 1, "engine:1"), role("b", 1, "engine:1")]);
    groups.create(&PostParams::default(), &group(roles.clone())).await.unwrap();
    settled(&groups).await;
    let uids = async || {
        let pods = super::pods(&client).await;
        pods.into_iter().map(|pod| pod.metadata.uid).collect::<Vec<_>>()
    };
    let before = uids().await;
    roles[0]["replicas"] = i32::MAX.into();
    roles.as_array_mut().unwrap().truncate(1);
    groups
        .patch("g", &PatchParams::default(), &Patch::Merge(json!({ "spec": { "roles": roles } })))
        .await
        .unwrap();
    condition(&client, ResourceKind::Group, "g", ("Ready", "LimitExceeded")).await;
    assert_eq!(uids().await, before);
    namespace.delete().await.unwrap();
}

/// The API server would reject the ConfigMap, at first with an error that names no cause.
#[tokio::test(flavor = "multi_thread")]
async fn a_discovery_file_that_is_too_large_is_reported() {
    let (plane, namespace) = begin("limits-discovery").await;
    let client = namespace.client.clone();
    let _operator = OperatorProcess::start(&plane.kubeconfig(), &namespace.name);
    let mut large = role(&"r".repeat(40), 9000, "engine:1");
    large["servicePorts"] = json!([{ "name": "http", "port": 8000 }]);
    create(&client, ResourceKind::Group, "discovery", json!({ "roles": [large] })).await;
    let message = condition(&client, ResourceKind::Group, "discovery", ("Ready", "LimitExceeded")).await;
    assert!(message.contains("the discovery file") && message.contains("at most 1048576"), "{message}");
    assert!(api(&client, ResourceKind::Set).list(&ListParams::default()).await.unwrap().items.is_empty());
    namespace.delete().await.unwrap();
}
