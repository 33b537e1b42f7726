//! The command with which articles upgrade the store: a JSON patch with a path of v1alpha1, sent to the newest version.

use std::collections::BTreeMap;

use axum::http::Request;
use k8s_openapi::api::core::v1::Pod;
use kube::Error;
use moongate_testkit::ControlPlane;
use rbg_api::v1alpha2::CoordinatedPolicy;
use serde_json::{Value, json};
use tokio::process::Command;

use super::events::event;
use super::published_manifests::{apply, converts, ready, webhooks};
use super::test_operator::TestOperator;
use super::{eventually, restarts};

/// The articles' patch, and their rule for roles that are updated together.
const UPGRADE: &str = r#"[{"op": "replace", "path": "/spec/roles/1/template/spec/containers/0/image", "value": "lmsysorg/sglang:v0.5.6"}]"#;
const COORDINATION: &str = r#"{"spec": {"coordination": [{"name": "prefill-decode-co-update", "roles": ["prefill", "decode"], "strategy": {"rollingUpdate": {"maxUnavailable": "5%", "maxSkew": "1%", "partition": "20%"}}}]}}"#;
const QUALIFIED: &str = "rolebasedgroups.v1alpha1.workloads.x-k8s.io";
const GROUP: &str = "sglang-pd-with-mooncake-demo";
const STORES: &str = "sglang-pd-with-mooncake-demo-mooncake-store-";
/// Paths of the store's image in v1alpha1 and in v1alpha2.
const MIRROR: &str = "/spec/roles/1/template/spec/containers/0/image";
const PATTERN: &str = "/spec/roles/1/standalonePattern/template/spec/containers/0/image";

/// A patch that sets the image at these paths.
fn images(images: &[(&str, &str)]) -> Value {
    images.iter().map(|(path, image)| json!({ "op": "replace", "path": path, "value": image })).collect()
}

fn path(stage: &TestOperator, version: &str) -> String {
    let namespace = &stage.namespace.name;
    format!("/apis/workloads.x-k8s.io/{version}/namespaces/{namespace}/rolebasedgroups/{GROUP}")
}

/// The version to which kubectl sends requests for `rolebasedgroup`.
async fn preferred_version(stage: &TestOperator) -> String {
    let groups = stage.client.list_api_groups().await.unwrap().groups;
    let group = groups.into_iter().find(|group| group.name == "workloads.x-k8s.io").unwrap();
    group.preferred_version.unwrap().version
}

/// Sends a patch to `resource` as kubectl does, by kubectl itself if this machine has it.
async fn kubectl_patch(plane: &ControlPlane, stage: &TestOperator, resource: &str, kind: &str, patch: &str) {
    let mut command = Command::new("kubectl");
    command.arg("--kubeconfig").arg(plane.kubeconfig()).args(["--namespace", &stage.namespace.name]);
    command.args(["patch", resource, GROUP, &format!("--type={kind}"), &format!("-p={patch}")]);
    match command.output().await {
        Ok(output) => assert!(output.status.success(), "{output:?}"),
        Err(error) => {
            eprintln!("kubectl does not run ({error}), sending its request");
            let version = match resource.split('.').nth(1) {
                Some(version) => version.to_owned(),
                None => preferred_version(stage).await,
            };
            let _: Value = send_patch(stage, &version, kind, patch).await.unwrap();
        }
    }
}

async fn send_patch(stage: &TestOperator, version: &str, kind: &str, patch: &str) -> Result<Value, Error> {
    let content_type = match kind {
        "json" => "application/json-patch+json",
        _ => "application/merge-patch+json",
    };
    let request = Request::patch(path(stage, version)).header("content-type", content_type);
    stage.client.request(request.body(patch.as_bytes().to_vec()).unwrap()).await
}

async fn patch(stage: &TestOperator, patch: &Value) -> Result<Value, Error> {
    send_patch(stage, "v1alpha2", "json", &patch.to_string()).await
}

async fn read(stage: &TestOperator, version: &str) -> Value {
    stage.client.request(Request::get(path(stage, version)).body(Vec::new()).unwrap()).await.unwrap()
}

