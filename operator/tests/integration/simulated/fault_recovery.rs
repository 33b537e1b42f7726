//! Faults of instances act on those of other roles: each fault once, whenever the operator is killed.

use std::collections::BTreeMap;

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator_testkit::OperatorSimulation;
use rbg_api::keys;
use serde_json::{Value, json};

use super::{condition, is, pods, role, template, unsettled, up};

/// What a pod has been through: UID and restart count.
type PodState = (String, i64);

fn link(from: &str, to: &str, scope: &str, action: &str) -> Value {
    json!({ "when": { "role": from }, "scope": scope, "then": [{ "role": to, "action": action }] })
}

fn policy(recovery: &Value) -> Value {
    json!({ "metadata": { "name": "g" }, "spec": { "policies": [
        { "name": "pd", "roles": ["a", "b"], "strategy": { "faultRecovery": recovery } }] } })
}

/// A group of two roles with three instances each under a policy. Each instance runs on a node of its ordinal.
fn pairs(recovery: &Value) -> SimulatedApiServer {
    group(json!([role("a", 3, "i:1"), role("b", 3, "i:1")]), recovery)
}

fn group(roles: Value, recovery: &Value) -> SimulatedApiServer {
    let mut cluster = up(roles, 1);
    for node in 0..4 {
        let labels = json!({ "rack": format!("r{}", node / 2) });
        let conditions = json!([{ "type": "Ready", "status": "True" }]);
        let node = json!({ "metadata": { "name": format!("n{node}"), "labels": labels }, "status": { "conditions": conditions } });
        cluster.create(ResourceKind::Node, node);
    }
    let names: Vec<String> = pods(&cluster.server).into_keys().collect();
    for pod in names {
        let ordinal = pod.split('-').nth(2).unwrap().to_owned();
        cluster.edit(ResourceKind::Pod, &pod, |pod| pod["spec"]["nodeName"] = format!("n{ordinal}").into());
    }
    cluster.create(ResourceKind::Policy, policy(recovery));
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    cluster.server
}

fn states(server: &SimulatedApiServer) -> BTreeMap<String, PodState> {
    pods(server).into_iter().map(|(name, (uid, restarts, _))| (name, (uid, restarts))).collect()
}

fn fail(cluster: &mut OperatorSimulation, pod: &str) {
    cluster.edit(ResourceKind::Pod, pod, |pod| {
        pod["status"]["phase"] = "Failed".into();
        pod["status"]["reason"] = "Evicted".into();
    });
}

fn crash(cluster: &mut OperatorSimulation, pod: &str) {
    cluster.edit(ResourceKind::Pod, pod, |pod| {
        let status = &mut pod["status"]["containerStatuses"][0];
        status["restartCount"] = (status["restartCount"].as_i64().unwrap() + 1).into();
        status["ready"] = false.into();
    });
}

/// Maximum number of kills in one test: a run takes up to a second.
const MAX_KILLS: usize = 25;

/// Runs a scenario undisturbed, and with kills after its writes, evenly spread; `check` gets the states before and after.
fn with_every_kill(
    server: &SimulatedApiServer,
    fault: impl Fn(&mut OperatorSimulation),
    check: impl Fn(&SimulatedApiServer, &BTreeMap<String, PodState>, &BTreeMap<String, PodState>, &str),
) {
    let before = states(server);
    let mut undisturbed = OperatorSimulation::new(server.clone(), 1);
    fault(&mut undisturbed);
    undisturbed.run(|_| {});
    check(&undisturbed.server, &before, &states(&undisturbed.server), "undisturbed");
    assert!(undisturbed.writes > 5, "{}", undisturbed.writes);
    let stride = undisturbed.writes.div_ceil(MAX_KILLS).max(1);
    for (order, killed_after) in (1..=undisturbed.writes).step_by(stride).enumerate() {
        // Every other order also has writes that fail.
        let seed = u64::try_from(killed_after).unwrap();
        let mut cluster = OperatorSimulation::new(server.clone(), seed);
        cluster.kill_after_writes = Some(killed_after);
        cluster.write_failure_percent = if order % 2 == 1 { 10 } else { 0 };
        fault(&mut cluster);
        cluster.run(|_| {});
        let what = format!("killed after {killed_after}");
        assert_eq!(unsettled(&cluster.server), [""; 0], "{what}");
        check(&cluster.server, &before, &states(&cluster.server), &what);
    }
}

