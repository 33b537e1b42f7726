//! Allocated ports of pods.

use std::collections::BTreeMap;

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator_testkit::{OperatorSimulation, PORTS};
use rbg_api::keys;
use serde_json::{Value, json};

use super::{condition, pods, server, template, unsettled};

/// Two components: the engine has one port per pod and one shared port, and the router references a port of the first
/// engine.
fn port_request(replicas: i32, image: &str) -> Value {
    let engine = json!({ "allocations": [
        { "name": "http", "env": "HTTP", "annotationKey": "test/http" },
        { "name": "grpc", "env": "GRPC", "scope": "RoleScoped" },
    ] });
    let router = json!({ "references": [{ "env": "ENGINE", "from": "r.engine.http" }] });
    let with = |config: &Value| {
        let mut template = template(image);
        template["metadata"] = json!({ "annotations": { keys::PORT_ALLOCATOR: config.to_string() } });
        template
    };
    json!([{ "name": "r", "replicas": replicas, "customComponentsPattern": { "components": [
        { "name": "engine", "size": 2, "template": with(&engine) },
        { "name": "router", "size": 1, "template": with(&router) },
    ] } }])
}

fn started(replicas: i32, seed: u64) -> OperatorSimulation {
    let mut cluster = OperatorSimulation::new(server(), seed);
    let spec = json!({ "roles": port_request(replicas, "i:1") });
    cluster.create(ResourceKind::Group, json!({ "metadata": { "name": "g" }, "spec": spec }));
    cluster
}

/// Ports in a pod's environment, by variable name.
fn injected_ports(pod: &Value) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = pod["spec"]["containers"][0]["env"].as_array().into_iter().flatten();
    list.map(|one| (text(&one["name"]), text(&one["value"]))).collect()
}

/// Ports of each pod by its name; asserts that no two pods have the same one.
fn check(server: &SimulatedApiServer) -> BTreeMap<String, String> {
    let mut own = BTreeMap::new();
    for pod in server
        .all(ResourceKind::Pod)
        .filter(|pod| pod["metadata"]["labels"][keys::COMPONENT_NAME] == "engine")
    {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let injected = injected_ports(pod);
        let port = injected["HTTP"].clone();
        assert!(PORTS.contains(&port.parse().unwrap()), "{port}");
        assert_eq!(pod["metadata"]["annotations"]["test/http"], *port);
        let shared = &server.get(ResourceKind::Set, "g-r").unwrap()["metadata"]["annotations"]["engine.grpc"];
        assert_eq!(*shared, *injected["GRPC"]);
        assert_ne!(injected["GRPC"], port);
        own.insert(name.to_owned(), port);
    }
    let mut distinct: Vec<&String> = own.values().collect();
    distinct.sort();
    distinct.dedup();
    assert_eq!(distinct.len(), own.len(), "{own:?}");
    own
}

#[test]
fn ports_are_distinct_and_outlive_pods_and_operators() {
    let mut undisturbed = started(3, 1);
    undisturbed.run(|_| {});
    for killed_after in (1..=undisturbed.writes).step_by(4) {
        let mut cluster = started(3, 1);
        cluster.kill_after_writes = Some(killed_after);
        cluster.run(|server| drop(check(server)));
        assert_eq!(unsettled(&cluster.server), [""; 0], "killed after {killed_after}");
        let before = check(&cluster.server);
        assert_eq!(before.len(), 6);
        for pod in cluster.server.all(ResourceKind::Pod) {
            let labels = &pod["metadata"]["labels"];
            if labels[keys::COMPONENT_NAME] == "router" {
                let instance = labels[keys::ROLE_INSTANCE_NAME].as_str().unwrap();
                assert_eq!(injected_ports(pod)["ENGINE"], before[&format!("{instance}-engine-0")]);
            }
        }
        let first = pods(&cluster.server)["g-r-1-engine-1"].0.clone();
        cluster.edit(ResourceKind::Pod, "g-r-1-engine-1", |pod| pod["status"]["phase"] = "Failed".into());
        cluster.run(|server| drop(check(server)));
        assert_ne!(pods(&cluster.server)["g-r-1-engine-1"].0, first);
        assert_eq!(check(&cluster.server), before, "killed after {killed_after}");
    }
}

#[test]
fn instances_without_a_free_port_wait_and_report_it() {
    let mut cluster = started(6, 1);
    cluster.allow_invalid = true;
    cluster.run(|server| drop(check(server)));
    // One port is shared, and each instance needs two of its own: none is left for the sixth.
    assert_eq!(pods(&cluster.server).len(), 15);
    assert_eq!(unsettled(&cluster.server).len(), 1);
    cluster.edit(ResourceKind::Group, "g", |group| group["spec"]["roles"][0]["replicas"] = 5.into());
    cluster.run(|server| drop(check(server)));
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    assert!(condition(cluster.server.get(ResourceKind::Group, "g").unwrap(), "Ready").is_some());
}