/// The stores run the image after so many restarts; all pods are where they were.
async fn stores_restarted(stage: &TestOperator, before: &BTreeMap<String, Pod>, times: i32, image: &str) {
    let after = ready(stage, GROUP, 7).await;
    let place = |pod: &Pod| {
        let (spec, status) = (pod.spec.clone().unwrap(), pod.status.clone().unwrap());
        (pod.metadata.uid.clone(), spec.node_name, status.pod_ip)
    };
    let mut stores = 0;
    for (name, pod) in &after {
        assert_eq!(place(pod), place(&before[name]), "{name}");
        let is_store = name.starts_with(STORES);
        stores += u8::from(is_store);
        assert_eq!(restarts(pod), if is_store { times } else { 0 }, "{name}");
        let now = |pod: &Pod| pod.spec.as_ref().unwrap().containers[0].image.clone();
        let expected = if is_store { Some(image.to_owned()) } else { now(&before[name]) };
        assert_eq!(now(pod), expected, "{name}");
    }
    assert_eq!(stores, 3);
    let current = read(stage, "v1alpha2").await;
    assert_eq!(
        [MIRROR, PATTERN].map(|path| current.pointer(path).cloned()),
        [Some(image.into()), Some(image.into())]
    );
    let older = read(stage, "v1alpha1").await;
    assert_eq!(older.pointer(MIRROR), Some(&image.into()));
    assert_eq!(older.pointer(PATTERN), None);
    assert_eq!(older.pointer("/spec/roles/1/mirroredTemplateHash"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_articles_command_upgrades_the_stores_in_place() {
    // A control plane of its own: these webhooks stop before it does.
    let plane = ControlPlane::start().await.unwrap();
    let stage = TestOperator::begin_on(&plane, "mirrors").await;
    let webhooks = webhooks(&stage.namespace).await;
    converts(&stage.namespace).await;
    apply(&stage, "examples/deprecated/v1alpha1/mooncake/pd-disaggregated-with-mooncake.yaml").await;
    let before = ready(&stage, GROUP, 7).await;
    assert_eq!(preferred_version(&stage).await, "v1alpha2");

    kubectl_patch(&plane, &stage, "rolebasedgroup", "json", UPGRADE).await;
    stores_restarted(&stage, &before, 1, "lmsysorg/sglang:v0.5.6").await;
    patch(&stage, &images(&[(PATTERN, "lmsysorg/sglang:v0.5.7")])).await.unwrap();
    stores_restarted(&stage, &before, 2, "lmsysorg/sglang:v0.5.7").await;
    let both = images(&[(MIRROR, "lmsysorg/sglang:v0.5.8"), (PATTERN, "lmsysorg/sglang:v0.5.9")]);
    patch(&stage, &both).await.unwrap();
    stores_restarted(&stage, &before, 3, "lmsysorg/sglang:v0.5.9").await;
    let conflict = event(&stage, "RoleBasedGroup", GROUP, "TemplateConflict").await;
    assert!(conflict.note.unwrap().contains("mooncake-store"));

    let nameless = json!([{ "op": "remove", "path": "/spec/roles/1/template/spec/containers/0/name" }]);
    let refused = patch(&stage, &nameless).await.unwrap_err().to_string();
    assert!(refused.contains("denied the request") && refused.contains("spec.containers[0]"), "{refused}");

    kubectl_patch(&plane, &stage, QUALIFIED, "json", UPGRADE).await;
    stores_restarted(&stage, &before, 4, "lmsysorg/sglang:v0.5.6").await;
    kubectl_patch(&plane, &stage, QUALIFIED, "merge", COORDINATION).await;
    let policy = eventually("the rule is a policy", async || {
        stage.api::<CoordinatedPolicy>().get_opt(GROUP).await.unwrap()
    })
    .await;
    assert_eq!(policy.spec.policies[0].name, "prefill-decode-co-update");
    stores_restarted(&stage, &before, 4, "lmsysorg/sglang:v0.5.6").await;
    webhooks.token().cancel();
    stage.end().await;
}
