//! Roles that run as StatefulSet or Deployment, updated by Kubernetes' own controllers.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::{Api, Patch, PatchParams, PostParams};
use rbg_api::keys;
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};

use super::test_operator::TestOperator;
use super::{eventually, group, names, pods, role, settled};

fn stateful(image: &str, rolling: &Value) -> Value {
    let mut role = role("a", 3, image);
    role["annotations"] = json!({ keys::ROLE_WORKLOAD_TYPE: "apps/v1/StatefulSet" });
    role["rolloutStrategy"] = json!({ "type": "RollingUpdate", "rollingUpdate": rolling });
    json!([role])
}

/// Waits until the pods have these images and are ready, and the group is settled.
async fn become_so(stage: &TestOperator, images: [&str; 3]) {
    let groups: Api<RoleBasedGroup> = stage.api();
    eventually(&format!("{images:?}"), async || {
        let group = groups.get("g").await.unwrap();
        let status = group.status.unwrap_or_default();
        let has = |kind: &str, value: &str| {
            status.conditions.iter().any(|one| one.kind == kind && one.status == value)
        };
        let pods = pods(&stage.client).await;
        let own: Vec<&str> =
            pods.iter().filter_map(|pod| pod.spec.as_ref()?.containers[0].image.as_deref()).collect();
        let current = status.observed_generation == group.metadata.generation;
        (own == images && current && has("Ready", "True") && has("RollingUpdateInProgress", "False"))
            .then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stateful_set_holds_pods_back_until_released() {
    let stage = TestOperator::begin("stateful").await;
    let groups: Api<RoleBasedGroup> = stage.api();
    groups.create(&PostParams::default(), &group(stateful("engine:1", &json!({})))).await.unwrap();
    become_so(&stage, ["engine:1"; 3]).await;
    for (rolling, images) in [
        (json!({ "paused": true }), ["engine:1"; 3]),
        (json!({ "partition": 1 }), ["engine:1", "engine:2", "engine:2"]),
        (json!({ "maxUnavailable": 2 }), ["engine:2"; 3]),
    ] {
        let roles = json!({ "spec": { "roles": stateful("engine:2", &rolling) } });
        groups.patch("g", &PatchParams::default(), &Patch::Merge(roles)).await.unwrap();
        if rolling["paused"] == true {
            let is_held_back = async || {
                let status = groups.get("g").await.unwrap().status?;
                status
                    .conditions
                    .iter()
                    .any(|one| one.kind == "RollingUpdateInProgress" && one.status == "True")
                    .then_some(())
            };
            eventually("the update has started and is is_held_back back", is_held_back).await;
            let all = pods(&stage.client).await;
            assert!(
                all.iter()
                    .all(|pod| pod.spec.as_ref().unwrap().containers[0].image.as_deref() == Some("engine:1"))
            );
            continue;
        }
        become_so(&stage, images).await;
    }
    let mut fewer = stateful("engine:2", &json!({}));
    fewer[0]["replicas"] = 2.into();
    let roles = json!({ "spec": { "roles": fewer } });
    groups.patch("g", &PatchParams::default(), &Patch::Merge(roles)).await.unwrap();
    eventually("one pod is removed", async || {
        (names(&pods(&stage.client).await) == ["g-a-0", "g-a-1"]).then_some(())
    })
    .await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_is_scaled_and_updated() {
    let stage = TestOperator::begin("deployment").await;
    let groups: Api<RoleBasedGroup> = stage.api();
    let wanted = |replicas: i32, image: &str| {
        let mut role = role("a", replicas, image);
        role["annotations"] = json!({ keys::ROLE_WORKLOAD_TYPE: "apps/v1/Deployment" });
        role["rolloutStrategy"] =
            json!({ "type": "RollingUpdate", "rollingUpdate": { "maxUnavailable": 0, "maxSurge": 1 } });
        json!([role])
    };
    groups.create(&PostParams::default(), &group(wanted(1, "engine:1"))).await.unwrap();
    settled(&groups).await;
    for (replicas, image) in [(3, "engine:1"), (2, "engine:2")] {
        let roles = json!({ "spec": { "roles": wanted(replicas, image) } });
        groups.patch("g", &PatchParams::default(), &Patch::Merge(roles)).await.unwrap();
        eventually(&format!("{replicas} pods with {image}"), async || {
            let pods = pods(&stage.client).await;
            let is_new = |pod: &Pod| pod.spec.as_ref().unwrap().containers[0].image.as_deref() == Some(image);
            (pods.len() == usize::try_from(replicas).unwrap() && pods.iter().all(is_new)).then_some(())
        })
        .await;
        let status = settled(&groups).await.status.unwrap();
        let numbers = &status.role_statuses[0];
        assert_eq!(
            (numbers.replicas, numbers.ready_replicas, numbers.updated_replicas),
            (replicas, replicas, replicas)
        );
    }
    let deployments: Api<Deployment> = stage.api();
    let strategy = deployments.get("g-a").await.unwrap().spec.unwrap().strategy.unwrap();
    assert_eq!(strategy.rolling_update.unwrap().max_surge, Some(IntOrString::Int(1)));
    stage.end().await;
}
