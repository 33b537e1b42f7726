//! The commands of `kubectl moongate`: show groups, preview changes, apply them and roll them back.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams, PostParams};
use moongate_operator::forecast::StepEffect;
use moongate_operator::kubectl::{
    ClusterClient, GroupReport, ImageAssignment, KubectlError, PlanReport, RevisionHistory, diagnose, now,
    plan, restart_pods, restore_revision, set_images, set_paused, wait,
};
use rbg_api::conversion::{ApiVersion, convert};
use rbg_api::keys;
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::Value;

use super::test_operator::TestOperator;
use super::{TEST_TIMEOUT, restarts};

const ARTICLE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/testdata/examples/deprecated/v1alpha1/mooncake/pd-disaggregated-with-mooncake.yaml"
);
const GROUP: &str = "sglang-pd-with-mooncake-demo";
const STORE: &str = "mooncake-store";

/// A test namespace, its cluster client, and the group of the articles.
struct KubectlFixture {
    stage: TestOperator,
    cluster: ClusterClient,
}

impl KubectlFixture {
    async fn begin() -> Self {
        let stage = TestOperator::begin("people").await;
        let cluster = ClusterClient::new(stage.client.clone(), stage.namespace.name.clone());
        let text = std::fs::read_to_string(Path::new(ARTICLE)).unwrap();
        let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
        let group = convert(&documents[0], ApiVersion::V1alpha2).unwrap();
        let group: RoleBasedGroup = serde_json::from_value(group).unwrap();
        stage.api().create(&PostParams::default(), &group).await.unwrap();
        let demo = Self { stage, cluster };
        demo.done().await;
        demo
    }

    async fn done(&self) {
        wait(&self.cluster, GROUP, TEST_TIMEOUT, |lines| eprintln!("{lines:?}")).await.unwrap();
    }

    async fn pods(&self) -> BTreeMap<String, Pod> {
        let own = ListParams::default().labels(&format!("{}={GROUP}", keys::GROUP_NAME));
        let pods = self.stage.api::<Pod>().list(&own).await.unwrap().items;
        pods.into_iter().map(|pod| (pod.metadata.name.clone().unwrap(), pod)).collect()
    }

    async fn plan(&self, image: &str) -> PlanReport {
        let mut wanted = self.cluster.group(GROUP).await.unwrap();
        set_images(&mut wanted, &[store(image)]).unwrap();
        plan(&self.cluster, GROUP, &[], |_| Ok(wanted)).await.unwrap()
    }

    async fn upgrade(&self, image: &str) {
        self.cluster.edit(GROUP, |group| set_images(group, &[store(image)])).await.unwrap();
    }

    async fn history(&self) -> RevisionHistory {
        let group = self.cluster.group(GROUP).await.unwrap();
        RevisionHistory::read(&group, &self.cluster.group_snapshot(GROUP).await.unwrap()).unwrap()
    }

    /// Every store has restarted `times` times and no other pod has; all pods are those in `before`.
    async fn has_restarted(&self, before: &BTreeMap<String, Pod>, times: i32) {
        let after = self.pods().await;
        assert_eq!(after.len(), before.len());
        for (name, pod) in &after {
            assert_eq!(pod.metadata.uid, before[name].metadata.uid, "{name} is the same pod");
            assert_eq!(restarts(pod), if is_store(pod) { times } else { 0 }, "{name}");
        }
    }
}

fn store(image: &str) -> ImageAssignment {
    format!("{STORE}={image}").parse().unwrap()
}

fn is_store(pod: &Pod) -> bool {
    pod.metadata.labels.as_ref().unwrap().get(keys::ROLE_NAME).is_some_and(|role| role == STORE)
}

