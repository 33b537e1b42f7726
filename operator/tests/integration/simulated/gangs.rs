//! Gangs: pods that are created and recreated together.

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
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
