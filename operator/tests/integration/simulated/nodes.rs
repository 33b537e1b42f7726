//! New pods return to the nodes of their predecessors, also after a failover.

use std::collections::{BTreeMap, BTreeSet};

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator_testkit::OperatorSimulation;
use rbg_api::keys;
use serde_json::{Value, json};

use super::{pods, role, template, unsettled, up};

fn sticky(pattern: &str, mode: &str) -> Value {
    let mut role = role("a", 3, "i:1");
    role["annotations"] = json!({ keys::INPLACE_SCHEDULING: mode, keys::ROLE_INSTANCE_PATTERN: pattern, keys::INPLACE_SCHEDULING_AVOID: "bad, worse" });
    role["rolloutStrategy"] = json!({ "type": "RollingUpdate", "rollingUpdate": { "type": "RecreatePod" } });
    json!([role])
}

fn nodes(server: &SimulatedApiServer) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    server
        .all(ResourceKind::Pod)
        .map(|pod| (text(&pod["metadata"]["name"]), text(&pod["spec"]["nodeName"])))
        .collect()
}

/// A group whose pods run on a node each, as observed by an operator.
fn spread(pattern: &str, mode: &str) -> SimulatedApiServer {
    let mut cluster = up(sticky(pattern, mode), 1);
    let all: Vec<String> = nodes(&cluster.server).into_keys().collect();
    for (index, pod) in all.iter().enumerate() {
        cluster.edit(ResourceKind::Pod, pod, |pod| pod["spec"]["nodeName"] = format!("n{index}").into());
    }
    cluster.run(|_| {});
    cluster.server
}

fn update(cluster: &mut OperatorSimulation) {
    cluster.edit(ResourceKind::Group, "g", |group| {
        group["spec"]["roles"][0]["standalonePattern"]["template"] = template("i:2");
    });
}

#[test]
fn new_pods_reuse_their_predecessors_nodes_after_any_kill() {
    let server = spread("Stateful", "Required");
    let before = nodes(&server);
    let mut undisturbed = OperatorSimulation::new(server.clone(), 1);
    update(&mut undisturbed);
    undisturbed.run(|_| {});
    for killed_after in 1..=undisturbed.writes {
        let mut cluster = OperatorSimulation::new(server.clone(), 1);
        cluster.kill_after_writes = Some(killed_after);
        update(&mut cluster);
        cluster.run(|_| {});
        assert_eq!(unsettled(&cluster.server), [""; 0], "killed after {killed_after}");
        assert!(
            pods(&cluster.server).values().all(|(.., image)| image == "i:2"),
            "killed after {killed_after}"
        );
        assert_eq!(nodes(&cluster.server), before, "killed after {killed_after}");
    }
}

#[test]
fn restored_role_returns_to_its_nodes_and_avoids_others() {
    let server = spread("Stateful", "Preferred");
    let before = nodes(&server);
    let mut cluster = OperatorSimulation::new(server, 1);
    for replicas in [0, 3] {
        cluster
            .edit(ResourceKind::Group, "g", |group| group["spec"]["roles"][0]["replicas"] = replicas.into());
        cluster.run(|_| {});
    }
    assert_eq!(nodes(&cluster.server), before);
    let pod = cluster.server.get(ResourceKind::Pod, "g-a-0").unwrap();
    let required = &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let avoided = required["nodeSelectorTerms"][0]["matchExpressions"].as_array().unwrap().iter();
    assert_eq!(avoided.map(|one| &one["key"]).collect::<Vec<_>>(), ["bad", "worse"]);
}

#[test]
fn unordered_pods_use_any_previous_node_of_the_component() {
    let server = spread("Stateless", "Preferred");
    let mut cluster = OperatorSimulation::new(server, 1);
    update(&mut cluster);
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    for pod in cluster.server.all(ResourceKind::Pod) {
        let preferred =
            &pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"];
        let hosts = preferred[0]["preference"]["matchExpressions"][0]["values"].as_array().unwrap();
        let hosts: BTreeSet<&str> = hosts.iter().filter_map(Value::as_str).collect();
        assert!(["n0", "n1", "n2"].iter().all(|node| hosts.contains(node)), "{hosts:?}");
    }
}
