//! Fields that a spec no longer has disappear from the objects that the operator wrote.

use k8s_openapi::api::core::v1::Service;
use kube::api::{Api, Patch, PatchParams, PostParams};
use rbg_api::keys;
use rbg_api::v1alpha2::{RoleBasedGroup, RoleBasedGroupScalingAdapter, RoleInstance, RoleInstanceSet};
use serde_json::{Value, json};

use super::test_operator::TestOperator;
use super::{eventually, group, pods, role, settled};

async fn change(groups: &Api<RoleBasedGroup>, roles: &Value) {
    let patch = Patch::Merge(json!({ "spec": { "roles": roles } }));
    groups.patch("g", &PatchParams::default(), &patch).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_of_all_pods_selects_and_names_workers() {
    let stage = TestOperator::begin("removed-selector").await;
    let groups: Api<RoleBasedGroup> = stage.api();
    let services: Api<Service> = stage.api();
    let template = role("t", 1, "engine:1")["standalonePattern"]["template"].clone();
    let mut roles =
        json!([{ "name": "t", "replicas": 1, "leaderWorkerPattern": { "size": 2, "template": template } }]);
    groups.create(&PostParams::default(), &group(roles.clone())).await.unwrap();
    settled(&groups).await;
    let selector = async || services.get("s-g-t").await.unwrap().spec.unwrap().selector.unwrap();
    let subdomains = async || {
        let pods = pods(&stage.client).await.into_iter();
        pods.map(|pod| pod.spec.unwrap().subdomain.unwrap_or_default()).collect::<Vec<_>>()
    };
    assert!(selector().await.contains_key(keys::COMPONENT_NAME));
    assert_eq!(subdomains().await, ["s-g-t", ""]);

    for (selection, worker) in [("All", "s-g-t"), ("LeaderOnly", "")] {
        roles[0]["leaderWorkerPattern"]["sharedServiceSelection"] = selection.into();
        change(&groups, &roles).await;
        eventually("the selected pods have the Service's name", async || {
            let selects_all = !selector().await.contains_key(keys::COMPONENT_NAME);
            let is_selected = selects_all == (selection == "All");
            (is_selected && subdomains().await == ["s-g-t", worker]).then_some(())
        })
        .await;
        settled(&groups).await;
    }
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_metadata_disappears_from_the_roles_objects() {
    const KEY: &str = "example.com/a";
    let stage = TestOperator::begin("removed-metadata").await;
    let groups: Api<RoleBasedGroup> = stage.api();
    let mut roles = json!([role("a", 1, "engine:1")]);
    roles[0]["annotations"] = json!({ KEY: "1" });
    roles[0]["labels"] = json!({ KEY: "1" });
    roles[0]["scalingAdapter"] = json!({ "enable": true, "labels": { KEY: "1" } });
    groups.create(&PostParams::default(), &group(roles.clone())).await.unwrap();
    settled(&groups).await;
    let has_key = async || {
        let service = stage.api::<Service>().get("s-g-a").await.unwrap().metadata.annotations;
        let adapter = stage.api::<RoleBasedGroupScalingAdapter>().get("g-a").await.unwrap().metadata.labels;
        [service, adapter].map(|texts| texts.unwrap_or_default().contains_key(KEY))
    };
    assert_eq!(has_key().await, [true, true]);
    // Labels of others stay.
    let foreign = Patch::Merge(json!({ "metadata": { "labels": { "example.com/other": "1" } } }));
    stage.api::<Service>().patch("s-g-a", &PatchParams::default(), &foreign).await.unwrap();

    let instance = stage.api::<RoleInstance>().get("g-a-0").await.unwrap();
    assert!(instance.metadata.labels.unwrap().contains_key(KEY));
    roles[0] = role("a", 1, "engine:2");
    roles[0]["annotations"] = json!({});
    roles[0]["labels"] = json!({});
    roles[0]["scalingAdapter"] = json!({ "enable": true });
    change(&groups, &roles).await;
    eventually("the key is gone", async || (has_key().await == [false, false]).then_some(())).await;
    settled(&groups).await;
    let service = stage.api::<Service>().get("s-g-a").await.unwrap();
    assert!(service.metadata.labels.unwrap().contains_key("example.com/other"));
    let set = stage.api::<RoleInstanceSet>().get("g-a").await.unwrap().metadata;
    let instance = stage.api::<RoleInstance>().get("g-a-0").await.unwrap().metadata;
    for texts in [set.annotations, set.labels, instance.labels] {
        assert!(!texts.unwrap().contains_key(KEY));
    }
    // Only the entries of others that the cache has left out are unknown to the operator: they stay in the object.
    let managers: Vec<_> = instance.managed_fields.into_iter().flatten().collect();
    assert!(managers.iter().any(|entry| entry.subresource.as_deref() == Some("status")), "{managers:?}");
    stage.end().await;
}
