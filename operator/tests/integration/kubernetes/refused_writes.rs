//! Writes that the API server refuses are reported in the group's status until they succeed.

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::core::v1::ResourceQuota;
use kube::Client;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use moongate_operator::ResourceKind;
use rbg_api::v1alpha2::{RoleBasedGroup, RoleBasedGroupSet};
use serde_json::{Value, json};

use super::test_operator::TestOperator;
use super::{eventually, group, is_settled, role, settled};

/// Waits until an object with these conditions is stalled, and returns the message.
async fn stalled(get: impl AsyncFn() -> Value) -> String {
    eventually("the object is stalled", async || {
        let object = get().await;
        let conditions = object["status"]["conditions"].as_array()?.clone();
        let one = conditions.into_iter().find(|one| one["type"] == "Stalled" && one["status"] == "True")?;
        assert_eq!(one["reason"], "WriteRefused");
        Some(one["message"].as_str().unwrap().to_owned())
    })
    .await
}

fn is_stalled(group: &RoleBasedGroup) -> bool {
    let conditions = group.status.iter().flat_map(|status| &status.conditions);
    conditions.into_iter().any(|one| one.kind == "Stalled" && one.status == "True")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quota_is_reported_until_it_is_raised() {
    let stage = TestOperator::begin("refused-quota").await;
    let quotas: Api<ResourceQuota> = stage.api();
    let quota = json!({ "metadata": { "name": "pods" }, "spec": { "hard": { "pods": "1" } } });
    quotas.create(&PostParams::default(), &serde_json::from_value(quota).unwrap()).await.unwrap();
    eventually("the quota is counted", async || {
        quotas.get("pods").await.unwrap().status?.used?.get("pods").map(|_| ())
    })
    .await;
    let template = json!({ "spec": group(json!([role("a", 2, "engine:1")])).spec });
    let set = json!({ "metadata": { "name": "s" }, "spec": { "replicas": 1, "groupTemplate": template } });
    let sets: Api<RoleBasedGroupSet> = stage.api();
    sets.create(&PostParams::default(), &serde_json::from_value(set).unwrap()).await.unwrap();
    let groups: Api<RoleBasedGroup> = stage.api();
    let message = stalled(async || {
        groups.get_opt("s-0").await.unwrap().map_or(Value::Null, |group| serde_json::to_value(group).unwrap())
    })
    .await;
    assert!(message.contains("exceeded quota: pods") && message.contains("pod s-0-a-"), "{message}");
    let message = stalled(async || serde_json::to_value(sets.get("s").await.unwrap()).unwrap()).await;
    assert!(message.contains("exceeded quota: pods"), "{message}");

    quotas.delete("pods", &DeleteParams::default()).await.unwrap();
    eventually("the group is ready and no longer stalled", async || {
        let group = groups.get("s-0").await.unwrap();
        let set = serde_json::to_value(sets.get("s").await.unwrap()).unwrap();
        let mut conditions = set["status"]["conditions"].as_array().unwrap().iter();
        let is_clear = conditions.any(|one| one["type"] == "Stalled" && one["status"] == "False");
        (is_settled(&group) && !is_stalled(&group) && is_clear).then_some(())
    })
    .await;
    stage.end().await;
}

/// Denies the creation of these resources in the namespace.
async fn deny(client: &Client, namespace: &str, kind: ResourceKind) {
    let resource = kind.resource();
    let (group, resource) = (&resource.group, &resource.plural);
    let name = format!("{namespace}-{resource}");
    let params = PatchParams::apply("test");
    let rule = json!({ "apiGroups": [group], "apiVersions": ["*"], "operations": ["CREATE"],
        "resources": [resource] });
    let policy = json!({ "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": { "name": name }, "spec": { "failurePolicy": "Fail",
        "matchConstraints": { "resourceRules": [rule] },
        "validations": [{ "expression": "false", "message": "creation is denied here" }] } });
    Api::<ValidatingAdmissionPolicy>::all(client.clone())
        .patch(&name, &params, &Patch::Apply(&policy))
        .await
        .unwrap();
    let selector =
        json!({ "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": namespace } } });
    let binding = json!({ "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding", "metadata": { "name": name },
        "spec": { "policyName": name, "validationActions": ["Deny"], "matchResources": selector } });
    Api::<ValidatingAdmissionPolicyBinding>::all(client.clone())
        .patch(&name, &params, &Patch::Apply(&binding))
        .await
        .unwrap();
    // The API server applies it a moment later.
    let probes: Api<DynamicObject> = Api::default_namespaced_with(client.clone(), &kind.resource());
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let object = json!({ "apiVersion": kind.api_version(), "kind": kind.name(), "metadata": { "name": "probe" },
        "spec": { "ports": [{ "port": 1 }], "components": [] } });
    let object = serde_json::from_value(object).unwrap();
    eventually("the policy applies", async || {
        let error = probes.create(&dry, &object).await.err()?.to_string();
        error.contains("creation is denied here").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_denied_service_and_a_denied_instance_are_reported() {
    let stage = TestOperator::begin("refused-policy").await;
    let groups: Api<RoleBasedGroup> = stage.api();
    for kind in [ResourceKind::Instance, ResourceKind::Service] {
        deny(&stage.client, &stage.namespace.name, kind).await;
        groups.create(&PostParams::default(), &group(json!([role("a", 1, "engine:1")]))).await.unwrap();
        let message = stalled(async || serde_json::to_value(groups.get("g").await.unwrap()).unwrap()).await;
        assert!(message.contains("creation is denied here"), "{message}");
        let bindings = Api::<ValidatingAdmissionPolicyBinding>::all(stage.client.clone());
        let name = format!("{}-{}", stage.namespace.name, kind.resource().plural);
        bindings.delete(&name, &DeleteParams::default()).await.unwrap();
        let policies = Api::<ValidatingAdmissionPolicy>::all(stage.client.clone());
        policies.delete(&name, &DeleteParams::default()).await.unwrap();
        assert!(!is_stalled(&settled(&groups).await), "{kind:?}");
        groups.delete("g", &DeleteParams::foreground()).await.unwrap();
        eventually("the group is deleted", async || {
            groups.get_opt("g").await.unwrap().is_none().then_some(())
        })
        .await;
    }
    stage.end().await;
}
