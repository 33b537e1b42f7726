//! Rendering of pods: ports, addresses and nodes.

use std::collections::BTreeSet;

use moongate_render::{instance, pod, ports};
use rbg_api::v1alpha2::{RoleInstance, RoleInstanceSet};
use serde_json::{Value, json};

use super::{at, group, template, workload};

#[test]
fn components_get_each_others_ports_and_addresses() {
    let allocate = |name: &str, env: &str, scope: &str| {
        json!({ "allocations": [{ "name": name, "env": env, "scope": scope }] }).to_string()
    };
    let refer = json!({
        "portRefs": [
            { "env": "LEADER_PORT", "component": "leader", "portName": "grpc" },
            { "env": "WORKER_1_PORT", "component": "worker", "portName": "grpc", "index": 1 },
        ],
        "addressRefs": [{ "env": "LEADER_ADDR", "component": "leader", "index": 0 }],
    });
    let instance: RoleInstance = serde_json::from_value(json!({
        "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleInstance",
        "metadata": {
            "name": "g-r-0", "namespace": "ns", "uid": "u",
            "labels": { rbg_api::keys::ROLE_TYPE: "Components", rbg_api::keys::ROLE_INSTANCE_INDEX: "0" },
            "annotations": { "leader.grpc": "30001", "g-r-0-worker-0.grpc": "30002", "g-r-0-worker-1.grpc": "30003" },
        },
        "spec": { "components": [
            { "name": "leader", "serviceName": "s", "template": template("i"),
              "annotations": { rbg_api::keys::PORT_ALLOCATOR: allocate("grpc", "PORT", "RoleScoped") } },
            { "name": "worker", "size": 2, "serviceName": "s", "template": template("i"),
              "annotations": {
                  rbg_api::keys::PORT_ALLOCATOR: allocate("grpc", "PORT", "PodScoped"),
                  rbg_api::keys::COMPONENT_DISCOVERY: refer.to_string(),
              } },
        ] },
    }))
    .unwrap();
    assert_eq!(ports::role_scoped_keys(&instance.spec.components[0]).unwrap(), ["leader.grpc"]);
    assert_eq!(ports::pod_scoped_keys(&instance).unwrap(), ["g-r-0-worker-0.grpc", "g-r-0-worker-1.grpc"]);
    let pod =
        pod::pod(&instance, &instance.spec.components[1], 0, "h", &pod::NodePlacement::default()).unwrap();
    assert_eq!(pod.name(), "g-r-0-worker-0");
    let variables = &Value::Object(pod.0)["spec"]["containers"][0]["env"];
    let value = |name: &str| {
        let found = variables.as_array().unwrap().iter().find(|variable| variable["name"] == name);
        found.map(|variable| variable["value"].as_str().unwrap().to_owned())
    };
    assert_eq!(value("PORT").as_deref(), Some("30002"));
    assert_eq!(value("LEADER_PORT").as_deref(), Some("30001"));
    assert_eq!(value("WORKER_1_PORT").as_deref(), Some("30003"));
    assert_eq!(value("LEADER_ADDR").as_deref(), Some("g-r-0-leader-0.s.ns.svc.cluster.local"));
}

#[test]
fn allocated_ports_are_never_taken() {
    let mut taken = BTreeSet::new();
    for pod in 0..50 {
        let port =
            ports::allocate(30_000..30_050, |port| taken.contains(&port), &format!("pod-{pod}")).unwrap();
        assert!((30_000..30_050).contains(&port) && taken.insert(port));
    }
    assert_eq!(ports::allocate(30_000..30_050, |port| taken.contains(&port), "one more"), None);
    assert_eq!(ports::allocate(5..5, |_| false, "none"), None);
}

#[test]
fn pods_prefer_the_nodes_of_their_predecessors() {
    let object = group(
        json!({}),
        json!({ "roles": [{ "name": "r", "standalonePattern": { "template": template("i") } }] }),
    );
    let mut set = workload(&object).unwrap();
    set["metadata"]["uid"] = "s".into();
    let set: RoleInstanceSet = serde_json::from_value(set).unwrap();
    let manifest = instance::ordered(&set, 3, "g-r-h").unwrap();
    let instance: RoleInstance = serde_json::from_value(Value::Object(manifest.0)).unwrap();
    let placed = |placement: &pod::NodePlacement| {
        let pod = pod::pod(&instance, &instance.spec.components[0], 0, "h", placement).unwrap();
        Value::Object(pod.0)
    };
    let placement = |required| pod::NodePlacement {
        nodes: vec!["n1".into()],
        required,
        avoided_labels: vec!["bad".into()],
        domain: None,
    };
    let required = placed(&placement(true));
    let terms = at(
        &required,
        "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms",
    );
    assert_eq!(terms.as_array().unwrap().len(), 1);
    // Upstream's order.
    assert_eq!(at(terms, "/0/matchExpressions/0/values/0"), "n1");
    assert_eq!(at(terms, "/0/matchExpressions/1/key"), "bad");
    let preferred = placed(&placement(false));
    let weight = "/spec/affinity/nodeAffinity/preferredDuringSchedulingIgnoredDuringExecution/0/weight";
    assert_eq!(at(&preferred, weight), 100);
    assert_eq!(at(&required, "/metadata/labels/rbg.workloads.x-k8s.io~1role-instance-index"), "3");
    assert!(placed(&pod::NodePlacement::default())["spec"].get("affinity").is_none());
}
