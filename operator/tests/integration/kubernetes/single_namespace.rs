//! An operator for one namespace, without permissions beyond it.

use std::path::PathBuf;

use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use moongate_operator::OperatorOptions;
use moongate_testkit::{ControlPlane, FakeKubelet, KubeletTimings, TestNamespace};
use rbg_api::v1alpha2::{RoleBasedGroup, RoleBasedGroupWarmup};
use serde_json::{Value, json};

use super::rbac_rules::documents;
use super::{condition_is, eventually, group, install, pods, restarts, role, run_with_operator, settled};

const ACCOUNT: &str = "operator";

/// An account with the manifest's permissions in its own namespace only; those for nodes and profiles have no effect.
async fn account(plane: &ControlPlane, namespace: &TestNamespace) -> PathBuf {
    let client = || namespace.client.clone();
    let named = |more: Value| {
        let mut object = json!({ "metadata": { "name": ACCOUNT } });
        object.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        object
    };
    let rules = documents().into_iter().filter(|document| document["kind"] == "ClusterRole");
    let rules: Vec<Value> = rules.flat_map(|role| role["rules"].as_array().unwrap().clone()).collect();
    let account: ServiceAccount = serde_json::from_value(named(json!({}))).unwrap();
    let role: Role = serde_json::from_value(named(json!({ "rules": rules }))).unwrap();
    let binding: RoleBinding = serde_json::from_value(named(json!({
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT },
        "subjects": [{ "kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace.name }],
    })))
    .unwrap();
    let new = PostParams::default();
    Api::default_namespaced(client()).create(&new, &account).await.unwrap();
    Api::default_namespaced(client()).create(&new, &role).await.unwrap();
    Api::default_namespaced(client()).create(&new, &binding).await.unwrap();
    plane.kubeconfig_of(&namespace.name, ACCOUNT).await.unwrap()
}

async fn may_see_nodes(kubeconfig: &PathBuf) -> bool {
    let file = Kubeconfig::read_from(kubeconfig).unwrap();
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.unwrap();
    Api::<Node>::all(Client::try_from(config).unwrap()).list(&ListParams::default()).await.is_ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn permissions_in_one_namespace_suffice() {
    let plane = ControlPlane::shared().await.unwrap();
    let namespace = plane.namespace("confined").await.unwrap();
    let client = namespace.client.clone();
    install(&client).await;
    let _kubelet =
        FakeKubelet::start(client.clone(), &namespace.name, KubeletTimings::default()).await.unwrap();
    let kubeconfig = account(&plane, &namespace).await;
    assert!(!may_see_nodes(&kubeconfig).await);
    let options = OperatorOptions {
        kubeconfig: Some(kubeconfig),
        namespace: Some(namespace.name.clone()),
        ..OperatorOptions::default()
    };
    let story = async {
        let groups: Api<RoleBasedGroup> = Api::default_namespaced(client.clone());
        groups.create(&PostParams::default(), &group(json!([role("a", 2, "engine:1")]))).await.unwrap();
        settled(&groups).await;
        let update = async |roles: Value| {
            let body = Patch::Merge(json!({ "spec": { "roles": roles } }));
            groups.patch("g", &PatchParams::default(), &body).await.unwrap();
        };
        update(json!([role("a", 2, "engine:2")])).await;
        settled(&groups).await;
        assert_eq!(pods(&client).await.iter().map(restarts).collect::<Vec<_>>(), [1, 1]);

        // Features that need more report it, or work without.
        let warmup = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroupWarmup",
            "metadata": { "name": "w" }, "spec": { "targetRoleBasedGroup": { "name": "g",
                "roles": { "a": { "imagePreload": { "images": ["engine:3"] } } } } } });
        let warmups: Api<RoleBasedGroupWarmup> = Api::default_namespaced(client.clone());
        warmups.create(&PostParams::default(), &serde_json::from_value(warmup).unwrap()).await.unwrap();
        eventually("the warmup has finished", async || {
            let status = warmups.get("w").await.unwrap().status.unwrap_or_default();
            (status.phase == "Completed").then_some(())
        })
        .await;
        let mut with_profile = role("a", 2, "engine:2");
        with_profile["engineRuntimes"] = json!([{ "profileName": "unseen" }]);
        update(json!([with_profile])).await;
        eventually("the group is invalid", async || {
            condition_is(&groups.get("g").await.unwrap(), &[("Ready", "False")]).then_some(())
        })
        .await;
        update(json!([role("a", 2, "engine:2")])).await;
        settled(&groups).await;
    };
    run_with_operator(options, story).await;
    namespace.delete().await.unwrap();
}
