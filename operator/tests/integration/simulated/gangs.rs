//! Gangs: pods that are created and recreated together.

use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator::plan::PlanSettings;
use moongate_operator::{GangScheduler, ResourceKind};
use moongate_operator_testkit::OperatorSimulation;
use rbg_api::keys;
use serde_json::{Value, json};

use super::{condition, names, pods, role, server, template, unsettled, up};

/// A leader and two workers, whose environment contains `value`.
fn workers(gang: bool, value: &str) -> Value {
    let patch =
        json!({ "spec": { "containers": [{ "name": "c", "env": [{ "name": "V", "value": value }] }] } });
    let annotations = if gang { json!({ keys::INSTANCE_GANG_SCHEDULING: "true" }) } else { json!({}) };
    json!([{ "name": "t", "replicas": 1, "annotations": annotations, "leaderWorkerPattern": {
        "size": 3, "template": template("i:1"), "workerTemplatePatch": patch,
        "restartPolicyConfig": { "type": "None" } } }])
}

#[test]
fn gang_is_recreated_if_one_pod_cannot_update_in_place() {
    for (gang, expected) in [(false, 2), (true, 3)] {
        let mut cluster = up(workers(gang, "1"), 1);
        let before = pods(&cluster.server);
        cluster.edit(ResourceKind::Group, "g", |group| group["spec"]["roles"] = workers(gang, "2"));
        cluster.run(|server| {
            let now = pods(server);
            let is_new = |name: &String| now.get(name).is_some_and(|pod| pod.0 != before[name].0);
            let new = before.keys().filter(|name| is_new(name)).count();
            let ending =
                server.all(ResourceKind::Pod).any(|pod| pod["metadata"].get("deletionTimestamp").is_some());
            assert!(!gang || new == 0 || !ending, "pods are created while others terminate");
        });
        assert_eq!(unsettled(&cluster.server), [""; 0]);
        assert_eq!(cluster.ended.len(), expected);
    }
}

#[test]
fn roles_of_a_gang_are_created_together() {
    let mut cluster = OperatorSimulation::new(server(), 1);
    let mut second = role("b", 1, "i:1");
    second["dependencies"] = json!(["a"]);
    let spec = json!({ "roles": [role("a", 1, "broken:1"), second] });
    let annotations = json!({ keys::GANG_SCHEDULING: "true" });
    cluster.create(
        ResourceKind::Group,
        json!({ "metadata": { "name": "g", "annotations": annotations }, "spec": spec }),
    );
    cluster.run(|_| {});
    assert_eq!(
        names(&cluster.server, ResourceKind::Pod),
        ["g-a-0", "g-b-0"],
        "the second does not wait for the first"
    );
    let instance = cluster.server.get(ResourceKind::Instance, "g-b-0").unwrap();
    assert_eq!(instance["metadata"]["annotations"][keys::INSTANCE_GANG_SCHEDULING], "true");
}

#[test]
fn kinds_of_gang_scheduling_are_mutually_exclusive() {
    let mut cluster = OperatorSimulation::new(server(), 1);
    let annotations = json!({ keys::GANG_SCHEDULING: "true", keys::INSTANCE_GANG_SCHEDULING: "true" });
    let spec = json!({ "roles": [role("a", 1, "i:1")] });
    cluster.create(
        ResourceKind::Group,
        json!({ "metadata": { "name": "g", "annotations": annotations }, "spec": spec }),
    );
    cluster.run(|_| {});
    let ready = condition(cluster.server.get(ResourceKind::Group, "g").unwrap(), "Ready").unwrap();
    assert_eq!(ready["reason"], "InvalidSpec");
    assert!(ready["message"].as_str().unwrap().contains("exclude each other"), "{ready}");
    assert!(pods(&cluster.server).is_empty());
}

/// Kueue's group and its size, of each pod.
fn kueue_groups(server: &SimulatedApiServer) -> Vec<(String, String)> {
    let of_pod = |pod: &Value| {
        let metadata = &pod["metadata"];
        assert_eq!(metadata["labels"][keys::KUEUE_QUEUE], "team-a");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (
            text(&metadata["labels"][keys::KUEUE_POD_GROUP]),
            text(&metadata["annotations"][keys::KUEUE_POD_GROUP_SIZE]),
        )
    };
    server.all(ResourceKind::Pod).map(of_pod).collect()
}

