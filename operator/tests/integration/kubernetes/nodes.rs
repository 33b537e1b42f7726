//! Nodes for the scheduler, which has none by default.

use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

/// A node with capacity for this many pods that select it by the label `stage`, so that pods of other tests are not
/// scheduled to it.
pub(crate) async fn node(client: &Client, stage: &str, name: &str, mut labels: Value, pods: u32) {
    let name = format!("{stage}-{name}");
    labels["stage"] = stage.into();
    labels["kubernetes.io/hostname"] = name.as_str().into();
    let spec = json!({ "taints": [{ "key": "stage", "effect": "NoSchedule" }] });
    let object = json!({ "metadata": { "name": name, "labels": labels }, "spec": spec });
    let nodes = Api::<Node>::all(client.clone());
    nodes.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
    let room = json!({ "cpu": "8", "memory": "8Gi", "pods": pods.to_string() });
    let conditions = json!([{ "type": "Ready", "status": "True" }]);
    let status = json!({ "status": { "allocatable": room, "capacity": room, "conditions": conditions } });
    nodes.patch_status(&name, &PatchParams::default(), &Patch::Strategic(status)).await.unwrap();
}

/// Restricts a role's pods to the nodes of a stage.
pub(crate) fn select(role: &mut Value, stage: &str) {
    let spec = &mut role["standalonePattern"]["template"]["spec"];
    spec["tolerations"] = json!([{ "operator": "Exists" }]);
    spec["nodeSelector"] = json!({ "stage": stage });
}
