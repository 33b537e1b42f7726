//! Discovery against an API server that lists, watches, loses events, and fails.

use std::sync::Arc;
use std::time::Duration;

use moongate_discovery::{
    DiscoveryOptions, EngineRole, InstanceReadiness, InstanceSource, KubernetesDiscoveryOptions,
    ProbeOptions, Topology, TopologyReader, start,
};
use moongate_runtime::{BackoffPolicy, Supervisor};
use serde_json::json;

use crate::fake_engine::{self, ScriptedServer};
use crate::fake_kubernetes::{FakePodApi, pod};

/// A relist interval so long that changes can only come from the watch.
const NEVER: Duration = Duration::from_secs(3600);

async fn discover(api: &FakePodApi, relist: Duration, supervisor: &Supervisor) -> TopologyReader {
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("config");
    std::fs::write(&kubeconfig, api.kubeconfig()).unwrap();
    let pause = Duration::from_millis(250);
    let options = DiscoveryOptions {
        kubernetes: Some(KubernetesDiscoveryOptions {
            kubeconfig: Some(kubeconfig),
            group: Some("g".into()),
            relist,
            ..KubernetesDiscoveryOptions::default()
        }),
        probe: ProbeOptions {
            backoff: BackoffPolicy { initial: pause, max: pause },
            ..ProbeOptions::default()
        },
        ..DiscoveryOptions::default()
    };
    start(options, supervisor).await.unwrap()
}

async fn until(reader: &mut TopologyReader, condition: impl FnMut(&Topology) -> bool) -> Arc<Topology> {
    let waited = tokio::time::timeout(Duration::from_secs(20), reader.wait_for(condition)).await;
    waited.unwrap_or_else(|_| panic!("not in time; last: {:#?}", reader.current())).unwrap()
}

fn ids(topology: &Topology) -> Vec<&str> {
    topology.instances.iter().map(|instance| &*instance.id.0).collect()
}

async fn engine(supervisor: &Supervisor, mode: &str) -> ScriptedServer {
    let server = ScriptedServer::start(supervisor).await;
    fake_engine::sglang(&server, mode, server.port);
    fake_engine::sglang_bootstrap(&server, true);
    server
}

#[tokio::test]
async fn pods_come_change_and_go_by_watch() {
    let supervisor = Supervisor::new();
    let (prefill, decode) = (engine(&supervisor, "prefill").await, engine(&supervisor, "decode").await);
    let api = FakePodApi::start(&supervisor).await;
    api.put(pod("p-0", "u1", "prefill", prefill.port));
    api.put(pod("router-0", "u2", "router", 1));
    let mut reader = discover(&api, NEVER, &supervisor).await;
    let topology = until(&mut reader, |topology| {
        topology.instances.iter().any(|instance| instance.usable_facts().is_some())
    })
    .await;
    assert_eq!(ids(&topology), ["ns/p-0@u1"], "a router is not an engine");
    let instance = &topology.instances[0];
    assert_eq!((instance.role, instance.source), (EngineRole::Prefill, InstanceSource::Kubernetes));
    assert_eq!(instance.location.node.as_deref(), Some("n1"));

    api.put(pod("d-0", "u3", "decode", decode.port));
    until(&mut reader, |topology| {
        topology.instances.len() == 2
            && topology.instances.iter().all(|instance| instance.usable_facts().is_some())
    })
    .await;

    let mut unready = pod("d-0", "u3", "decode", decode.port);
    unready["status"]["conditions"][0] =
        json!({"type": "Ready", "status": "False", "reason": "ContainersNotReady"});
    api.put(unready);
    let topology =
        until(&mut reader, |topology| topology.get(&"ns/d-0@u3".into()).unwrap().usable_facts().is_none())
            .await;
    assert_eq!(
        topology.get(&"ns/d-0@u3".into()).unwrap().readiness,
        InstanceReadiness::NotReady { reason: "pod is not Ready: ContainersNotReady".into() }
    );
    api.put(pod("d-0", "u3", "decode", decode.port));
    until(&mut reader, |topology| topology.get(&"ns/d-0@u3".into()).unwrap().usable_facts().is_some()).await;

    api.delete("d-0");
    until(&mut reader, |topology| ids(topology) == ["ns/p-0@u1"]).await;
    assert!(api.lists() <= 2, "one list per label generation; all changes came from the watch");
}

