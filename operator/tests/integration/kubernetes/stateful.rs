//! A role that runs as a StatefulSet, updated by Kubernetes' own controller.

use kube::api::{Api, Patch, PatchParams, PostParams};
use rbg_api::keys;
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};

use super::test_operator::TestOperator;
use super::{eventually, group, pods, role};

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
    stage.end().await;
}
