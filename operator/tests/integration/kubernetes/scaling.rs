//! Roles scaled by an autoscaler, and roles that are scaled and updated together.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams, PostParams};
use rbg_api::v1alpha2::{
    CoordinatedPolicy, RoleBasedGroup, RoleBasedGroupScalingAdapter, RoleBasedGroupScalingAdapterStatus,
};
use serde_json::json;

use super::test_operator::TestOperator;
use super::{eventually, group, names, pods, role, settled};

#[tokio::test(flavor = "multi_thread")]
async fn an_autoscaler_scales_a_role_through_its_adapter() {
    let stage = TestOperator::begin("adapter").await;
    let groups: Api<RoleBasedGroup> = stage.api();
    let adapters: Api<RoleBasedGroupScalingAdapter> = stage.api();
    let mut wanted = json!([role("a", 1, "engine:1"), role("b", 1, "engine:1")]);
    wanted[0]["scalingAdapter"] = json!({ "enable": true, "labels": { "for": "a" } });
    groups.create(&PostParams::default(), &group(wanted.clone())).await.unwrap();
    let is = async |what: &str, replicas: i32| {
        eventually(what, async || {
            let adapter = adapters.get_opt("g-a").await.unwrap()?;
            let status: RoleBasedGroupScalingAdapterStatus = adapter.status.clone()?;
            let is = status.phase.as_deref() == Some("Bound")
                && (status.replicas, status.ready_replicas) == (Some(replicas), Some(replicas))
                && adapter.spec.replicas == Some(replicas);
            is.then_some(adapter)
        })
        .await
    };
    let adapter = is("the adapter is bound", 1).await;
    assert_eq!(adapter.metadata.labels.as_ref().unwrap()["for"], "a");
    let selector = adapter.status.unwrap().selector.unwrap();
    let list = kube::api::ListParams::default().labels(&selector);
    let selected = stage.api::<Pod>().list(&list).await.unwrap().items;
    assert_eq!(names(&selected), ["g-a-0"]);

    let scale = json!({ "spec": { "replicas": 3 } });
    adapters.patch_scale("g-a", &PatchParams::default(), &Patch::Merge(scale)).await.unwrap();
    let adapter = is("the role is scaled", 3).await;
    assert!(adapter.status.unwrap().last_scale_time.is_some());
    let live = settled(&groups).await;
    assert_eq!(live.spec.role("a").unwrap().replicas, 3);
    assert_eq!(names(&pods(&stage.client).await), ["g-a-0", "g-a-1", "g-a-2", "g-b-0"]);

    wanted[0]["scalingAdapter"]["enable"] = false.into();
    wanted[0]["replicas"] = 2.into();
    let body = json!({ "spec": { "roles": wanted } });
    groups.patch("g", &PatchParams::default(), &Patch::Merge(body)).await.unwrap();
    stage.wait_until_none::<RoleBasedGroupScalingAdapter>().await;
    settled(&groups).await;
    eventually("the role has the replicas of the spec", async || {
        (names(&pods(&stage.client).await) == ["g-a-0", "g-a-1", "g-b-0"]).then_some(())
    })
    .await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn roles_of_a_policy_are_scaled_and_updated_together() {
    let stage = TestOperator::begin("policy").await;
    let groups: Api<RoleBasedGroup> = stage.api();
    let rule = json!({ "name": "both", "roles": ["a", "b"], "strategy": {
        "scaling": { "maxSkew": "25%", "progression": "OrderScheduled" },
        "rollingUpdate": { "maxSkew": 1, "maxUnavailable": 2 } } });
    let policy = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "CoordinatedPolicy",
        "metadata": { "name": "g" }, "spec": { "policies": [rule] } });
    let policy: CoordinatedPolicy = serde_json::from_value(policy).unwrap();
    stage.api().create(&PostParams::default(), &policy).await.unwrap();
    let mut wanted = json!([role("a", 4, "engine:1"), role("b", 2, "engine:1")]);
    groups.create(&PostParams::default(), &group(wanted.clone())).await.unwrap();
    settled(&groups).await;
    let created = pods(&stage.client).await;
    assert_eq!(names(&created), ["g-a-0", "g-a-1", "g-a-2", "g-a-3", "g-b-0", "g-b-1"]);

    for role in wanted.as_array_mut().unwrap() {
        role["standalonePattern"]["template"]["spec"]["containers"][0]["image"] = "engine:2".into();
    }
    let body = json!({ "spec": { "roles": wanted } });
    groups.patch("g", &PatchParams::default(), &Patch::Merge(body)).await.unwrap();
    // At any time, no role is further ahead than the policy allows.
    eventually("all pods are updated", async || {
        let pods = pods(&stage.client).await;
        let updated = |role: &str| {
            let of_role = pods.iter().filter(|pod| pod.metadata.name.as_deref().unwrap().contains(role));
            let image =
                |pod: &&Pod| pod.spec.as_ref().unwrap().containers[0].image.as_deref() == Some("engine:2");
            of_role.filter(image).count()
        };
        let (a, b) = (updated("g-a"), updated("g-b"));
        assert!(a <= 2 * b + 1, "{a} of a, {b} of b");
        assert!(2 * b <= a + 2, "{a} of a, {b} of b");
        (a == 4 && b == 2).then_some(())
    })
    .await;
    let live = settled(&groups).await;
    let updated: Vec<i32> =
        live.status.unwrap().role_statuses.iter().map(|role| role.updated_replicas).collect();
    assert_eq!(updated, [4, 2]);
    stage.end().await;
}
