//! Warmups under failures: every node gets its images and files.

use std::collections::BTreeMap;

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator_testkit::OperatorSimulation;
use rbg_api::keys;
use serde_json::{Value, json};

use super::{condition, role, up};

fn nodes(cluster: &mut OperatorSimulation, count: usize) {
    for index in 0..count {
        let name = format!("n{index}");
        let labels = json!({ "pool": "gpu", keys::HOSTNAME: name });
        cluster.create(ResourceKind::Node, json!({ "metadata": { "name": name, "labels": labels } }));
    }
}

fn started(count: usize, image: &str, policies: Value, seed: u64) -> OperatorSimulation {
    started_with(count, ("imagePreload", json!({ "images": [image] })), policies, seed)
}

fn started_with(count: usize, action: (&str, Value), policies: Value, seed: u64) -> OperatorSimulation {
    let mut cluster = OperatorSimulation::new(super::server(), seed);
    nodes(&mut cluster, count);
    let mut target = json!({ "nodeSelector": { "pool": "gpu" } });
    target[action.0] = action.1;
    let spec = json!({ "targetNodes": target, "policies": policies });
    cluster.create(ResourceKind::Warmup, json!({ "metadata": { "name": "w" }, "spec": spec }));
    cluster
}

fn status(server: &SimulatedApiServer) -> Value {
    server.get(ResourceKind::Warmup, "w").unwrap()["status"].clone()
}

fn counts(server: &SimulatedApiServer) -> (String, [i64; 4]) {
    let status = status(server);
    let counts = ["desired", "active", "succeeded", "failed"].map(|name| status[name].as_i64().unwrap());
    (status["phase"].as_str().unwrap().to_owned(), counts)
}

/// Phases of the pods, by node.
fn pods(server: &SimulatedApiServer) -> BTreeMap<String, Vec<String>> {
    let mut pods: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for pod in server.all(ResourceKind::WarmupPod) {
        let node = pod["metadata"]["labels"][keys::WARMUP_NODE].as_str().unwrap().to_owned();
        pods.entry(node).or_default().push(pod["status"]["phase"].as_str().unwrap_or_default().to_owned());
    }
    pods
}

fn at_most(active: usize) -> impl Fn(&SimulatedApiServer) {
    move |server| {
        let running = pods(server).into_values().flatten().filter(|phase| phase.is_empty()).count();
        assert!(running <= active, "{running} concurrently");
    }
}

#[test]
fn each_node_is_warmed_up_once_whenever_the_operator_is_killed() {
    let mut undisturbed = started(5, "i:1", json!({ "parallelism": 2 }), 3);
    undisturbed.run(at_most(2));
    for killed_after in 1..=undisturbed.writes {
        let mut cluster = started(5, "i:1", json!({ "parallelism": 2 }), 3);
        cluster.kill_after_writes = Some(killed_after);
        cluster.run(at_most(2));
        assert_eq!(counts(&cluster.server), ("Completed".to_owned(), [5, 0, 5, 0]), "{killed_after}");
        assert!(pods(&cluster.server).values().all(|pods| pods == &["Succeeded"]), "{killed_after}");
    }
}

#[test]
fn failed_writes_are_retried_without_duplicate_pods() {
    for seed in 0..20 {
        let mut cluster = started(4, "i:1", json!({}), seed);
        cluster.write_failure_percent = 30;
        cluster.run(|_| {});
        assert_eq!(counts(&cluster.server), ("Completed".to_owned(), [4, 0, 4, 0]), "seed {seed}");
        assert!(pods(&cluster.server).values().all(|pods| pods.len() == 1), "seed {seed}");
    }
}

#[test]
fn images_without_a_shell_are_pulled() {
    for image in ["shell-less:1", "stuck:1"] {
        let mut cluster = started(2, image, json!({ "backoffLimitPerNode": 0, "maxFailedNodes": 0 }), 1);
        cluster.run(|_| {});
        assert_eq!(counts(&cluster.server), ("Completed".to_owned(), [2, 0, 2, 0]), "{image}");
        let left: Vec<String> = pods(&cluster.server).into_values().flatten().collect();
        assert!(left.iter().all(|phase| phase == "Failed"), "{image}: no pod hangs: {left:?}");
    }
}

#[test]
fn attempts_on_a_node_are_limited_with_backoff() {
    let begin = |tolerated: i64| {
        let action = json!({ "containers": [{ "name": "compile", "image": "broken:1" }] });
        let policies = json!({ "backoffLimitPerNode": 3, "maxFailedNodes": tolerated });
        let mut cluster = started_with(2, ("customizedAction", action), policies, 1);
        let before = cluster.server.now;
        cluster.run(|_| {});
        (cluster.server.now.duration_since(before).as_secs(), cluster)
    };
    let (took, cluster) = begin(2);
    assert_eq!(counts(&cluster.server), ("Completed".to_owned(), [2, 0, 0, 2]));
    assert!(pods(&cluster.server).values().all(|pods| pods.len() == 4));
    assert!(took >= 1 + 2 + 4, "{took}");
    let (_, cluster) = begin(0);
    assert_eq!(counts(&cluster.server).0, "Failed");
    assert_eq!(
        condition(cluster.server.get(ResourceKind::Warmup, "w").unwrap(), "Failed").unwrap()["reason"],
        "MaxFailedNodesExceeded"
    );
}

