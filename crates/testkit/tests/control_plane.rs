//! A control plane without nodes creates pods but cannot schedule them.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{ListParams, PostParams};
use moongate_testkit::ControlPlane;
use serde_json::{from_value, json};

/// Exceeded only when a test hangs.
const LIMIT: Duration = Duration::from_secs(60);

fn is_unschedulable(pod: &Pod) -> bool {
    let status = pod.status.as_ref().unwrap();
    let conditions = status.conditions.as_deref().unwrap_or_default();
    let reason = |reason: Option<&str>| reason == Some("Unschedulable");
    status.phase.as_deref() == Some("Pending")
        && conditions
            .iter()
            .any(|condition| condition.type_ == "PodScheduled" && reason(condition.reason.as_deref()))
}

#[tokio::test]
async fn a_deployment_creates_unschedulable_pods() {
    let plane = ControlPlane::shared().await.unwrap();
    let namespace = plane.namespace("deployment").await.unwrap();
    let deployment: Deployment = from_value(json!({
        "metadata": { "name": "web" },
        "spec": {
            "replicas": 2,
            "selector": { "matchLabels": { "app": "web" } },
            "template": {
                "metadata": { "labels": { "app": "web" } },
                "spec": { "containers": [{ "name": "web", "image": "web" }] },
            },
        },
    }))
    .unwrap();
    let deployments = Api::default_namespaced(namespace.client.clone());
    deployments.create(&PostParams::default(), &deployment).await.unwrap();

    let (sets, pods) = (
        Api::<ReplicaSet>::default_namespaced(namespace.client.clone()),
        Api::<Pod>::default_namespaced(namespace.client.clone()),
    );
    let started = Instant::now();
    loop {
        let found = pods.list(&ListParams::default().labels("app=web")).await.unwrap().items;
        // The API server sets the phase Pending; the scheduler adds the condition.
        if found.len() == 2 && found.iter().all(is_unschedulable) {
            break;
        }
        assert!(started.elapsed() < LIMIT, "timed out: {found:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let sets = sets.list(&ListParams::default()).await.unwrap().items;
    assert_eq!(sets.len(), 1);
    assert_eq!(sets[0].metadata.owner_references.as_ref().unwrap()[0].kind, "Deployment");
    namespace.delete().await.unwrap();
}

#[tokio::test]
async fn two_control_planes_run_concurrently_and_stop_on_drop() {
    let (first, second) = (ControlPlane::shared().await.unwrap(), ControlPlane::start().await.unwrap());
    let config = second.config("default").await.unwrap();
    assert_ne!(first.config("default").await.unwrap().cluster_url, config.cluster_url);
    second.namespace("second").await.unwrap();
    let (address, folder) = (config.cluster_url.authority().unwrap().to_string(), second.logs().to_owned());
    drop(second);
    assert!(std::net::TcpStream::connect(&address).is_err(), "the API server has stopped");
    assert!(!folder.exists());
    first.namespace("first").await.unwrap();
}