#[test]
fn pods_of_a_gang_in_a_queue_are_admitted_together() {
    let mut roles = workers(true, "1");
    roles.as_array_mut().unwrap().push(role("plain", 2, "i:1"));
    let mut cluster = OperatorSimulation::new(server(), 1);
    let metadata = json!({ "name": "g", "annotations": { keys::QUEUE: "team-a" } });
    cluster.create(ResourceKind::Group, json!({ "metadata": metadata, "spec": { "roles": roles } }));
    cluster.kills_per_mille = 100;
    cluster.run(|_| {});
    cluster.kills_per_mille = 0;
    let before = kueue_groups(&cluster.server);
    let alone = (String::new(), String::new());
    assert_eq!(before[..2], [alone.clone(), alone], "pods that are instances by themselves");
    let group = &before[2].0;
    assert!(group.starts_with("g-t-0-"), "{group}");
    assert_eq!(before[2..], [(); 3].map(|()| (group.clone(), "3".to_owned())));

    cluster.edit(ResourceKind::Group, "g", |group| {
        group["spec"]["roles"][0] = workers(true, "2")[0].clone();
    });
    cluster.run(|_| {});
    let after = kueue_groups(&cluster.server);
    assert_eq!(after[2..], [(); 3].map(|()| after[2].clone()), "all are recreated");
    assert_ne!(&after[2].0, group, "Kueue considers the previous group finished");

    // Another queue is for pods that are created later.
    let pods_before = pods(&cluster.server);
    cluster.edit(ResourceKind::Group, "g", |group| {
        group["metadata"]["annotations"] = json!({ keys::QUEUE: "team-b" });
    });
    cluster.run(|_| {});
    assert_eq!(pods(&cluster.server), pods_before);
    let instance = cluster.server.get(ResourceKind::Instance, "g-plain-0").unwrap();
    assert_eq!(instance["metadata"]["annotations"][keys::KUEUE_QUEUE], "team-b");
}

/// A cluster with Volcano, and a group `g` with a policy whose rule has this strategy for two of its roles.
fn policy_gang(roles: Value, strategy: Value, seed: u64) -> OperatorSimulation {
    let mut cluster = OperatorSimulation::new(server(), seed);
    cluster.settings = PlanSettings { gang_scheduler: GangScheduler::Volcano, ..PlanSettings::default() };
    let rule = json!({ "name": "p", "roles": ["prefill", "decode"], "strategy": strategy });
    let policy = json!({ "metadata": { "name": "g" }, "spec": { "policies": [rule] } });
    cluster.create(ResourceKind::Policy, policy);
    cluster.create(ResourceKind::Group, json!({ "metadata": { "name": "g" }, "spec": { "roles": roles } }));
    cluster
}

fn minimums(prefill: i32, decode: i32) -> Value {
    json!({ "gang": { "minReplicas": { "prefill": prefill, "decode": decode } } })
}

fn pairs_and_decodes() -> Value {
    let pairs = json!({ "name": "prefill", "replicas": 4,
        "leaderWorkerPattern": { "size": 2, "template": template("i:1") } });
    let mut router = role("router", 1, "i:1");
    router["dependencies"] = json!(["prefill", "decode"]);
    json!([pairs, role("decode", 6, "i:1"), router])
}

/// Instances of each role that its PodGroup requires, with the number of pods of an instance.
fn sub_groups(pod_group: &Value) -> Vec<(&str, i64, i64)> {
    let subs = pod_group["spec"]["subGroupPolicy"].as_array().map(Vec::as_slice).unwrap_or_default();
    subs.iter()
        .map(|sub| {
            let number = |name: &str| sub[name].as_i64().unwrap();
            (sub["name"].as_str().unwrap(), number("minSubGroups"), number("subGroupSize"))
        })
        .collect()
}

#[test]
fn a_policy_sets_the_minimum_of_each_role_of_a_gang() {
    let mut strategy = json!({ "scaling": { "maxSkew": 1, "progression": "OrderReady" } });
    strategy["scheduling"] = minimums(3, 2);
    let mut cluster = policy_gang(pairs_and_decodes(), strategy, 1);
    cluster.kills_per_mille = 20;
    let mut first_targets = None;
    cluster.run(|server| {
        let replicas = |name: &str| server.get(ResourceKind::Set, name)?["spec"]["replicas"].as_i64();
        first_targets = first_targets.or_else(|| Some((replicas("g-prefill")?, replicas("g-decode")?)));
    });
    cluster.kills_per_mille = 0;
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    assert_eq!(first_targets, Some((3, 2)), "less would never be scheduled, more grows in steps");
    let pod_group = cluster.server.get(ResourceKind::VolcanoPodGroup, "g").unwrap();
    assert_eq!(pod_group["spec"]["minMember"], 3 * 2 + 2);
    assert_eq!(sub_groups(pod_group), [("prefill", 3, 2), ("decode", 2, 1)]);
    let sub_group = &pod_group["spec"]["subGroupPolicy"][0];
    assert_eq!(sub_group["matchLabelKeys"], json!([keys::ROLE_INSTANCE_NAME]));
    for pod in cluster.server.all(ResourceKind::Pod) {
        let labels = &pod["metadata"]["labels"];
        assert_eq!(pod["spec"]["schedulerName"], "volcano");
        let member = &pod["metadata"]["annotations"][keys::VOLCANO_POD_GROUP];
        let is_router = labels[keys::ROLE_NAME] == "router";
        assert_eq!(*member, if is_router { Value::Null } else { "g".into() }, "{}", labels[keys::ROLE_NAME]);
    }
    let annotations =
        |name| cluster.server.get(ResourceKind::Set, name).unwrap()["metadata"]["annotations"].clone();
    assert_eq!(annotations("g-prefill")[keys::INSTANCE_GANG_SCHEDULING], "true");
    assert_eq!(annotations("g-router")[keys::INSTANCE_GANG_SCHEDULING], Value::Null);

    // Other minimums are for the scheduler only.
    let before = pods(&cluster.server);
    cluster.edit(ResourceKind::Policy, "g", |policy| {
        policy["spec"]["policies"][0]["strategy"]["scheduling"] = minimums(1, 6);
    });
    cluster.run(|_| {});
    let pod_group = cluster.server.get(ResourceKind::VolcanoPodGroup, "g").unwrap();
    assert_eq!(sub_groups(pod_group), [("prefill", 1, 2), ("decode", 6, 1)]);
    cluster.edit(ResourceKind::Policy, "g", |policy| {
        policy["spec"]["policies"][0]["strategy"]["scheduling"] = json!({ "gang": {} });
    });
    cluster.run(|_| {});
    let pod_group = cluster.server.get(ResourceKind::VolcanoPodGroup, "g").unwrap();
    assert_eq!((&pod_group["spec"]["minMember"], sub_groups(pod_group)), (&json!(4 * 2 + 6), vec![]));
    assert_eq!(pods(&cluster.server), before);

    cluster.delete(ResourceKind::Policy, "g");
    cluster.run(|_| {});
    assert!(cluster.server.get(ResourceKind::VolcanoPodGroup, "g").is_none());
    let group = cluster.server.get(ResourceKind::Group, "g").unwrap();
    assert_eq!(condition(group, "GangConfigured"), None);
}