#[tokio::test]
async fn a_recreated_pod_is_another_instance() {
    let supervisor = Supervisor::new();
    let server = engine(&supervisor, "decode").await;
    let api = FakePodApi::start(&supervisor).await;
    api.put(pod("d-0", "old", "decode", server.port));
    let mut reader = discover(&api, NEVER, &supervisor).await;
    until(&mut reader, |topology| ids(topology) == ["ns/d-0@old"]).await;
    api.delete("d-0");
    api.put(pod("d-0", "new", "decode", server.port));
    until(&mut reader, |topology| ids(topology) == ["ns/d-0@new"]).await;
}

#[tokio::test]
async fn pods_with_the_labels_of_the_first_api_version_are_found() {
    let supervisor = Supervisor::new();
    let server = engine(&supervisor, "null").await;
    let api = FakePodApi::start(&supervisor).await;
    let mut legacy = pod("w-0", "u", "worker", server.port);
    legacy["metadata"]["labels"] = json!({
        "rolebasedgroup.workloads.x-k8s.io/name": "g", "rolebasedgroup.workloads.x-k8s.io/role": "worker"});
    api.put(legacy);
    let mut other = pod("w-1", "u1", "worker", server.port);
    other["metadata"]["labels"]["rbg.workloads.x-k8s.io/group-name"] = json!("another");
    api.put(other);
    let mut reader = discover(&api, NEVER, &supervisor).await;
    let topology = until(&mut reader, |topology| {
        topology.instances.first().is_some_and(|instance| instance.usable_facts().is_some())
    })
    .await;
    assert_eq!(ids(&topology), ["ns/w-0@u"]);
    assert_eq!(topology.instances[0].role, EngineRole::Plain);
}

#[tokio::test]
async fn the_next_list_repairs_a_stalled_watch() {
    let supervisor = Supervisor::new();
    let server = engine(&supervisor, "decode").await;
    let api = FakePodApi::start(&supervisor).await;
    api.put(pod("d-0", "u0", "decode", server.port));
    api.put(pod("d-1", "u1", "decode", server.port));
    let mut reader = discover(&api, Duration::from_millis(200), &supervisor).await;
    until(&mut reader, |topology| topology.instances.len() == 2).await;
    api.stall_watches();
    api.delete("d-1");
    api.put(pod("d-2", "u2", "decode", server.port));
    until(&mut reader, |topology| ids(topology) == ["ns/d-0@u0", "ns/d-2@u2"]).await;
    assert!(reader.current().instances[0].usable_facts().is_some(), "the remaining instance is unchanged");
}

#[tokio::test]
async fn the_last_list_is_kept_while_the_api_fails() {
    let supervisor = Supervisor::new();
    let server = engine(&supervisor, "decode").await;
    let api = FakePodApi::start(&supervisor).await;
    api.put(pod("d-0", "u0", "decode", server.port));
    let mut reader = discover(&api, Duration::from_millis(100), &supervisor).await;
    until(&mut reader, |topology| {
        topology.instances.iter().any(|instance| instance.usable_facts().is_some())
    })
    .await;
    api.fail(true);
    api.failures(3).await;
    let topology = reader.current();
    assert_eq!(ids(&topology), ["ns/d-0@u0"]);
    assert!(topology.instances[0].usable_facts().is_some());
    api.fail(false);
    api.delete("d-0");
    until(&mut reader, |topology| topology.instances.is_empty()).await;
}