/// Pods with another UID, and pods that restarted in place once.
fn changes<'a>(
    before: &BTreeMap<String, PodState>,
    after: &'a BTreeMap<String, PodState>,
) -> (Vec<&'a str>, Vec<&'a str>) {
    let recreated = after.iter().filter(|(name, (uid, _))| before[*name].0 != *uid);
    let restarted = after
        .iter()
        .filter(|(name, (uid, restarts))| before[*name].0 == *uid && before[*name].1 + 1 == *restarts);
    let unknown = after
        .iter()
        .filter(|(name, (uid, restarts))| before[*name].0 == *uid && before[*name].1 + 1 < *restarts);
    assert_eq!(unknown.count(), 0, "restarted more than once: {after:?}");
    (recreated.map(|(name, _)| name.as_str()).collect(), restarted.map(|(name, _)| name.as_str()).collect())
}

fn recovery_message(server: &SimulatedApiServer) -> String {
    let group = server.get(ResourceKind::Group, "g").unwrap();
    condition(group, "FaultRecovery").unwrap()["message"].as_str().unwrap().to_owned()
}

#[test]
fn a_failed_pod_restarts_its_partner_once_after_any_kill() {
    let server = pairs(&json!({ "links": [link("a", "b", "Ordinal", "Restart")] }));
    with_every_kill(
        &server,
        |cluster| fail(cluster, "g-a-1"),
        |server, before, after, what| {
            assert_eq!(changes(before, after), (vec!["g-a-1"], vec!["g-b-1"]), "{what}");
            let group = server.get(ResourceKind::Group, "g").unwrap();
            assert!(is(group, "FaultRecovery", "False"), "{what}: {}", group["status"]);
            assert_eq!(group["status"]["faults"].as_array().unwrap().len(), 1, "{what}");
            assert_eq!(
                recovery_message(server),
                "g-a-1 failed on node n1 (pod g-a-1: Evicted); g-b-1 is restarted by policy pd"
            );
        },
    );
}

#[test]
fn a_crash_replaces_all_instances_of_the_linked_role_once() {
    let server = pairs(&json!({ "links": [link("a", "b", "Group", "Replace")] }));
    with_every_kill(
        &server,
        |cluster| crash(cluster, "g-a-0"),
        |_, before, after, what| {
            assert_eq!(changes(before, after), (vec!["g-b-0", "g-b-1", "g-b-2"], vec!["g-a-0"]), "{what}");
        },
    );
}

#[test]
fn a_linked_drain_calls_hooks_before_pods_are_recreated() {
    let mut hooked = role("b", 3, "i:1");
    hooked["annotations"] = json!({ keys::UPGRADE_HOOKS: "8090" });
    let recovery = json!({ "links": [link("a", "b", "Ordinal", "Drain")] });
    let server = group(json!([role("a", 3, "i:1"), hooked]), &recovery);
    for seed in 0..5 {
        let before = states(&server);
        let mut cluster = OperatorSimulation::new(server.clone(), seed);
        fail(&mut cluster, "g-a-2");
        cluster.run(|_| {});
        assert_eq!(unsettled(&cluster.server), [""; 0], "seed {seed}");
        assert_eq!(changes(&before, &states(&cluster.server)).0, ["g-a-2", "g-b-2"], "seed {seed}");
        assert!(
            !cluster.hooks.ended_undrained.contains(&"g-b-2".to_owned()),
            "seed {seed}: it drained first"
        );
        assert!(cluster.hooks.response_count > 0, "seed {seed}");
    }
}

#[test]
fn mutual_links_do_not_loop() {
    let recovery =
        json!({ "links": [link("a", "b", "Ordinal", "Restart"), link("b", "a", "Ordinal", "Restart")] });
    let server = pairs(&recovery);
    with_every_kill(
        &server,
        |cluster| crash(cluster, "g-a-1"),
        |server, before, after, what| {
            assert_eq!(changes(before, after), (vec![], vec!["g-a-1", "g-b-1"]), "{what}");
            let faults = &server.get(ResourceKind::Group, "g").unwrap()["status"]["faults"];
            assert_eq!(faults.as_array().unwrap().len(), 1, "{what}");
        },
    );
}

