//! The operator replaces real store nodes in place: each drains first and settles before the next, and no object is lost.
#![expect(clippy::disallowed_methods, reason = "a test outlives none of its tasks")]

mod nodes;

use std::ffi::OsString;
use std::time::{Duration, Instant};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use moongate_master::RunningMaster;
use moongate_master::flags::{self, MasterInvocation};
use moongate_operator::OperatorOptions;
use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient as StoreClient, KvClientOptions as StoreOptions, PutOptions};
use moongate_testkit::{ControlPlane, FakeKubelet, KubeletTimings};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};

use nodes::StoreNodePods;

/// Generous, because it only detects a test that hangs.
const LIMIT: Duration = Duration::from_secs(120);
const OBJECTS: usize = 60;
const SIZE: usize = 100_000;

/// Calls `ask` repeatedly until it returns a value, and returns that value.
async fn wait_until<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(begun.elapsed() < LIMIT, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn install(client: &Client) {
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    for crd in rbg_api::crds::all() {
        api.create(&PostParams::default(), &crd).await.unwrap();
        let name = crd.metadata.name.unwrap();
        wait_until(&name, async || {
            let status = api.get(&name).await.unwrap().status?;
            let mut conditions = status.conditions?.into_iter();
            conditions.find(|one| one.type_ == "Established" && one.status == "True")
        })
        .await;
    }
}

async fn start_master(supervisor: &Supervisor) -> RunningMaster {
    let line = ["--rpc_address=127.0.0.1", "--rpc_port=0", "--metrics_host=127.0.0.1", "--metrics_port=0"];
    let MasterInvocation::Serve(options) = flags::read(line.map(OsString::from), |_| None).unwrap() else {
        panic!("the master is asked to serve")
    };
    moongate_master::start(*options, supervisor).await.unwrap()
}

fn roles(image: &str, port: u16) -> Value {
    json!([{ "name": "store", "replicas": 3,
        "annotations": { "moongate.io/upgrade-hooks": port.to_string() },
        "standalonePattern": { "template": { "spec": {
            "terminationGracePeriodSeconds": 1, "containers": [{ "name": "store", "image": image }] } } } }])
}

/// Waits until the status of the group reports that its current spec is applied completely.
async fn settled(groups: &Api<RoleBasedGroup>) {
    wait_until("the group is settled", async || {
        let group = groups.get("g").await.unwrap();
        let status = group.status?;
        let has = |kind: &str, value: &str| {
            status.conditions.iter().any(|one| one.kind == kind && one.status == value)
        };
        let current = status.observed_generation == group.metadata.generation;
        (current && has("Ready", "True") && has("RollingUpdateInProgress", "False")).then_some(())
    })
    .await;
}

fn bytes(number: usize) -> Vec<u8> {
    (0..SIZE).map(|at| ((at + 1) * (number + 3) % 251) as u8).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn store_nodes_are_replaced_one_after_another_without_a_loss() {
    let supervisor = Supervisor::new();
    let master = start_master(&supervisor).await;
    let plane = ControlPlane::start().await.unwrap();
    let namespace = plane.namespace("stores").await.unwrap();
    let client = namespace.client.clone();
    install(&client).await;
    let nodes =
        StoreNodePods::new(&master.rpc_address().to_string(), &master.service_addresses().admin.to_string());
    let _kubelet =
        FakeKubelet::run(client.clone(), &namespace.name, KubeletTimings::default(), nodes.clone())
            .await
            .unwrap();
    let options = OperatorOptions {
        kubeconfig: Some(plane.kubeconfig()),
        namespace: Some(namespace.name.clone()),
        ..OperatorOptions::default()
    };
    let running = {
        let supervisor = supervisor.clone();
        tokio::spawn(async move { moongate_operator::run(options, &supervisor).await })
    };
    let groups: Api<RoleBasedGroup> = Api::default_namespaced(client.clone());
    let group = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroup",
        "metadata": { "name": "g" }, "spec": { "roles": roles("store:1", nodes.port) } });
    groups.create(&PostParams::default(), &serde_json::from_value(group).unwrap()).await.unwrap();
    settled(&groups).await;

    let rpc = master.rpc_address().to_string();
    let store = StoreClient::new(&rpc, StoreOptions::default(), &supervisor).unwrap();
    for number in 0..OBJECTS {
        store.put(&format!("object-{number}"), &bytes(number), &PutOptions::default()).await.unwrap();
    }
    let wanted = json!({ "spec": { "roles": roles("store:2", nodes.port) } });
    groups.patch("g", &PatchParams::default(), &Patch::Merge(wanted)).await.unwrap();
    settled(&groups).await;

    let seen = nodes.seen.lock().clone();
    assert_eq!(seen.violations, [""; 0]);
    assert_eq!(seen.replaced, ["g-store-2", "g-store-1", "g-store-0"]);
    for number in 0..OBJECTS {
        let got = store.get(&format!("object-{number}")).await.unwrap();
        assert!(got[..] == bytes(number)[..], "object {number}");
    }
    supervisor.token().cancel();
    running.await.unwrap().unwrap();
}