#[test]
fn timed_out_warmup_fails_removes_pods_and_expires() {
    let policies = json!({ "globalTimeoutSeconds": 30, "ttlSecondsAfterFinished": 60 });
    let mut cluster = started(2, "absent:1", policies, 1);
    let before = cluster.server.now;
    let mut failed = None;
    cluster.run(|server| {
        if let Some(warmup) = server.get(ResourceKind::Warmup, "w")
            && let Some(condition) = condition(warmup, "Failed")
        {
            assert_eq!(condition["reason"], "GlobalTimeoutExceeded");
            failed.get_or_insert(server.now);
        }
    });
    assert!(failed.unwrap().duration_since(before).as_secs() >= 30);
    assert!(cluster.server.get(ResourceKind::Warmup, "w").is_none());
    assert!(cluster.server.now.duration_since(failed.unwrap()).as_secs() >= 59);
    assert!(pods(&cluster.server).is_empty());
}

#[test]
fn a_paused_warmup_creates_no_pods_until_resumed() {
    let mut cluster = started(3, "i:1", json!({ "parallelism": 1 }), 1);
    while pods(&cluster.server).is_empty() {
        cluster.run_for(1, |_| {});
    }
    cluster.edit(ResourceKind::Warmup, "w", |warmup| warmup["spec"]["paused"] = true.into());
    cluster.run(|_| {});
    assert_eq!(counts(&cluster.server).0, "Paused");
    let created = pods(&cluster.server).len();
    assert!(created < 3, "{created}");
    cluster.edit(ResourceKind::Warmup, "w", |warmup| warmup["spec"]["paused"] = false.into());
    cluster.run(|_| {});
    assert_eq!(counts(&cluster.server), ("Completed".to_owned(), [3, 0, 3, 0]));
}

#[test]
fn group_nodes_are_warmed_up_for_each_role_on_them() {
    let mut stateful = role("s", 1, "i:1");
    stateful["annotations"] = json!({ keys::ROLE_WORKLOAD_TYPE: "apps/v1/StatefulSet" });
    let mut cluster = up(json!([role("a", 2, "i:1"), role("b", 1, "i:1"), stateful]), 1);
    // Stands in for the StatefulSet controller and the scheduler.
    let labels = json!({ keys::GROUP_NAME: "g", keys::ROLE_NAME: "s" });
    cluster.create(
        ResourceKind::ForeignPod,
        json!({ "metadata": { "name": "g-s-0", "labels": labels }, "spec": { "nodeName": "other" } }),
    );
    let images = |image: &str| json!({ "imagePreload": { "images": [image, "i:3"] } });
    let warmup = |group: &str| {
        let roles = json!({ "a": images("i:2"), "b": images("i:4"), "s": images("i:5") });
        json!({ "metadata": { "name": "w" }, "spec": { "targetRoleBasedGroup": { "name": group, "roles": roles } } })
    };
    cluster.create(ResourceKind::Warmup, warmup("g"));
    cluster.run(|_| {});
    assert_eq!(counts(&cluster.server), ("Completed".to_owned(), [2, 0, 2, 0]));
    let mut pulled: Vec<Vec<&str>> = cluster
        .server
        .all(ResourceKind::WarmupPod)
        .map(|pod| {
            pod["spec"]["containers"]
                .as_array()
                .unwrap()
                .iter()
                .filter_map(|one| one["image"].as_str())
                .collect()
        })
        .collect();
    pulled.sort();
    assert_eq!(pulled, [vec!["i:2", "i:3", "i:4"], vec!["i:5", "i:3"]]);
}

#[test]
fn warmup_waits_for_a_missing_group() {
    let mut cluster = OperatorSimulation::new(super::server(), 1);
    let target = json!({ "name": "g", "roles": { "a": { "imagePreload": { "images": ["i:2"] } } } });
    cluster.create(
        ResourceKind::Warmup,
        json!({ "metadata": { "name": "w" }, "spec": { "targetRoleBasedGroup": target } }),
    );
    cluster.run(|_| {});
    assert_eq!(
        condition(cluster.server.get(ResourceKind::Warmup, "w").unwrap(), "Complete").unwrap()["reason"],
        "TargetNotFound"
    );
    let roles = json!([role("a", 1, "i:1")]);
    cluster.create(ResourceKind::Group, json!({ "metadata": { "name": "g" }, "spec": { "roles": roles } }));
    cluster.run(|_| {});
    assert_eq!(counts(&cluster.server).0, "Completed");
}

#[test]
fn a_warmup_without_nodes_completes_at_once() {
    let mut cluster = started(0, "i:1", json!({}), 1);
    cluster.run(|_| {});
    assert_eq!(counts(&cluster.server), ("Completed".to_owned(), [0; 4]));
}
