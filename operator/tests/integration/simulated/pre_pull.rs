//! New images are on the node before a pod there restarts with them.

use std::collections::BTreeSet;

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator_testkit::OperatorSimulation;
use rbg_api::keys;
use serde_json::{Value, json};

use super::{condition, names, pods, role, template, unsettled, up};

/// Ordered pods, unordered pods, and a leader with a worker.
fn roles(image: &str) -> Value {
    let annotations = json!({ keys::PRE_PULL: "true", keys::PRE_PULL_TIMEOUT: "30s" });
    let mut roles = json!([role("o", 2, image), role("u", 2, image), { "name": "t", "replicas": 1,
        "leaderWorkerPattern": { "size": 2, "template": template(image) } }]);
    for role in roles.as_array_mut().unwrap() {
        role["annotations"] = annotations.clone();
    }
    roles[1]["annotations"][keys::ROLE_INSTANCE_PATTERN] = "Stateless".into();
    roles
}

fn update(cluster: &mut OperatorSimulation, image: &str) {
    cluster.edit(ResourceKind::Group, "g", |group| group["spec"]["roles"] = roles(image));
}

fn owner(object: &Value) -> String {
    object["metadata"]["ownerReferences"][0]["name"].as_str().unwrap().to_owned()
}

/// Instances with a pod whose spec has the image.
fn restarted(server: &SimulatedApiServer, image: &str) -> BTreeSet<String> {
    let is_new = |pod: &&Value| pod["spec"]["containers"][0]["image"] == image;
    server.all(ResourceKind::Pod).filter(is_new).map(owner).collect()
}

fn is_updated_once(cluster: &mut OperatorSimulation, what: &str) {
    update(cluster, "i:2");
    let mut pulled = BTreeSet::new();
    cluster.run(|server| {
        let done = server.all(ResourceKind::WarmupPod).filter(|pod| pod["status"]["phase"] == "Succeeded");
        pulled.extend(done.filter(|pod| pod["spec"]["containers"][0]["image"] == "i:2").map(owner));
        let restarted = restarted(server, "i:2");
        assert!(restarted.is_subset(&pulled), "{what}: {restarted:?} without {pulled:?}");
    });
    assert_eq!(unsettled(&cluster.server), [""; 0], "{what}");
    assert_eq!(pulled.len(), 5, "{what}: {pulled:?}");
    assert_eq!(names(&cluster.server, ResourceKind::WarmupPod), [""; 0], "{what}");
    assert!(cluster.ended.is_empty(), "{what}: {:?}", cluster.ended);
    assert!(
        pods(&cluster.server).values().all(|(_, restarts, image)| (*restarts, image.as_str()) == (1, "i:2"))
    );
    let group = cluster.server.get(ResourceKind::Group, "g").unwrap();
    assert_eq!(condition(group, "PullingImages").unwrap()["reason"], "Pulled", "{what}");
}

#[test]
fn killed_after_any_write_images_are_pulled_before_pods_restart() {
    let ready = up(roles("i:1"), 1).server;
    let mut undisturbed = OperatorSimulation::new(ready.clone(), 7);
    is_updated_once(&mut undisturbed, "undisturbed");
    for killed_after in (1..=undisturbed.writes).step_by(7) {
        let mut cluster = OperatorSimulation::new(ready.clone(), 7);
        cluster.kill_after_writes = Some(killed_after);
        is_updated_once(&mut cluster, &format!("killed after write {killed_after}"));
    }
    for seed in 0..4 {
        let mut cluster = OperatorSimulation::new(ready.clone(), seed);
        cluster.write_failure_percent = 20;
        is_updated_once(&mut cluster, &format!("seed {seed}"));
    }
}

#[test]
fn failed_image_pull_waits_then_costs_one_instance() {
    let mut cluster = up(json!([]), 3);
    cluster.edit(ResourceKind::Group, "g", |group| {
        group["spec"]["roles"] = json!([role("a", 2, "i:1")]);
        group["metadata"]["annotations"] = json!({ keys::PRE_PULL: "true", keys::PRE_PULL_TIMEOUT: "30s" });
    });
    cluster.run(|_| {});
    let started = cluster.server.now;
    cluster.edit(ResourceKind::Group, "g", |group| group["spec"]["roles"][0] = role("a", 2, "absent:2"));
    let (mut reported, mut first) = (BTreeSet::new(), None);
    cluster.run(|server| {
        let group = server.get(ResourceKind::Group, "g").unwrap();
        if let Some(condition) = condition(group, "PullingImages") {
            reported.insert(format!("{}: {}", condition["reason"], condition["message"]));
        }
        if first.is_none() && !restarted(server, "absent:2").is_empty() {
            first = Some(server.now);
        }
    });
    let waited = first.unwrap().duration_since(started).as_secs();
    assert!((30..60).contains(&waited), "{waited} s");
    assert!(reported.contains(r#""PullFailed": "absent:2 cannot be pulled to node""#), "{reported:?}");
    assert!(
        reported.contains(r#""PullTimedOut": "absent:2 was not pulled to node within 30s""#),
        "{reported:?}"
    );
    assert_eq!(restarted(&cluster.server, "absent:2"), BTreeSet::from(["g-a-1".to_owned()]));
    assert_eq!(names(&cluster.server, ResourceKind::WarmupPod), [""; 0]);
}

#[test]
fn reverted_update_restarts_nothing_and_leaves_nothing() {
    let mut cluster = up(roles("i:1"), 5);
    update(&mut cluster, "absent:2");
    for _ in 0..10_000 {
        if names(&cluster.server, ResourceKind::WarmupPod).len() == 3 {
            break;
        }
        cluster.run_for(1, |_| {});
    }
    assert_eq!(names(&cluster.server, ResourceKind::WarmupPod).len(), 3, "one instance of each role");
    update(&mut cluster, "i:1");
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    assert_eq!(names(&cluster.server, ResourceKind::WarmupPod), [""; 0]);
    assert!(pods(&cluster.server).values().all(|(_, restarts, _)| *restarts == 0));
}
