//! The operator is killed, or writes fail, during an in-place update.

use std::collections::BTreeMap;

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator_testkit::OperatorSimulation;
use serde_json::{Value, json};

use super::{is, pods, role, server, template, unsettled, up};

/// Ordered pods, unordered pods with a grace period, and pods that serve only together.
fn roles(image: &str) -> Value {
    let mut drained = role("d", 2, image);
    drained["annotations"] = json!({ "rbg.workloads.x-k8s.io/role-instance-pattern": "Stateless" });
    drained["rolloutStrategy"] = json!({ "type": "RollingUpdate", "rollingUpdate": {
        "inPlaceUpdateStrategy": { "gracePeriodSeconds": 5 } } });
    let together = json!({ "name": "t", "replicas": 1, "leaderWorkerPattern": { "size": 2, "template": template(image) } });
    json!([role("o", 2, image), drained, together])
}

fn update(cluster: &mut OperatorSimulation) {
    cluster.edit(ResourceKind::Group, "g", |group| {
        let roles = roles("i:2");
        for (role, new) in
            group["spec"]["roles"].as_array_mut().unwrap().iter_mut().zip(roles.as_array().unwrap())
        {
            for pattern in ["standalonePattern", "leaderWorkerPattern"] {
                if let Some(new) = new.get(pattern) {
                    role[pattern]["template"] = new["template"].clone();
                }
            }
        }
    });
}

/// At most one instance of a role is down at a time, as the update strategy allows.
fn check(server: &SimulatedApiServer) {
    let mut down: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for pod in server.all(ResourceKind::Pod).filter(|pod| !is(pod, "Ready", "True")) {
        let label = |key: &str| pod["metadata"]["labels"][key].as_str().unwrap();
        let down = down.entry(label(rbg_api::keys::ROLE_NAME)).or_default();
        let instance = label(rbg_api::keys::ROLE_INSTANCE_NAME);
        if !down.contains(&instance) {
            down.push(instance);
        }
    }
    assert!(down.values().all(|instances| instances.len() <= 1), "{down:?}");
}

fn is_updated_once(cluster: &mut OperatorSimulation, what: &str) {
    let before = pods(&cluster.server);
    assert_eq!(before.len(), 6);
    update(cluster);
    cluster.run(check);
    assert_eq!(unsettled(&cluster.server), [""; 0], "{what}");
    assert_eq!(cluster.ended.iter().collect::<Vec<_>>(), [""; 0], "{what}");
    let after = pods(&cluster.server);
    for (name, (uid, restarts, image)) in after {
        assert_eq!((&uid, restarts, image.as_str()), (&before[&name].0, 1, "i:2"), "{what}: {name}");
    }
}

#[test]
fn update_survives_any_kill_and_restarts_each_pod_once() {
    let ready = up(roles("i:1"), 1).server;
    let mut undisturbed = OperatorSimulation::new(ready.clone(), 7);
    is_updated_once(&mut undisturbed, "undisturbed");
    assert!(undisturbed.writes > 40, "only {} writes", undisturbed.writes);
    for killed_after in 1..=undisturbed.writes {
        let mut cluster = OperatorSimulation::new(ready.clone(), 7);
        cluster.kill_after_writes = Some(killed_after);
        is_updated_once(&mut cluster, &format!("killed after write {killed_after}"));
    }
}

#[test]
fn update_restarts_each_pod_once_despite_failing_writes() {
    let ready = up(roles("i:1"), 1).server;
    for seed in 0..20 {
        let mut cluster = OperatorSimulation::new(ready.clone(), seed);
        cluster.write_failure_percent = 30;
        is_updated_once(&mut cluster, &format!("seed {seed}"));
    }
}

#[test]
fn group_creation_survives_any_kill_with_the_right_pod_count() {
    for killed_after in 1..=60 {
        let mut cluster = OperatorSimulation::new(server(), 3);
        cluster.kill_after_writes = Some(killed_after);
        cluster.create(
            ResourceKind::Group,
            json!({ "metadata": { "name": "g" }, "spec": { "roles": roles("i:1") } }),
        );
        cluster.run(|_| {});
        assert_eq!(unsettled(&cluster.server), [""; 0], "killed after write {killed_after}");
        assert_eq!(pods(&cluster.server).len(), 6, "killed after write {killed_after}");
        assert!(cluster.ended.is_empty(), "{:?}", cluster.ended);
    }
}
