//! The operator on a real control plane, with a kubelet that runs no containers.
#![expect(clippy::print_stderr, reason = "tests print why they fail")]
#![expect(clippy::disallowed_methods, reason = "a test outlives none of its tasks")]

mod events;
mod examples;
mod external_kinds;
mod fault_recovery;
mod faults;
mod group_set;
mod hooks;
mod kills;
mod kubectl;
mod leadership;
mod lifecycle;
mod limits;
mod mirrors;
mod nodes;
mod objects;
mod permissions;
mod pre_pull;
mod process;
mod profiles;
mod proxy;
mod published_manifests;
mod rbac_rules;
mod refused_writes;
mod removed_fields;
mod requests;
mod scaling;
mod single_namespace;
mod stateful;
mod takeover;
mod test_operator;
mod topology;
mod traces;
mod two_releases;
mod warmup;
mod webhooks;

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use moongate_operator::OperatorOptions;
use moongate_runtime::Supervisor;
use moongate_testkit::{ControlPlane, FakeKubelet, KubeletTimings};
use rbg_api::v1alpha2::{RoleBasedGroup, RoleInstance};
use serde_json::{Value, json};

/// Generous, since it expires only if something hangs.
const TEST_TIMEOUT: Duration = Duration::from_secs(90);

async fn install(client: &Client) {
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    for crd in rbg_api::crds::all() {
        match api.create(&PostParams::default(), &crd).await {
            // Another test has installed them first.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            created_at => drop(created_at.unwrap()),
        }
    }
    for crd in rbg_api::crds::all() {
        let name = crd.metadata.name.unwrap();
        eventually(&name, async || {
            let status = api.get(&name).await.unwrap().status.unwrap_or_default();
            let conditions = status.conditions.unwrap_or_default();
            conditions.iter().any(|one| one.type_ == "Established" && one.status == "True").then_some(())
        })
        .await;
    }
}

/// Polls until `poll` returns a value.
async fn eventually<T>(what: &str, mut poll: impl AsyncFnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(answer) = poll().await {
            return answer;
        }
        assert!(started.elapsed() < TEST_TIMEOUT, "timed out: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn role(name: &str, replicas: i32, image: &str) -> Value {
    json!({ "name": name, "replicas": replicas, "standalonePattern": { "template": { "spec": {
        "terminationGracePeriodSeconds": 1, "containers": [{ "name": "engine", "image": image }] } } } })
}

fn group(roles: Value) -> RoleBasedGroup {
    serde_json::from_value(json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroup",
        "metadata": { "name": "g" }, "spec": { "roles": roles } }))
    .unwrap()
}

/// Whether the group has these conditions at its present generation.
fn condition_is(group: &RoleBasedGroup, conditions: &[(&str, &str)]) -> bool {
    let status = group.status.clone().unwrap_or_default();
    let is = |(kind, value): &(&str, &str)| {
        status.conditions.iter().any(|one| one.kind == *kind && one.status == *value)
    };
    status.observed_generation == group.metadata.generation && conditions.iter().all(is)
}

/// Whether the group is ready and nothing is in progress.
fn is_settled(group: &RoleBasedGroup) -> bool {
    condition_is(group, &[("Ready", "True"), ("Progressing", "False"), ("RollingUpdateInProgress", "False")])
}

async fn settled(groups: &Api<RoleBasedGroup>) -> RoleBasedGroup {
    eventually("the group is ready and settled", async || {
        Some(groups.get("g").await.unwrap()).filter(is_settled)
    })
    .await
}

/// Runs an operator while `scenario` runs.
async fn run_with_operator(options: OperatorOptions, scenario: impl Future<Output = ()>) {
    let supervisor = Supervisor::new();
    tokio::select! {
        ended = moongate_operator::run(options, &supervisor) => unreachable!("{ended:?}"),
        () = scenario => {}
    }
    supervisor.shutdown(TEST_TIMEOUT).await.unwrap();
}

async fn pods(client: &Client) -> Vec<Pod> {
    let mut pods =
        Api::<Pod>::default_namespaced(client.clone()).list(&ListParams::default()).await.unwrap().items;
    pods.sort_by_key(|pod| pod.metadata.name.clone());
    pods
}

