//! A warmup of the nodes of a group, and of nodes by label.

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::events::v1::Event;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use rbg_api::keys;
use rbg_api::v1alpha2::{RoleBasedGroup, RoleBasedGroupWarmup};
use serde_json::{Value, json};

use super::test_operator::TestOperator;
use super::{eventually, group, pods, role, settled};

async fn run_warmup(stage: &TestOperator, name: &str, spec: Value) -> RoleBasedGroupWarmup {
    let warmups: Api<RoleBasedGroupWarmup> = stage.api();
    let warmup = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroupWarmup",
        "metadata": { "name": name }, "spec": spec });
    warmups.create(&PostParams::default(), &serde_json::from_value(warmup).unwrap()).await.unwrap();
    eventually("the warmup has finished", async || {
        let warmup = warmups.get(name).await.unwrap();
        let status = warmup.status.clone().unwrap_or_default();
        matches!(status.phase.as_str(), "Completed" | "Failed").then_some(warmup)
    })
    .await
}

fn warmed(pods: &[Pod], name: &str) -> Vec<Pod> {
    let is_of = |pod: &&Pod| pod.metadata.labels.iter().flatten().any(|(_, value)| value == name);
    pods.iter().filter(is_of).cloned().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_are_warmed_up_with_events() {
    let stage = TestOperator::begin("warmup").await;
    let groups: Api<RoleBasedGroup> = stage.api();
    groups.create(&PostParams::default(), &group(json!([role("a", 1, "engine:1")]))).await.unwrap();
    settled(&groups).await;
    let node = pods(&stage.client).await[0].spec.clone().unwrap().node_name.unwrap();

    // An image without a shell counts as pulled.
    let roles = json!({ "a": { "imagePreload": { "images": ["engine:2", "shell-less:1"] } } });
    let spec = json!({ "targetRoleBasedGroup": { "name": "g", "roles": roles },
        "policies": { "backoffLimitPerNode": 0, "maxFailedNodes": 0 } });
    let status = run_warmup(&stage, "by-group", spec).await.status.unwrap();
    assert_eq!((status.phase.as_str(), status.succeeded, status.failed), ("Completed", 1, 0));
    let all = pods(&stage.client).await;
    let own = warmed(&all, "by-group");
    assert_eq!(own.len(), 1);
    assert_eq!(own[0].spec.as_ref().unwrap().node_selector.as_ref().unwrap()[keys::HOSTNAME], node);
    let images = own[0].spec.as_ref().unwrap().containers.iter().map(|one| one.image.clone().unwrap());
    assert_eq!(images.collect::<Vec<_>>(), ["engine:2", "shell-less:1"]);
    let events: Api<Event> = stage.api();
    eventually("the events exist", async || {
        let all = events.list(&ListParams::default()).await.unwrap().items;
        let of_it = all.into_iter().filter(|event| {
            event.regarding.as_ref().is_some_and(|object| object.name.as_deref() == Some("by-group"))
        });
        let reasons: Vec<String> = of_it.filter_map(|event| event.reason).collect();
        let expected = ["CreatedPod", "WarmupStarted", "WarmupCompleted"];
        expected.iter().all(|reason| reasons.iter().any(|one| one == reason)).then_some(())
    })
    .await;

    // By label, and deleted after its TTL.
    let nodes = Api::<Node>::all(stage.client.clone());
    let label = json!({ "metadata": { "labels": { "warmup": "yes" } } });
    nodes.patch(&node, &PatchParams::default(), &Patch::Merge(label)).await.unwrap();
    let action = json!({ "containers": [{ "name": "compile", "image": "compiler:1" }] });
    let target = json!({ "nodeSelector": { "warmup": "yes" }, "customizedAction": action });
    let warmup = run_warmup(&stage, "by-label", json!({ "targetNodes": target })).await;
    assert_eq!(warmup.status.unwrap().succeeded, 1);
    let warmups: Api<RoleBasedGroupWarmup> = stage.api();
    let end = json!({ "spec": { "policies": { "ttlSecondsAfterFinished": 0 } } });
    warmups.patch("by-label", &PatchParams::default(), &Patch::Merge(end)).await.unwrap();
    eventually("it and its pod are deleted", async || {
        let is_deleted = warmups.get_opt("by-label").await.unwrap().is_none();
        (is_deleted && warmed(&pods(&stage.client).await, "by-label").is_empty()).then_some(())
    })
    .await;
    stage.end().await;
}
