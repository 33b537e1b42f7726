//! The operator is killed while it creates a group and updates it in place; another process continues.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt as _;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher::{Config, Event, watcher};
use moongate_testkit::{ControlPlane, FakeKubelet, KubeletTimings};
use parking_lot::Mutex;
use rbg_api::keys;
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::process::OperatorProcess;
use super::{eventually, group, install, pods, restarts, role, settled};

/// Number of kills, set by `MOONGATE_KILLS`.
const KILLS: usize = 4;
/// Maximum time until a kill.
const MAX_KILL_DELAY: Duration = Duration::from_millis(2500);

/// Ordered pods, unordered pods with a grace period, and pods that serve only together.
fn roles(image: &str) -> Value {
    let mut drained = role("d", 2, image);
    drained["annotations"] = json!({ keys::ROLE_INSTANCE_PATTERN: "Stateless" });
    drained["rolloutStrategy"] = json!({ "type": "RollingUpdate", "rollingUpdate": {
        "inPlaceUpdateStrategy": { "gracePeriodSeconds": 1 } } });
    let template = role("t", 1, image)["standalonePattern"]["template"].clone();
    let together =
        json!({ "name": "t", "replicas": 1, "leaderWorkerPattern": { "size": 2, "template": template } });
    json!([role("o", 2, image), drained, together])
}

/// All pods that ever existed, and violated invariants.
#[derive(Default)]
struct PodInvariantChecker {
    pods: BTreeMap<String, Value>,
    /// Pods by name: role, instance, and whether the pod is ready.
    now: HashMap<String, (String, String, bool)>,
    /// Whether all pods have been ready, so that only an update may take pods out of service.
    is_made: bool,
    violations: Vec<String>,
}

impl PodInvariantChecker {
    fn observe(&mut self, pod: &Pod) {
        let label = |key: &str| pod.metadata.labels.as_ref().and_then(|all| all.get(key)).cloned();
        let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let ready = conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True");
        self.pods
            .entry(pod.metadata.uid.clone().unwrap())
            .or_insert_with(|| serde_json::to_value(&pod.metadata).unwrap());
        let role = label(keys::ROLE_NAME).unwrap_or_default();
        let instance = label(keys::ROLE_INSTANCE_NAME).unwrap_or_default();
        self.now.insert(pod.metadata.name.clone().unwrap(), (role, instance, ready));
        let mut down: BTreeMap<&String, BTreeSet<&String>> = BTreeMap::new();
        for (role, instance, _) in self.now.values().filter(|(_, _, ready)| !ready) {
            down.entry(role).or_default().insert(instance);
        }
        if self.is_made && down.values().any(|instances| instances.len() > 1) {
            self.violations.push(format!("down at the same time: {down:?}"));
        }
    }
}

async fn watch(api: Api<Pod>, witness: Arc<Mutex<PodInvariantChecker>>) {
    let mut events = pin!(watcher(api, Config::default()));
    loop {
        match events.try_next().await {
            Ok(Some(Event::Apply(pod) | Event::InitApply(pod))) => witness.lock().observe(&pod),
            Ok(_) => {}
            Err(error) => eprintln!("witness: {error}"),
        }
    }
}

struct OperatorKiller {
    operator: OperatorProcess,
    start: Box<dyn Fn() -> OperatorProcess>,
    kills: usize,
}

