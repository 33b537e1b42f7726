//! An API server that is overloaded, fails, loses connections and drops old versions: the operator converges nevertheless.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams, PostParams};
use moongate_operator::{ApiServerTimeouts, OperatorOptions, ResourceKind};
use moongate_testkit::{ControlPlane, FakeKubelet, KubeletTimings};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};

use super::proxy::FaultProxy;
use super::{eventually, group, install, pods, restarts, role, run_with_operator, settled};

/// Percentage of requests that fail.
const RATE: u32 = 25;

fn roles(image: &str) -> Value {
    json!([role("a", 2, image), role("b", 2, image)])
}

#[tokio::test(flavor = "multi_thread")]
async fn api_faults_never_duplicate_creation_or_update() {
    let plane = ControlPlane::shared().await.unwrap();
    let namespace = plane.namespace("faults").await.unwrap();
    let client = namespace.client.clone();
    install(&client).await;
    let _kubelet =
        FakeKubelet::start(client.clone(), &namespace.name, KubeletTimings::default()).await.unwrap();
    let proxy = FaultProxy::start(client.clone()).await;
    proxy.fail(RATE);
    let options = OperatorOptions {
        kubeconfig: Some(proxy.kubeconfig(plane.logs())),
        namespace: Some(namespace.name.clone()),
        ..OperatorOptions::default()
    };
    let story = async {
        let groups: Api<RoleBasedGroup> = Api::default_namespaced(client.clone());
        groups.create(&PostParams::default(), &group(roles("engine:1"))).await.unwrap();
        settled(&groups).await;
        let before = pods(&client).await;
        let created = proxy.requests();
        let image = Patch::Merge(json!({ "spec": { "roles": roles("engine:2") } }));
        groups.patch("g", &PatchParams::default(), &image).await.unwrap();
        settled(&groups).await;
        let after = pods(&client).await;
        let uids = |pods: &[Pod]| pods.iter().map(|pod| pod.metadata.uid.clone()).collect::<Vec<_>>();
        assert_eq!(uids(&after), uids(&before));
        assert_eq!(after.iter().map(restarts).collect::<Vec<_>>(), [1; 4]);
        eprintln!(
            "requests: {created} to list everything and create a group, {} to update it",
            proxy.requests() - created
        );
        eprintln!("{:?}", proxy.faults());
        assert_eq!(proxy.faults().len(), 6, "every kind of fault occurred");
        // Retries must not overload a failing server.
        assert!(proxy.requests() < 2000, "{}", proxy.requests());
    };
    run_with_operator(options, story).await;
    namespace.delete().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_to_a_silent_api_server_are_retried() {
    let plane = ControlPlane::shared().await.unwrap();
    let namespace = plane.namespace("silence").await.unwrap();
    let client = namespace.client.clone();
    install(&client).await;
    let _kubelet =
        FakeKubelet::start(client.clone(), &namespace.name, KubeletTimings::default()).await.unwrap();
    let proxy = FaultProxy::start(client.clone()).await;
    // All responses are delayed, those to the first lists too.
    proxy.be_silent(true);
    let limits = ApiServerTimeouts { response: Duration::from_secs(3), watch: Duration::from_secs(5) };
    let options = OperatorOptions {
        kubeconfig: Some(proxy.kubeconfig(plane.logs())),
        namespace: Some(namespace.name.clone()),
        limits,
        ..OperatorOptions::default()
    };
    let asked_twice = async || {
        let before = proxy.requests();
        eventually("all watches have restarted", async || {
            (proxy.requests() > before + 2 * ResourceKind::ALL.len() as u64).then_some(())
        })
        .await;
    };
    let story = async {
        let groups: Api<RoleBasedGroup> = Api::default_namespaced(client.clone());
        groups.create(&PostParams::default(), &group(roles("engine:1"))).await.unwrap();
        asked_twice().await;
        assert!(pods(&client).await.is_empty());
        proxy.be_silent(false);
        settled(&groups).await;
        let before = pods(&client).await;
        let image = Patch::Merge(json!({ "spec": { "roles": roles("engine:2") } }));
        groups.patch("g", &PatchParams::default(), &image).await.unwrap();
        // During the update: its writes take effect, but no response arrives.
        eventually("the first pod has restarted", async || {
            pods(&client).await.iter().any(|pod| restarts(pod) > 0).then_some(())
        })
        .await;
        proxy.be_silent(true);
        asked_twice().await;
        proxy.be_silent(false);
        settled(&groups).await;
        let after = pods(&client).await;
        let uids = |pods: &[Pod]| pods.iter().map(|pod| pod.metadata.uid.clone()).collect::<Vec<_>>();
        assert_eq!(uids(&after), uids(&before));
        assert_eq!(after.iter().map(restarts).collect::<Vec<_>>(), [1; 4]);
    };
    run_with_operator(options, story).await;
    namespace.delete().await.unwrap();
}
