//! Lifecycle hooks: an instance with a label or finalizer waits before its update and its deletion.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams, PostParams};
use rbg_api::keys;
use rbg_api::v1alpha2::{RoleInstance, RoleInstanceSet};
use serde_json::{Value, json};

use super::test_operator::TestOperator;
use super::{eventually, pods, restarts};

const FINALIZER: &str = "example.com/guard";

/// The set of a group's role, with additional hooks.
fn set(image: &str, replicas: i32) -> Value {
    let pod =
        json!({ "terminationGracePeriodSeconds": 1, "containers": [{ "name": "engine", "image": image }] });
    json!({
        "replicas": replicas,
        "selector": { "matchLabels": { "app": "s" } },
        "roleInstanceTemplate": { "components": [{ "name": "c", "size": 1, "template": { "spec": pod } }] },
        "lifecycle": {
            "inPlaceUpdate": { "labelsHandler": { "guarded": "yes" }, "markPodNotReady": true },
            "preDelete": { "finalizersHandler": [FINALIZER] },
        },
    })
}

struct LifecycleFixture {
    stage: TestOperator,
    sets: Api<RoleInstanceSet>,
    instances: Api<RoleInstance>,
}

impl LifecycleFixture {
    async fn change(&self, spec: Value) {
        let body = Patch::Merge(json!({ "spec": spec }));
        self.sets.patch("s", &PatchParams::default(), &body).await.unwrap();
    }

    /// Adds or removes the label and the finalizer of an instance.
    async fn mark(&self, name: &str, label: bool, finalizer: bool) {
        let label = label.then_some("yes");
        let finalizers: Vec<&str> = finalizer.then_some(FINALIZER).into_iter().collect();
        let body = json!({ "metadata": { "labels": { "guarded": label }, "finalizers": finalizers } });
        self.instances.patch(name, &PatchParams::default(), &Patch::Merge(body)).await.unwrap();
    }

    /// Waits until the instance has that lifecycle state.
    async fn wait_for_state(&self, name: &str, state: &str) {
        eventually(&format!("{name} is {state}"), async || {
            let labels = self.instances.get(name).await.unwrap().metadata.labels.unwrap();
            (labels.get(keys::LIFECYCLE_STATE).map(String::as_str) == Some(state)).then_some(())
        })
        .await;
    }

    /// Waits until the set's status counts this many updated and ready instances.
    async fn updated(&self, count: i32) {
        eventually("the set reports updated instances", async || {
            let set = self.sets.get("s").await.unwrap();
            let status = set.status.unwrap_or_default();
            let is_new = status.observed_generation == set.metadata.generation;
            (is_new && status.updated_ready_replicas == count && status.replicas == count).then_some(())
        })
        .await;
    }

    async fn pods(&self) -> Vec<Pod> {
        pods(&self.stage.client).await
    }

    /// Restart counts of the pods, in order.
    async fn restarts(&self) -> Vec<i32> {
        self.pods().await.iter().map(restarts).collect()
    }
}

fn is_ready(pod: &Pod) -> bool {
    let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.any(|one| one.type_ == "Ready" && one.status == "True")
}

#[tokio::test(flavor = "multi_thread")]
async fn instance_changes_after_its_marks_are_removed() {
    let stage = TestOperator::begin("lifecycle").await;
    let guard = LifecycleFixture { sets: stage.api(), instances: stage.api(), stage };
    let set = json!({ "metadata": { "name": "s" }, "spec": set("engine:1", 2) });
    guard.sets.create(&PostParams::default(), &serde_json::from_value(set).unwrap()).await.unwrap();
    guard.updated(2).await;
    guard.mark("s-0", true, false).await;
    guard.mark("s-1", true, true).await;

    // The update is announced, the pod is out of service, and the other instance is not touched meanwhile.
    guard.change(self::set("engine:2", 2)).await;
    guard.wait_for_state("s-1", "PreparingUpdate").await;
    eventually("the pod of s-1 is out of service", async || {
        (!is_ready(&guard.pods().await[1])).then_some(())
    })
    .await;
    assert!(is_ready(&guard.pods().await[0]));
    assert_eq!(guard.restarts().await, [0, 0]);

    // A reverted update ends at once, and the pod serves again without a restart.
    guard.change(self::set("engine:1", 2)).await;
    guard.wait_for_state("s-1", "Normal").await;
    eventually("the pod of s-1 is in service", async || is_ready(&guard.pods().await[1]).then_some(())).await;
    assert_eq!(guard.restarts().await, [0, 0]);

    // The update continues when the label is removed, and completes when it is back.
    guard.change(self::set("engine:2", 2)).await;
    guard.wait_for_state("s-1", "PreparingUpdate").await;
    guard.mark("s-1", false, true).await;
    guard.wait_for_state("s-1", "Updated").await;
    guard.wait_for_state("s-0", "PreparingUpdate").await;
    assert_eq!(guard.restarts().await, [0, 1]);
    guard.mark("s-1", true, true).await;
    guard.wait_for_state("s-1", "Normal").await;
    guard.mark("s-0", false, false).await;
    guard.updated(2).await;
    guard.wait_for_state("s-0", "Updated").await;
    assert_eq!(guard.restarts().await, [1, 1]);

    // The finalizer delays the deletion of s-1, and with it that of its pod.
    guard.change(json!({ "replicas": 1 })).await;
    guard.wait_for_state("s-1", "PreparingDelete").await;
    let going = guard.instances.get("s-1").await.unwrap();
    assert!(going.metadata.deletion_timestamp.is_none(), "it is not deleted while the finalizer exists");
    assert!(is_ready(&guard.pods().await[1]), "this hook does not take pods out of service");
    guard.mark("s-1", true, false).await;
    eventually("s-1 is deleted", async || {
        guard.instances.get_opt("s-1").await.unwrap().is_none().then_some(())
    })
    .await;
    guard.updated(1).await;
    guard.stage.end().await;
}