#[test]
fn a_rule_acts_no_more_often_than_its_budget() {
    let recovery =
        json!({ "links": [link("a", "b", "Ordinal", "Restart")], "maxPerHour": 2, "backoffSeconds": 0 });
    let server = pairs(&recovery);
    let before = states(&server);
    let mut cluster = OperatorSimulation::new(server, 1);
    for pod in ["g-a-0", "g-a-1", "g-a-2"] {
        crash(&mut cluster, pod);
        cluster.run(|_| {});
    }
    let after = states(&cluster.server);
    assert_eq!(changes(&before, &after).1, ["g-a-0", "g-a-1", "g-a-2", "g-b-0", "g-b-1"]);
    assert!(recovery_message(&cluster.server).contains("has acted 2 times in an hour"));
    // An hour later there is a budget again.
    cluster.server.now = cluster.server.now.checked_add(std::time::Duration::from_secs(3601)).unwrap();
    crash(&mut cluster, "g-a-2");
    cluster.run(|_| {});
    assert_eq!(states(&cluster.server)["g-b-2"].1, before["g-b-2"].1 + 1);
}

#[test]
fn two_faults_restart_an_instance_twice_after_a_pause() {
    let server = pairs(&json!({ "links": [link("a", "b", "Ordinal", "Restart")], "backoffSeconds": 40 }));
    let before = states(&server);
    let mut cluster = OperatorSimulation::new(server, 1);
    let started = cluster.server.now;
    for _ in 0..2 {
        crash(&mut cluster, "g-a-0");
        cluster.run(|_| {});
    }
    assert_eq!(states(&cluster.server)["g-b-0"].1, before["g-b-0"].1 + 2);
    assert!(cluster.server.now.duration_since(started).as_secs() >= 39);
}

#[test]
fn starting_pods_and_groups_without_policy_have_no_faults() {
    let mut cluster = OperatorSimulation::new(super::server(), 1);
    cluster.create(ResourceKind::Policy, policy(&json!({ "links": [link("a", "b", "Group", "Replace")] })));
    let roles = json!([role("a", 1, "stuck:1"), role("b", 1, "i:1")]);
    cluster.create(ResourceKind::Group, json!({ "metadata": { "name": "g" }, "spec": { "roles": roles } }));
    cluster.run(|_| {});
    let before = states(&cluster.server);
    crash(&mut cluster, "g-a-0");
    cluster.run(|_| {});
    assert_eq!(states(&cluster.server)["g-b-0"], before["g-b-0"], "g-a-0 has never been in service");

    let mut cluster = up(json!([role("a", 1, "i:1"), role("b", 1, "i:1")]), 1);
    crash(&mut cluster, "g-a-0");
    cluster.run(|_| {});
    for instance in cluster.server.all(ResourceKind::Instance) {
        assert!(instance["metadata"]["annotations"].get(keys::FAULT).is_none(), "{instance}");
    }
}

#[test]
fn an_update_is_no_fault() {
    let server = pairs(&json!({ "links": [link("a", "b", "Group", "Replace")], "unreadySeconds": 1 }));
    let before = states(&server);
    let mut cluster = OperatorSimulation::new(server, 1);
    cluster.edit(ResourceKind::Group, "g", |group| {
        group["spec"]["roles"][0]["standalonePattern"]["template"] = template("i:2");
    });
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    assert_eq!(changes(&before, &states(&cluster.server)), (vec![], vec!["g-a-0", "g-a-1", "g-a-2"]));
}

#[test]
fn an_invalid_policy_is_reported_and_does_nothing() {
    let server = pairs(&json!({ "links": [link("a", "c", "Group", "Replace")] }));
    let before = states(&server);
    let mut cluster = OperatorSimulation::new(server, 1);
    crash(&mut cluster, "g-a-0");
    cluster.run(|_| {});
    assert_eq!(changes(&before, &states(&cluster.server)), (vec![], vec!["g-a-0"]));
    assert!(recovery_message(&cluster.server).contains("role `c`, which is not in the rule's roles"));
}

/// The placement of the pods of a replacement: required node expression, and whether they share a domain.
fn placements(server: &SimulatedApiServer) -> BTreeMap<String, String> {
    let text = |pod: &Value| {
        let affinity = &pod["spec"]["affinity"];
        let node = &affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
        let expression = &node["nodeSelectorTerms"][0]["matchExpressions"][0];
        let shared =
            &affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]["topologyKey"];
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        let values = expression["values"]
            .as_array()
            .map(|all| all.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(","));
        let operator = expression["operator"].as_str().unwrap_or_default();
        (name, format!("{operator} {} {}", values.unwrap_or_default(), shared.as_str().unwrap_or_default()))
    };
    server.all(ResourceKind::Pod).map(text).collect()
}

