//! In-place updates of pods with upgrade hooks.

use std::time::Duration;

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator_testkit::OperatorSimulation;
use rbg_api::keys;
use serde_json::{Value, json};

use super::{condition, pods, template, unsettled, up};

/// Roles with hooks: ordered, unordered, and a leader with hooks whose worker has none.
fn roles(image: &str) -> Value {
    let hooks = json!({ keys::UPGRADE_HOOKS: "8080", keys::UPGRADE_TIMEOUT: "30s" });
    let mut unordered = hooks.clone();
    unordered[keys::ROLE_INSTANCE_PATTERN] = "Stateless".into();
    let role = |name: &str, annotations: &Value| {
        json!({ "name": name, "replicas": 2, "annotations": annotations,
            "standalonePattern": { "template": template(image) } })
    };
    let together = json!({ "name": "t", "replicas": 1, "annotations": hooks,
        "leaderWorkerPattern": { "size": 2, "template": template(image) } });
    json!([role("o", &hooks), role("u", &unordered), together])
}

fn edit(cluster: &mut OperatorSimulation, edit: impl Fn(&mut Value)) {
    cluster.edit(ResourceKind::Group, "g", |group| {
        for role in group["spec"]["roles"].as_array_mut().unwrap() {
            for pattern in ["standalonePattern", "leaderWorkerPattern"] {
                if let Some(pattern) = role.get_mut(pattern) {
                    edit(&mut pattern["template"]);
                }
            }
        }
    });
}

fn update(cluster: &mut OperatorSimulation, image: &str) {
    edit(cluster, |template| template["spec"]["containers"][0]["image"] = image.into());
}

/// Pods without hooks restart together with those that have hooks.
fn check(server: &SimulatedApiServer) {
    let restarts = |name: &str| pods(server).get(name).map_or(0, |pod| pod.1);
    assert!(restarts("g-t-0-1") <= restarts("g-t-0-0") || drained(server, "g-t-0-0"));
}

fn drained(server: &SimulatedApiServer, pod: &str) -> bool {
    let state = server.get(ResourceKind::Pod, pod).unwrap()["metadata"]["annotations"]
        ["rbg.workloads.x-k8s.io/inplace-update-state"]
        .as_str()
        .unwrap_or_default();
    state.contains("Settling") || state.contains("Settled")
}

fn is_updated_once(cluster: &mut OperatorSimulation, what: &str) {
    let before = pods(&cluster.server);
    assert_eq!(before.len(), 6);
    update(cluster, "i:2");
    cluster.run(check);
    assert_eq!(unsettled(&cluster.server), [""; 0], "{what}");
    assert_eq!(cluster.hooks.violations, [""; 0], "{what}");
    assert_eq!(cluster.hooks.left_unsettled(), 0, "{what}");
    assert_eq!(cluster.ended.iter().collect::<Vec<_>>(), [""; 0], "{what}");
    for (name, (uid, restarts, image)) in pods(&cluster.server) {
        assert_eq!((&uid, restarts, image.as_str()), (&before[&name].0, 1, "i:2"), "{what}: {name}");
    }
    let group = cluster.server.get(ResourceKind::Group, "g").unwrap();
    assert_eq!(condition(group, "WaitingForHooks").unwrap()["reason"], "HooksCompleted", "{what}");
}

#[test]
fn pods_drain_and_settle_in_turn_after_any_kill() {
    let ready = up(roles("i:1"), 1).server;
    let mut undisturbed = OperatorSimulation::new(ready.clone(), 7);
    is_updated_once(&mut undisturbed, "undisturbed");
    assert!(
        undisturbed.writes > 40 && undisturbed.hooks.response_count > 20,
        "{} and {}",
        undisturbed.writes,
        undisturbed.hooks.response_count
    );
    for killed_after in (1..=undisturbed.writes).step_by(7) {
        let mut cluster = OperatorSimulation::new(ready.clone(), 7);
        cluster.kill_after_writes = Some(killed_after);
        is_updated_once(&mut cluster, &format!("killed after write {killed_after}"));
    }
    for killed_after in (1..=undisturbed.hooks.response_count).step_by(7) {
        let mut cluster = OperatorSimulation::new(ready.clone(), 7);
        cluster.kill_after_responses = Some(killed_after);
        is_updated_once(&mut cluster, &format!("killed after response {killed_after}"));
    }
}

#[test]
fn pods_drain_first_despite_lost_writes_and_responses() {
    let ready = up(roles("i:1"), 1).server;
    for seed in 0..8 {
        let mut cluster = OperatorSimulation::new(ready.clone(), seed);
        cluster.write_failure_percent = 20;
        is_updated_once(&mut cluster, &format!("seed {seed}"));
    }
}

