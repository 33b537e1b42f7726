//! New images are pulled before pods restart with them.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Config, watcher};
use moongate_testkit::{ControlPlane, PodRuntime, pod_address};
use parking_lot::Mutex;
use rbg_api::keys;
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};

use super::test_operator::TestOperator;
use super::{events, group, pods, restarts, role, settled};

/// Resource version at which an image was on a node.
type PulledImages = BTreeMap<(String, String), u64>;

/// Records restarted pods, and whether their images had been pulled before the restart was written.
#[derive(Clone, Default)]
struct RestartLog {
    pulled: Arc<Mutex<PulledImages>>,
    restarts: Arc<Mutex<Vec<String>>>,
}

fn version(pod: &Pod) -> u64 {
    pod.metadata.resource_version.as_deref().unwrap().parse().unwrap()
}

async fn follow(client: Client, pulled: Arc<Mutex<PulledImages>>) {
    let pulling = Config::default().labels(keys::WARMUP_NAME);
    let mut pods = pin!(watcher(Api::<Pod>::default_namespaced(client), pulling).applied_objects());
    while let Some(pod) = pods.try_next().await.unwrap() {
        let (spec, status) = (pod.spec.clone().unwrap(), pod.status.clone().unwrap_or_default());
        if status.phase.as_deref() == Some("Succeeded") {
            let key = (spec.node_name.unwrap(), spec.containers[0].image.clone().unwrap());
            pulled.lock().entry(key).or_insert_with(|| version(&pod));
        }
    }
}

impl PodRuntime for RestartLog {
    async fn start(&self, pod: &Pod) -> String {
        pod_address(pod, 10)
    }

    async fn restart(&self, pod: &Pod, _: &str) {
        let spec = pod.spec.clone().unwrap();
        let key = (spec.node_name.unwrap(), spec.containers[0].image.clone().unwrap());
        // Events of pull pods may be late. An absent image is never pulled.
        while !key.1.starts_with("absent") && !self.pulled.lock().contains_key(&key) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let is_pulled = self.pulled.lock().get(&key).is_some_and(|pulled| *pulled < version(pod));
        self.restarts.lock().push(format!("{} {is_pulled}", pod.metadata.name.clone().unwrap()));
    }
}

async fn update(groups: &Api<RoleBasedGroup>, roles: Value) {
    let body = Patch::Merge(json!({ "spec": { "roles": roles } }));
    groups.patch("g", &PatchParams::default(), &body).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_restarts_after_image_pull_or_reports_its_absence() {
    let plane = ControlPlane::shared().await.unwrap();
    let log = RestartLog::default();
    let stage = TestOperator::begin_with(&plane, "pre-pull", log.clone()).await;
    tokio::spawn(follow(stage.client.clone(), Arc::clone(&log.pulled)));
    let groups: Api<RoleBasedGroup> = stage.api();
    let mut wanted = group(json!([role("a", 2, "engine:1")]));
    wanted.metadata.annotations = Some([(keys::PRE_PULL.to_owned(), "true".to_owned())].into());
    groups.create(&PostParams::default(), &wanted).await.unwrap();
    settled(&groups).await;

    update(&groups, json!([role("a", 2, "engine:2")])).await;
    settled(&groups).await;
    assert_eq!(*log.restarts.lock(), ["g-a-1 true", "g-a-0 true"]);
    assert_eq!(
        pods(&stage.client).await.iter().map(restarts).collect::<Vec<_>>(),
        [1, 1],
        "no pull pod is left"
    );

    let mut absent = role("a", 2, "absent:3");
    absent["annotations"] = json!({ keys::PRE_PULL_TIMEOUT: "2s" });
    update(&groups, json!([absent])).await;
    let node = pods(&stage.client).await[0].spec.clone().unwrap().node_name.unwrap();
    for (reason, note) in [
        ("PullFailed", format!("absent:3 cannot be pulled to {node}")),
        ("PullTimedOut", format!("absent:3 was not pulled to {node} within 2s")),
    ] {
        let event = events::event(&stage, "RoleInstance", "g-a-1", reason).await;
        assert_eq!((event.type_.as_deref(), event.note), (Some("Warning"), Some(note)));
    }
    settled(&groups).await;
    assert_eq!(log.restarts.lock()[2..], ["g-a-1 false", "g-a-0 false"]);
    stage.end().await;
}