#[test]
fn a_deleted_node_moves_all_instances_of_its_domain() {
    let server = pairs(&json!({ "replacementDomain": "rack" , "nodeLostSeconds": 300 }));
    assert!(recovery_message(&server).contains("the level `rack` has no node label"));
    let server = rack_pairs(0);
    with_every_kill(
        &server,
        |cluster| cluster.delete(ResourceKind::Node, "n0"),
        |server, before, after, what| {
            let rack = vec!["g-a-0", "g-a-1", "g-b-0", "g-b-1"];
            assert_eq!(changes(before, after), (rack.clone(), vec![]), "{what}");
            let placed = placements(server);
            assert!(rack.iter().all(|pod| placed[*pod] == "In r0 topology/rack"), "{what}: {placed:?}");
            let faults = &server.get(ResourceKind::Group, "g").unwrap()["status"]["faults"];
            assert_eq!(
                faults.as_array().unwrap().len(),
                1,
                "{what}: both instances of the node have one fault"
            );
        },
    );
}

/// Pairs with racks of two nodes: instances 0 and 1 in `r0`, 2 in `r1`.
fn rack_pairs(node_lost_seconds: i32) -> SimulatedApiServer {
    let recovery = json!({ "replacementDomain": "topology/rack", "nodeLostSeconds": node_lost_seconds });
    let mut cluster = OperatorSimulation::new(pairs(&recovery), 1);
    for node in 0..4 {
        cluster.edit(ResourceKind::Node, &format!("n{node}"), |object| {
            object["metadata"]["labels"] = json!({ "topology/rack": format!("r{}", node / 2) });
        });
    }
    cluster.run(|_| {});
    cluster.server
}

#[test]
fn an_unready_node_is_lost_after_its_toleration() {
    for (back, expected) in [(true, vec![]), (false, vec!["g-a-2", "g-b-2"])] {
        let server = rack_pairs(300);
        let before = states(&server);
        let mut cluster = OperatorSimulation::new(server, 1);
        let since = cluster.server.now;
        let ready = |cluster: &mut OperatorSimulation, status: &str, at: String| {
            cluster.edit(ResourceKind::Node, "n2", |node| {
                node["status"]["conditions"] =
                    json!([{ "type": "Ready", "status": status, "lastTransitionTime": at }]);
            });
        };
        ready(&mut cluster, "Unknown", since.to_string());
        while cluster.step() {}
        let now = cluster.server.now;
        assert!(now.duration_since(since).as_secs() < 300, "the toleration has not passed: {now}");
        assert_eq!(changes(&before, &states(&cluster.server)).0, [""; 0]);
        if back {
            ready(&mut cluster, "True", now.to_string());
        }
        cluster.run(|_| {});
        assert_eq!(changes(&before, &states(&cluster.server)).0, expected, "back: {back}");
    }
}

/// Whether there is room for a pod.
type IsSchedulable = fn(&Value) -> bool;

/// The domain that the pods of a replacement require.
fn required_domain(pod: &Value) -> &Value {
    let required = &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    &required["nodeSelectorTerms"][0]["matchExpressions"][0]["operator"]
}

#[test]
fn a_full_domain_is_left_by_all_its_instances() {
    let rack = ["g-a-0", "g-a-1", "g-b-0", "g-b-1"];
    // There is room in other domains, or nowhere in a common one.
    let rooms: [(IsSchedulable, &str); 2] = [
        (|pod| required_domain(pod) != "In" || pod["metadata"]["name"] == "g-a-0", "NotIn r0 topology/rack"),
        (|pod| required_domain(pod).is_null(), "  "),
    ];
    for (is_schedulable, expected) in rooms {
        let mut server = rack_pairs(0);
        server.is_schedulable = is_schedulable;
        with_every_kill(
            &server,
            |cluster| cluster.delete(ResourceKind::Node, "n0"),
            |server, before, after, what| {
                assert_eq!(changes(before, after).0, rack, "{what}");
                let placed = placements(server);
                assert!(rack.iter().all(|pod| placed[*pod] == expected), "{what}: {placed:?}");
            },
        );
    }
}