impl OperatorKiller {
    /// Kills the operator once or twice.
    async fn kill_at_random(&mut self) {
        for _ in 0..fastrand::usize(1..=2) {
            tokio::time::sleep(MAX_KILL_DELAY.mul_f64(fastrand::f64())).await;
            self.operator.kill();
            self.kills += 1;
            self.operator = (self.start)();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; see CONTRIBUTING.md"]
async fn killed_operator_neither_repeats_restarts_nor_gets_stuck() {
    let kills = std::env::var("MOONGATE_KILLS").map_or(KILLS, |kills| kills.parse().unwrap());
    let plane = ControlPlane::shared().await.unwrap();
    let namespace = plane.namespace("kills").await.unwrap();
    let client = namespace.client.clone();
    install(&client).await;
    let pace = KubeletTimings { restart: Duration::from_millis(300), ..KubeletTimings::default() };
    let _kubelet = FakeKubelet::start(client.clone(), &namespace.name, pace).await.unwrap();
    let (kubeconfig, name) = (plane.kubeconfig(), namespace.name.clone());
    let start = Box::new(move || OperatorProcess::start(&kubeconfig, &name));
    let mut killer = OperatorKiller { operator: start(), start, kills: 0 };
    while killer.kills < kills {
        round(&client, &mut killer).await;
    }
    eprintln!("{} kills", killer.kills);
    namespace.delete().await.unwrap();
}

async fn round(client: &kube::Client, killer: &mut OperatorKiller) {
    let groups: Api<RoleBasedGroup> = Api::default_namespaced(client.clone());
    let witness = Arc::<Mutex<PodInvariantChecker>>::default();
    let mut watching = JoinSet::new();
    watching.spawn(watch(Api::default_namespaced(client.clone()), Arc::clone(&witness)));

    groups.create(&PostParams::default(), &group(roles("engine:1"))).await.unwrap();
    killer.kill_at_random().await;
    settled(&groups).await;
    let created = pods(client).await;
    let uids =
        |pods: &[Pod]| pods.iter().map(|pod| pod.metadata.uid.clone().unwrap()).collect::<BTreeSet<_>>();
    assert_eq!(created.len(), 6);
    assert!(created.iter().all(|pod| restarts(pod) == 0));

    eventually("all pods are observed as ready", async || {
        let mut witness = witness.lock();
        witness.is_made = witness.now.len() == 6 && witness.now.values().all(|(_, _, ready)| *ready);
        witness.is_made.then_some(())
    })
    .await;
    let image = Patch::Merge(json!({ "spec": { "roles": roles("engine:2") } }));
    groups.patch("g", &PatchParams::default(), &image).await.unwrap();
    killer.kill_at_random().await;
    settled(&groups).await;
    let updated = pods(client).await;
    assert_eq!(updated.iter().map(restarts).collect::<Vec<_>>(), [1; 6]);
    {
        let witness = witness.lock();
        let others: Vec<&Value> = witness
            .pods
            .iter()
            .filter(|(uid, _)| !uids(&created).contains(*uid))
            .map(|(_, pod)| pod)
            .collect();
        assert!(others.is_empty(), "{}", serde_json::to_string_pretty(&others).unwrap());
        assert_eq!(uids(&updated), uids(&created));
        assert_eq!(witness.violations, [""; 0]);
    }
    drop(watching);
    // Owned objects are deleted first, so that nothing remains for the next round.
    groups.delete("g", &DeleteParams::foreground()).await.unwrap();
    let is_deleted = async || groups.get_opt("g").await.unwrap().is_none();
    eventually("all objects are deleted", async || {
        (is_deleted().await && pods(client).await.is_empty()).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_leaders_are_replaced_and_nothing_is_done_twice() {
    const LEASE: &str = "operator";
    let plane = ControlPlane::shared().await.unwrap();
    let namespace = plane.namespace("leader-kills").await.unwrap();
    let client = namespace.client.clone();
    install(&client).await;
    let pace = KubeletTimings { restart: Duration::from_millis(300), ..KubeletTimings::default() };
    let _kubelet = FakeKubelet::start(client.clone(), &namespace.name, pace).await.unwrap();
    let leases: Api<Lease> = Api::default_namespaced(client.clone());
    let mut replicas: BTreeMap<String, OperatorProcess> = BTreeMap::new();
    let start = |name: String| {
        let process = OperatorProcess::start_replica(&plane.kubeconfig(), &namespace.name, LEASE, &name);
        (name, process)
    };
    replicas.extend(["r1", "r2"].map(|name| start(name.to_owned())));
    let groups: Api<RoleBasedGroup> = Api::default_namespaced(client.clone());
    groups.create(&PostParams::default(), &group(roles("engine:1"))).await.unwrap();
    settled(&groups).await;
    let created = pods(&client).await;

    let image = Patch::Merge(json!({ "spec": { "roles": roles("engine:2") } }));
    groups.patch("g", &PatchParams::default(), &image).await.unwrap();
    for kill in 3..6 {
        let leader = eventually("a living replica leads", async || {
            let holder = leases.get_opt(LEASE).await.unwrap()?.spec?.holder_identity?;
            let name = holder.split('_').next()?.to_owned();
            replicas.contains_key(&name).then_some(name)
        })
        .await;
        tokio::time::sleep(Duration::from_secs(1).mul_f64(fastrand::f64())).await;
        replicas.remove(&leader).unwrap().kill();
        replicas.extend([start(format!("r{kill}"))]);
    }
    settled(&groups).await;
    let updated = pods(&client).await;
    let uids = |pods: &[Pod]| pods.iter().map(|pod| pod.metadata.uid.clone()).collect::<Vec<_>>();
    assert_eq!(uids(&updated), uids(&created));
    assert_eq!(updated.iter().map(restarts).collect::<Vec<_>>(), [1; 6]);
    let transitions = leases.get(LEASE).await.unwrap().spec.unwrap().lease_transitions;
    assert!(transitions >= Some(3), "{transitions:?} changes of the leader");
    drop(replicas);
    namespace.delete().await.unwrap();
}
