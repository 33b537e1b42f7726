//! Roles whose pods get containers from a ClusterEngineRuntimeProfile.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use rbg_api::v1alpha2::{ClusterEngineRuntimeProfile, RoleBasedGroup};
use serde_json::json;

use super::test_operator::TestOperator;
use super::{eventually, group, pods, role, settled};

const PROFILE: &str = "sidecars";

fn sidecar(pod: &Pod) -> Option<&str> {
    let mut containers = pod.spec.as_ref()?.containers.iter();
    containers.find(|container| container.name == "sidecar")?.image.as_deref()
}

async fn sidecars(stage: &TestOperator, wanted: &[&str]) -> Vec<Pod> {
    eventually("the pods have their sidecars", async || {
        let pods = pods(&stage.client).await;
        let images: Vec<_> = pods.iter().filter_map(sidecar).collect();
        (images == wanted && pods.len() == wanted.len()).then_some(pods)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn profile_reaches_running_pods_only_if_configured() {
    let stage = TestOperator::begin("profiles").await;
    let groups: Api<RoleBasedGroup> = stage.api();
    let mut wanted = role("a", 1, "engine:1");
    wanted["engineRuntimes"] = json!([{ "profileName": PROFILE }]);
    groups.create(&PostParams::default(), &group(json!([wanted]))).await.unwrap();
    eventually("the group waits for its profile", async || {
        let status = groups.get("g").await.unwrap().status?;
        let ready = status.conditions.into_iter().find(|one| one.kind == "Ready")?;
        ready.message.contains("`sidecars`, which does not exist").then_some(())
    })
    .await;

    let profiles = Api::<ClusterEngineRuntimeProfile>::all(stage.client.clone());
    let spec = |image: &str, strategy: &str| json!({ "spec": { "updateStrategy": strategy, "containers": [{ "name": "sidecar", "image": image }] } });
    let mut profile = spec("sidecar:1", "NoUpdate");
    profile["metadata"] = json!({ "name": PROFILE });
    profiles.create(&PostParams::default(), &serde_json::from_value(profile).unwrap()).await.unwrap();
    settled(&groups).await;
    let first = sidecars(&stage, &["sidecar:1"]).await;

    // Running pods keep their profile, and new ones have the same revision.
    let patch = PatchParams::default();
    profiles.patch(PROFILE, &patch, &Patch::Merge(spec("sidecar:2", "NoUpdate"))).await.unwrap();
    wanted["replicas"] = 2.into();
    groups.patch("g", &patch, &Patch::Merge(json!({ "spec": { "roles": [wanted] } }))).await.unwrap();
    let second = sidecars(&stage, &["sidecar:1", "sidecar:1"]).await;
    assert_eq!(second[0].metadata.uid, first[0].metadata.uid);
    settled(&groups).await;

    profiles.patch(PROFILE, &patch, &Patch::Merge(spec("sidecar:3", "RollingUpdate"))).await.unwrap();
    let third = sidecars(&stage, &["sidecar:3", "sidecar:3"]).await;
    assert_eq!(third[0].metadata.uid, first[0].metadata.uid, "images change in place");
    settled(&groups).await;
    profiles.delete(PROFILE, &DeleteParams::default()).await.unwrap();
    stage.end().await;
}