/// Names of pods in the order in which their images change, until there are `count`.
async fn changed_in_order(pods: Api<Pod>, image: &str, count: usize) -> Vec<String> {
    let mut changed: Vec<String> = Vec::new();
    while changed.len() < count {
        for pod in pods.list(&ListParams::default()).await.unwrap() {
            let (name, spec) = (pod.metadata.name.unwrap(), pod.spec.unwrap());
            if spec.containers[0].image.as_deref() == Some(image) && !changed.contains(&name) {
                changed.push(name);
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    changed
}

#[tokio::test(flavor = "multi_thread")]
async fn planned_changes_are_applied_and_rolled_back() {
    let demo = KubectlFixture::begin().await;
    let before = demo.pods().await;
    assert_eq!(before.len(), 7);
    let report = GroupReport::read(&demo.cluster, GROUP).await.unwrap();
    assert!(report.ready && report.revision == Some(1), "{report:?}");
    let stores = report.roles.iter().find(|role| role.name == STORE).unwrap();
    assert_eq!((stores.ready, stores.updated, stores.instances.len()), (3, 3, 3));
    assert!(report.roles.iter().all(|role| role.waiting_for.is_empty()), "{}", report.text());
    assert!(report.text().contains("StatefulSet"), "{}", report.text());
    let rows = GroupReport::all(&demo.cluster, false).await.unwrap();
    assert_eq!(rows.iter().map(|row| row.name.as_str()).collect::<Vec<_>>(), [GROUP]);

    // Other tests share the cluster: of Leases and webhooks, check only that they can be listed.
    let findings = diagnose(&demo.cluster).await;
    assert!(findings.iter().all(|finding| !finding.message.contains("cannot be listed")), "{findings:?}");
    let of = |check: &str| findings.iter().find(|finding| finding.check == check).unwrap();
    assert!(!of("definitions").is_problem && of("definitions").message == "all 10 kinds", "{findings:?}");
    assert_eq!(of("groups").message, format!("{GROUP} is ready"));

    let nothing = plan(&demo.cluster, GROUP, &[], |live| Ok(live.unwrap())).await.unwrap();
    assert!(nothing.is_nothing(), "{}", nothing.text());
    let planned = demo.plan("lmsysorg/sglang:v0.5.6").await;
    let pods: Vec<_> = planned.forecast.steps.iter().filter(|step| step.kind == "Pod").collect();
    assert!(pods.iter().all(|step| step.effect == StepEffect::RestartInPlace), "{}", planned.text());
    let expected: Vec<String> = pods.iter().map(|step| step.name.clone()).collect();
    let stores: Vec<&String> = before.iter().filter(|(_, pod)| is_store(pod)).map(|(name, _)| name).collect();
    assert_eq!(expected.len(), 3, "{}", planned.text());
    assert!(stores.iter().all(|name| expected.contains(name)), "{}", planned.text());
    assert!(planned.text().contains("3 pods restarted in place"), "{}", planned.text());
    demo.has_restarted(&before, 0).await;

    let changed = changed_in_order(demo.stage.api(), "lmsysorg/sglang:v0.5.6", 3);
    let (changed, ()) = tokio::join!(changed, demo.upgrade("lmsysorg/sglang:v0.5.6"));
    assert_eq!(changed, expected, "in the planned order");
    demo.done().await;
    demo.has_restarted(&before, 1).await;

    let history = demo.history().await;
    assert_eq!(history.revisions.len(), 2);
    let newest = history.revisions.last().unwrap();
    assert!(newest.is_current);
    assert_eq!(newest.changes, [format!("{STORE}: lmsysorg/sglang:v0.5.5 -> lmsysorg/sglang:v0.5.6")]);
    let earlier = history.previous().unwrap();
    assert_eq!(earlier.number, 1);
    demo.cluster.edit(GROUP, |group| restore_revision(group, &earlier.data)).await.unwrap();
    demo.done().await;
    demo.has_restarted(&before, 2).await;
    for pod in demo.pods().await.values() {
        assert_eq!(pod.spec.as_ref().unwrap().containers[0].image.as_deref(), Some("lmsysorg/sglang:v0.5.5"));
    }
    demo.stage.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_update_continues_when_resumed() {
    let demo = KubectlFixture::begin().await;
    let before = demo.pods().await;
    let roles = [STORE.to_owned()];
    demo.cluster.edit(GROUP, |group| set_paused(group, &roles, true)).await.unwrap();
    assert!(demo.plan("lmsysorg/sglang:v0.5.7").await.forecast.steps.is_empty());
    demo.upgrade("lmsysorg/sglang:v0.5.7").await;
    let paused_error = wait(&demo.cluster, GROUP, TEST_TIMEOUT, |_| {}).await.unwrap_err().to_string();
    assert!(paused_error.contains("paused"), "{paused_error}");
    let report = GroupReport::read(&demo.cluster, GROUP).await.unwrap();
    let reasons: Vec<&String> = report.roles.iter().flat_map(|role| &role.waiting_for).collect();
    assert_eq!(reasons, ["its update is paused"]);
    demo.has_restarted(&before, 0).await;
    demo.cluster.edit(GROUP, |group| set_paused(group, &roles, false)).await.unwrap();
    demo.done().await;
    demo.has_restarted(&before, 1).await;

    demo.cluster.edit(GROUP, |group| restart_pods(group, &roles, &now())).await.unwrap();
    demo.done().await;
    let after = demo.pods().await;
    for (name, pod) in &before {
        let is_same = after.get(name).is_some_and(|other| other.metadata.uid == pod.metadata.uid);
        assert_eq!(is_same, !is_store(pod), "{name}");
    }
    let none = demo.cluster.group("none").await.unwrap_err();
    assert!(matches!(&none, KubectlError::NoGroup { existing, .. } if existing == &[GROUP]), "{none}");
    demo.stage.end().await;
}
