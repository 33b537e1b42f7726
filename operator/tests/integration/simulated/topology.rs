//! Topology levels are applied to new pods and restart none. Locations of pods are published.

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator_testkit::OperatorSimulation;
use rbg_api::keys;
use serde_json::{Value, json};

use super::{condition, names, pods, role, template, unsettled, up};

const STATEFUL_SET: &str = "apps/v1/StatefulSet";

fn set_levels(cluster: &mut OperatorSimulation, levels: Option<&str>) {
    let annotations = levels.map_or(json!({}), |levels| json!({ keys::TOPOLOGY_LADDER: levels }));
    cluster.edit(ResourceKind::Group, "g", |group| group["metadata"]["annotations"] = annotations);
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
}

/// Deletes a pod, so that it is recreated.
fn recreate(cluster: &mut OperatorSimulation, pod: &str) {
    cluster.edit(ResourceKind::Pod, pod, |pod| {
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    });
    cluster.run(|_| {});
}

/// Topology key of the strongest affinity term of a pod or template.
fn nearest(object: &Value) -> &Value {
    let preferred = "preferredDuringSchedulingIgnoredDuringExecution";
    &object["spec"]["affinity"]["podAffinity"][preferred][0]["podAffinityTerm"]["topologyKey"]
}

fn pod<'a>(server: &'a SimulatedApiServer, name: &str) -> &'a Value {
    server.get(ResourceKind::Pod, name).unwrap()
}

#[test]
fn changed_topology_levels_apply_to_new_pods() {
    let mut stateful = role("s", 1, "i:1");
    stateful["annotations"] = json!({ keys::ROLE_WORKLOAD_TYPE: STATEFUL_SET });
    let roles = json!([role("prefill", 2, "i:1"), role("decode", 1, "i:1"), stateful]);
    let mut cluster = up(roles, 1);
    let before = pods(&cluster.server);
    let revisions = names(&cluster.server, ResourceKind::Revision);
    let set = cluster.server.get(ResourceKind::StatefulSet, "g-s").unwrap().clone();

    set_levels(&mut cluster, Some("node,rack=example.com/rack"));
    assert_eq!(pods(&cluster.server), before, "no pod is touched");
    assert_eq!(names(&cluster.server, ResourceKind::Revision), revisions);
    assert_eq!(cluster.server.get(ResourceKind::StatefulSet, "g-s").unwrap()["spec"], set["spec"]);
    recreate(&mut cluster, "g-prefill-1");
    assert_eq!(nearest(pod(&cluster.server, "g-prefill-0")), &Value::Null);
    assert_eq!(nearest(pod(&cluster.server, "g-prefill-1")), "kubernetes.io/hostname");
    let old = pods(&cluster.server);

    // Images still change in place, and a role with an external workload gets the levels with its next revision.
    cluster.edit(ResourceKind::Group, "g", |group| {
        for index in [0, 2] {
            group["spec"]["roles"][index]["standalonePattern"]["template"] = template("i:2");
        }
    });
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    for (name, (uid, restarts, _)) in pods(&cluster.server) {
        assert_eq!((&uid, restarts), (&old[&name].0, i64::from(name.starts_with("g-prefill"))), "{name}");
    }
    let template = |server: &SimulatedApiServer| {
        server.get(ResourceKind::StatefulSet, "g-s").unwrap()["spec"]["template"].clone()
    };
    assert_eq!(nearest(&template(&cluster.server)), "example.com/rack", "the role has no related role");

    set_levels(&mut cluster, None);
    recreate(&mut cluster, "g-prefill-1");
    assert_eq!(nearest(pod(&cluster.server, "g-prefill-1")), &Value::Null);
    assert_eq!(nearest(&template(&cluster.server)), "example.com/rack", "its pods are unchanged");
    let writes = cluster.writes;
    set_levels(&mut cluster, None);
    assert_eq!(cluster.writes, writes, "there is nothing left to do");
}

#[test]
fn levels_of_nodes_reach_groups_when_labels_appear() {
    let mut cluster = up(json!([role("prefill", 2, "i:1"), role("decode", 1, "i:1")]), 1);
    let levels = |cluster: &OperatorSimulation| {
        let group = cluster.server.get(ResourceKind::Group, "g").unwrap();
        condition(group, "TopologyLevels").map(|condition| condition["message"].as_str().unwrap().to_owned())
    };
    let node = |name: &str, labels: Value| json!({ "metadata": { "name": name, "labels": labels } });
    let before = pods(&cluster.server);
    assert_eq!(levels(&cluster), None);
    cluster.create(ResourceKind::Node, node("a", json!({ "kubernetes.io/hostname": "a" })));
    cluster.run(|_| {});
    assert_eq!(levels(&cluster), None, "every node has a name");
    cluster.create(ResourceKind::Node, node("b", json!({ "nvidia.com/gpu.clique": "u.0" })));
    cluster.run(|_| {});
    let both = "node=kubernetes.io/hostname, nvlink-domain=nvidia.com/gpu.clique";
    assert_eq!(levels(&cluster).unwrap(), both);
    assert_eq!(pods(&cluster.server), before, "no pod is touched");
    recreate(&mut cluster, "g-prefill-1");
    assert_eq!(nearest(pod(&cluster.server, "g-prefill-1")), "kubernetes.io/hostname");

    // The levels stay without nodes, also for the next operator, which never saw them.
    for name in ["a", "b"] {
        cluster.delete(ResourceKind::Node, name);
    }
    cluster.kills_per_mille = 200;
    cluster.run(|_| {});
    cluster.kills_per_mille = 0;
    assert_eq!(levels(&cluster).unwrap(), both);
    set_levels(&mut cluster, Some("none"));
    assert_eq!(levels(&cluster), None);
    recreate(&mut cluster, "g-prefill-1");
    assert_eq!(nearest(pod(&cluster.server, "g-prefill-1")), &Value::Null);
}

#[test]
fn locations_are_published_in_the_file_and_on_pods() {
    let mut users = role("decode", 1, "i:1");
    users["standalonePattern"]["template"]["metadata"] = json!({ "annotations": { keys::RACK: "users" } });
    let mut cluster = up(json!([role("prefill", 2, "i:1"), users]), 1);
    let file = |server: &SimulatedApiServer| -> Value {
        let text = server.get(ResourceKind::ConfigMap, "g").unwrap()["data"]["config.yaml"].as_str().unwrap();
        serde_saphyr::from_str(text).unwrap()
    };
    let plain = file(&cluster.server);
    let labels = json!({ "example.com/rack": "r7", "topology.kubernetes.io/zone": "z1", "other": "x" });
    cluster.create(ResourceKind::Node, json!({ "metadata": { "name": "node", "labels": labels } }));
    set_levels(&mut cluster, Some("node,rack=example.com/rack,zone"));
    let place = json!({ "node": "node", "rack": "r7", "zone": "z1" });
    let published = file(&cluster.server);
    for (role, index) in [("prefill", 0), ("prefill", 1), ("decode", 0)] {
        assert_eq!(published["roles"][role]["instances"][index]["place"], place);
    }
    let annotation =
        |name: &str, key: &str| pod(&cluster.server, name)["metadata"]["annotations"][key].clone();
    assert_eq!(annotation("g-prefill-1", keys::ZONE), "z1");
    assert_eq!(annotation("g-prefill-1", keys::RACK), "r7");
    assert_eq!(annotation("g-decode-0", keys::RACK), "users");
    set_levels(&mut cluster, Some("none"));
    assert_eq!(file(&cluster.server), plain);
}