fn names(pods: &[Pod]) -> Vec<&str> {
    pods.iter().map(|pod| pod.metadata.name.as_deref().unwrap()).collect()
}

fn restarts(pod: &Pod) -> i32 {
    pod.status.as_ref().unwrap().container_statuses.as_ref().unwrap()[0].restart_count
}

fn created_at(pod: &Pod) -> k8s_openapi::jiff::Timestamp {
    pod.metadata.creation_timestamp.as_ref().unwrap().0
}

#[tokio::test(flavor = "multi_thread")]
async fn group_is_created_updated_in_place_scaled_and_deleted() {
    let plane = ControlPlane::start().await.unwrap();
    let namespace = plane.namespace("operator").await.unwrap();
    let client = namespace.client.clone();
    install(&client).await;
    let _kubelet =
        FakeKubelet::start(client.clone(), &namespace.name, KubeletTimings::default()).await.unwrap();
    let supervisor = Supervisor::new();
    let options = OperatorOptions {
        kubeconfig: Some(plane.kubeconfig()),
        namespace: Some(namespace.name.clone()),
        lease: Some((namespace.name.clone(), "operator".to_owned())),
        ..OperatorOptions::default()
    };
    let running = {
        let supervisor = supervisor.clone();
        tokio::spawn(async move { moongate_operator::run(options, &supervisor).await })
    };

    let groups: Api<RoleBasedGroup> = Api::default_namespaced(client.clone());
    let mut wanted = json!([role("a", 2, "engine:1"), role("b", 1, "engine:1")]);
    wanted[1]["dependencies"] = json!(["a"]);
    groups.create(&PostParams::default(), &group(wanted.clone())).await.unwrap();
    settled(&groups).await;
    let before = pods(&client).await;
    assert_eq!(names(&before), ["g-a-0", "g-a-1", "g-b-0"]);
    assert!(created_at(&before[2]) >= created_at(&before[1]), "b depends on a");
    let file = Api::<ConfigMap>::default_namespaced(client.clone()).get("g").await.unwrap();
    assert!(file.data.unwrap()["config.yaml"].contains("g-a-1.s-g-a"));
    Api::<Service>::default_namespaced(client.clone()).get("s-g-b").await.unwrap();
    for (pod, index) in before.iter().zip(["0", "1", "0"]) {
        assert_eq!(pod.metadata.labels.as_ref().unwrap()[rbg_api::keys::ROLE_INSTANCE_INDEX], index);
    }

    wanted[0]["standalonePattern"]["template"]["spec"]["containers"][0]["image"] = "engine:2".into();
    let patch = PatchParams::default();
    groups.patch("g", &patch, &Patch::Merge(json!({ "spec": { "roles": wanted } }))).await.unwrap();
    let updated = settled(&groups).await;
    let after = pods(&client).await;
    let uids = |pods: &[Pod]| pods.iter().map(|pod| pod.metadata.uid.clone()).collect::<Vec<_>>();
    assert_eq!(uids(&after), uids(&before));
    assert_eq!(after.iter().map(restarts).collect::<Vec<_>>(), [1, 1, 0]);
    assert_eq!(updated.status.unwrap().role_statuses[0].updated_replicas, 2);
    assert_eq!(after[1].metadata.labels.as_ref().unwrap()[rbg_api::keys::ROLE_INSTANCE_INDEX], "1");

    wanted[0]["replicas"] = 3.into();
    wanted[1]["replicas"] = 0.into();
    groups.patch("g", &patch, &Patch::Merge(json!({ "spec": { "roles": wanted } }))).await.unwrap();
    settled(&groups).await;
    eventually("b has no pods", async || {
        (names(&pods(&client).await) == ["g-a-0", "g-a-1", "g-a-2"]).then_some(())
    })
    .await;

    groups.delete("g", &DeleteParams::background()).await.unwrap();
    eventually("all objects are deleted", async || {
        let instances: Api<RoleInstance> = Api::default_namespaced(client.clone());
        let none = instances.list(&ListParams::default()).await.unwrap().items.is_empty();
        (none && pods(&client).await.is_empty()).then_some(())
    })
    .await;
    supervisor.token().cancel();
    running.await.unwrap().unwrap();
}
