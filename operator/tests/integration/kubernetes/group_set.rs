//! RoleBasedGroupSets and their groups.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use rbg_api::Condition;
use rbg_api::v1alpha2::{RoleBasedGroup, RoleBasedGroupSet};
use serde_json::json;

use super::test_operator::TestOperator;
use super::{eventually, names, pods, restarts, role};

fn is(conditions: &[Condition], kind: &str, status: &str) -> bool {
    conditions.iter().any(|condition| condition.kind == kind && condition.status == status)
}

async fn settled(sets: &Api<RoleBasedGroupSet>, replicas: i32) -> RoleBasedGroupSet {
    eventually("the set is ready and settled", async || {
        let set = sets.get("s").await.unwrap();
        let status = set.status.clone().unwrap_or_default();
        let settled = status.observed_generation == set.metadata.generation
            && (status.replicas, status.ready_replicas) == (replicas, replicas)
            && is(&status.conditions, "Ready", "True")
            && is(&status.conditions, "RollingUpdateInProgress", "False");
        settled.then_some(set)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn group_set_creates_rolls_scales_and_deletes_groups() {
    let stage = TestOperator::begin("group-set").await;
    let sets: Api<RoleBasedGroupSet> = stage.api();
    let template = |image: &str| json!({ "metadata": { "labels": { "app": "a" } }, "spec": { "roles": [role("r", 2, image)] } });
    let set = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroupSet",
        "metadata": { "name": "s" }, "spec": { "replicas": 2, "groupTemplate": template("engine:1") } });
    let set: RoleBasedGroupSet = serde_json::from_value(set).unwrap();
    sets.create(&PostParams::default(), &set).await.unwrap();
    settled(&sets, 2).await;
    let before = pods(&stage.client).await;
    assert_eq!(names(&before), ["s-0-r-0", "s-0-r-1", "s-1-r-0", "s-1-r-1"]);
    let group = stage.api::<RoleBasedGroup>().get("s-1").await.unwrap();
    assert_eq!(group.metadata.labels.unwrap()["app"], "a");
    let written = group.metadata.resource_version;

    let merge = |body| async { sets.patch("s", &PatchParams::default(), &Patch::Merge(body)).await.unwrap() };
    merge(json!({ "spec": { "groupTemplate": template("engine:2") } })).await;
    settled(&sets, 2).await;
    let after = pods(&stage.client).await;
    let uids = |pods: &[Pod]| pods.iter().map(|pod| pod.metadata.uid.clone()).collect::<Vec<_>>();
    assert_eq!(uids(&after), uids(&before), "pods are updated in place");
    assert_eq!(after.iter().map(restarts).collect::<Vec<_>>(), [1, 1, 1, 1]);
    let generations = |group: RoleBasedGroup| group.metadata.generation;
    let group = stage.api::<RoleBasedGroup>().get("s-1").await.unwrap();
    assert_ne!(group.metadata.resource_version, written);
    assert_eq!(generations(group), Some(2), "each change is written once");

    let scale = json!({ "spec": { "replicas": 1 } });
    sets.patch_scale("s", &PatchParams::default(), &Patch::Merge(scale)).await.unwrap();
    settled(&sets, 1).await;
    eventually("the other group's pods are deleted", async || {
        (names(&pods(&stage.client).await) == ["s-0-r-0", "s-0-r-1"]).then_some(())
    })
    .await;

    sets.delete("s", &DeleteParams::background()).await.unwrap();
    stage.wait_until_none::<RoleBasedGroup>().await;
    stage.wait_until_none::<Pod>().await;
    stage.end().await;
}