#[test]
fn unresponsive_pods_are_awaited_until_their_hook_timeout() {
    let mut cluster = OperatorSimulation::new(up(roles("i:1"), 1).server, 3);
    cluster.hooks.unresponsive = true;
    update(&mut cluster, "i:2");
    let started_at = cluster.server.now;
    let mut waiting = Vec::new();
    cluster.run(|server| {
        let group = server.get(ResourceKind::Group, "g").unwrap();
        let now = condition(group, "WaitingForHooks").filter(|condition| condition["status"] == "True");
        waiting.extend(now.map(|condition| condition["message"].as_str().unwrap().to_owned()));
    });
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    assert!(
        pods(&cluster.server).values().all(|(_, restarts, image)| (*restarts, image.as_str()) == (1, "i:2"))
    );
    assert!(waiting.iter().any(|text| text.contains("g-o-1 has yet to drain")), "{waiting:?}");
    assert!(waiting.iter().any(|text| text.contains("g-o-1 has yet to settle")), "{waiting:?}");
    let took = Duration::try_from(cluster.server.now.duration_since(started_at)).unwrap();
    // Two instances of a role one after the other, each with both hooks.
    assert!((120..200).contains(&took.as_secs()), "{took:?}");
    let group = cluster.server.get(ResourceKind::Group, "g").unwrap();
    let waiting = condition(group, "WaitingForHooks").unwrap();
    assert_eq!((waiting["status"].as_str(), waiting["reason"].as_str()), (Some("False"), Some("TimedOut")));
    let message = waiting["message"].as_str().unwrap();
    assert!(message.contains("g-o-0 did not drain within 30s"), "{message}");
    assert!(message.contains("g-o-0 did not settle within 30s"), "{message}");
}

/// Advances until the pod drains.
fn until_it_drains(cluster: &mut OperatorSimulation, pod: &str) {
    for _ in 0..10_000 {
        let live = cluster.server.get(ResourceKind::Pod, pod).unwrap();
        if live["metadata"]["annotations"].to_string().contains("Draining") {
            return;
        }
        cluster.run_for(1, |_| {});
    }
    panic!("{pod} never drains");
}

#[test]
fn reverted_update_restarts_only_already_updated_pods() {
    let mut cluster = OperatorSimulation::new(up(roles("i:1"), 1).server, 5);
    update(&mut cluster, "i:2");
    cluster.hooks.not_ready_responses = usize::MAX;
    until_it_drains(&mut cluster, "g-o-1");
    update(&mut cluster, "i:1");
    cluster.run_for(300, |_| {});
    cluster.hooks.not_ready_responses = 2;
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    assert_eq!(cluster.hooks.violations, [""; 0]);
    let after = pods(&cluster.server);
    assert_eq!((after["g-o-1"].1, after["g-o-0"].1), (0, 0));
}

#[test]
fn updates_by_an_operator_without_hooks_complete() {
    let mut cluster = OperatorSimulation::new(up(roles("i:1"), 1).server, 6);
    update(&mut cluster, "i:2");
    cluster.hooks.not_ready_responses = usize::MAX;
    until_it_drains(&mut cluster, "g-o-1");
    cluster.edit(ResourceKind::Pod, "g-o-1", |pod| {
        let annotations = pod["metadata"]["annotations"].as_object_mut().unwrap();
        annotations.remove("rbg.workloads.x-k8s.io/inplace-update-grace").unwrap();
        pod["spec"]["containers"][0]["image"] = "i:2".into();
    });
    cluster.hooks.not_ready_responses = 2;
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    assert_eq!(pods(&cluster.server)["g-o-1"].1, 1);
}

#[test]
fn failed_and_deleted_pods_are_not_waited_for() {
    let mut cluster = OperatorSimulation::new(up(roles("i:1"), 1).server, 9);
    update(&mut cluster, "i:2");
    until_it_drains(&mut cluster, "g-o-1");
    cluster.hooks.unresponsive = true;
    cluster.edit(ResourceKind::Pod, "g-o-1", |pod| pod["status"]["phase"] = "Failed".into());
    let started_at = cluster.server.now;
    cluster.run_for(200, |_| {});
    assert!(cluster.ended.contains("g-o-1"));
    cluster.delete(ResourceKind::Group, "g");
    cluster.run(|_| {});
    assert!(cluster.server.now.duration_since(started_at).as_secs() < 30);
    assert_eq!(pods(&cluster.server).len(), 0);
}

#[test]
fn recreated_pods_drain_first() {
    let mut cluster = OperatorSimulation::new(up(roles("i:1"), 1).server, 11);
    let before = pods(&cluster.server);
    edit(&mut cluster, |template| template["spec"]["containers"][0]["args"] = json!(["--more"]));
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    let mut undrained = cluster.hooks.ended_undrained;
    undrained.retain(|name| name != "g-t-0-1");
    assert_eq!(undrained, [""; 0]);
    for (name, (uid, ..)) in pods(&cluster.server) {
        assert_ne!(before.get(&name).map(|pod| &pod.0), Some(&uid), "{name}");
    }
}

#[test]
fn recreated_instances_drain_first() {
    let mut roles = roles("i:1");
    for role in roles.as_array_mut().unwrap() {
        role["rolloutStrategy"] =
            json!({ "type": "RollingUpdate", "rollingUpdate": { "type": "RecreatePod" } });
    }
    let mut cluster = OperatorSimulation::new(up(roles, 1).server, 13);
    let before = pods(&cluster.server);
    update(&mut cluster, "i:2");
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    assert!(cluster.hooks.response_count > 10, "{}", cluster.hooks.response_count);
    let mut undrained = cluster.hooks.ended_undrained;
    undrained.retain(|name| name != "g-t-0-1");
    assert_eq!(undrained, [""; 0]);
    let after = pods(&cluster.server);
    assert_eq!(after.len(), before.len());
    assert!(after.values().all(|(uid, _, image)| image == "i:2" && before.values().all(|old| old.0 != *uid)));
}