#[test]
fn a_gang_that_cannot_be_formed_creates_nothing() {
    let mut cluster = policy_gang(pairs_and_decodes(), json!({ "scheduling": minimums(2, 7) }), 1);
    cluster.run(|_| {});
    let group = |cluster: &OperatorSimulation| cluster.server.get(ResourceKind::Group, "g").unwrap().clone();
    let is_refused = |cluster: &OperatorSimulation| {
        for kind in ["GangConfigured", "Ready"] {
            let condition = condition(&group(cluster), kind).unwrap().clone();
            assert_eq!(
                (&condition["status"], &condition["reason"]),
                (&json!("False"), &json!("IncompatibleGangConfig"))
            );
            let message = condition["message"].as_str().unwrap();
            assert!(message.contains("role `decode` is 7, but the role has 6 replicas"), "{message}");
        }
    };
    is_refused(&cluster);
    assert!(cluster.server.get(ResourceKind::VolcanoPodGroup, "g").is_none());
    assert!(names(&cluster.server, ResourceKind::Set).is_empty());

    // The policy is corrected, and wrong again after the group is up. Removed roles are still deleted.
    let set = |cluster: &mut OperatorSimulation, scheduling: Value| {
        cluster.edit(ResourceKind::Policy, "g", |policy| {
            policy["spec"]["policies"][0]["strategy"]["scheduling"] = scheduling;
        });
        cluster.run(|_| {});
    };
    set(&mut cluster, minimums(2, 6));
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    assert_eq!(condition(&group(&cluster), "GangConfigured").unwrap()["status"], "True");
    let before = cluster.server.get(ResourceKind::VolcanoPodGroup, "g").unwrap().clone();
    set(&mut cluster, minimums(2, 7));
    cluster.edit(ResourceKind::Group, "g", |group| {
        let roles = group["spec"]["roles"].as_array_mut().unwrap();
        roles.pop();
        roles[0]["replicas"] = 5.into();
    });
    cluster.run(|_| {});
    is_refused(&cluster);
    assert_eq!(*cluster.server.get(ResourceKind::VolcanoPodGroup, "g").unwrap(), before);
    assert_eq!(names(&cluster.server, ResourceKind::Set), ["g-decode", "g-prefill"]);
    assert_eq!(cluster.server.get(ResourceKind::Set, "g-prefill").unwrap()["spec"]["replicas"], 4);
    cluster.settings = PlanSettings::default();
    set(&mut cluster, minimums(2, 6));
    let message = condition(&group(&cluster), "Ready").unwrap()["message"].to_string();
    assert!(message.contains("needs Volcano 1.14"), "{message}");
}

#[test]
fn roles_of_a_gang_wait_only_for_roles_outside_of_it() {
    let mut roles = json!([
        role("prefill", 1, "i:1"),
        role("decode", 1, "i:1"),
        role("master", 1, "broken:1"),
        role("between", 1, "i:1")
    ]);
    // `decode` waits for `prefill` in vain if `between` does: no member has a node before all exist.
    roles[0]["dependencies"] = json!(["master"]);
    roles[1]["dependencies"] = json!(["between"]);
    roles[3]["dependencies"] = json!(["prefill"]);
    let mut cluster = policy_gang(roles, json!({ "scheduling": minimums(1, 1) }), 1);
    cluster.run(|_| {});
    assert_eq!(names(&cluster.server, ResourceKind::Set), ["g-decode", "g-master"]);
    cluster.edit(ResourceKind::Group, "g", |group| {
        group["spec"]["roles"][2]["standalonePattern"]["template"] = template("i:1");
    });
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
}
