//! Dependencies between components of one instance.

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator_testkit::OperatorSimulation;
use serde_json::{Value, json};

use super::{is, names, pods, server, template, unsettled};

fn component(name: &str, size: i32, depends_on: &Value) -> Value {
    json!({ "name": name, "size": size, "template": template("i:1"),
        "annotations": { "rolebasedgroup.workloads.x-k8s.io/component-depends-on": depends_on.to_string() } })
}

fn create(components: Value, observe: impl FnMut(&SimulatedApiServer)) -> OperatorSimulation {
    let mut cluster = OperatorSimulation::new(server(), 5);
    let role = json!({ "name": "r", "replicas": 1, "customComponentsPattern": { "components": components } });
    cluster.create(ResourceKind::Group, json!({ "metadata": { "name": "g" }, "spec": { "roles": [role] } }));
    cluster.run(observe);
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    cluster
}

#[test]
fn components_start_in_order_and_end_in_reverse() {
    let engine = component("engine", 2, &json!({}));
    let router = component("router", 2, &json!({ "startAfter": ["engine"] }));
    let mut cluster = create(json!([router, engine]), |server| {
        let up = server.all(ResourceKind::Pod).filter(|pod| is(pod, "ContainersReady", "True"));
        let engines = up.filter(|pod| pod["metadata"]["name"].as_str().unwrap().contains("engine")).count();
        let routers = names(server, ResourceKind::Pod).iter().filter(|name| name.contains("router")).count();
        assert!(routers == 0 || engines == 2, "{routers} routers with {engines} engines");
    });
    cluster.edit(ResourceKind::Instance, "g-r-0", |instance| {
        for component in instance["spec"]["components"].as_array_mut().unwrap() {
            component["size"] = 1.into();
        }
    });
    cluster.run(|server| {
        let names = names(server, ResourceKind::Pod);
        let has = |name: &str| names.iter().any(|one| one == name);
        assert!(has("g-r-0-engine-1") || !has("g-r-0-router-1"), "{names:?}");
    });
    assert_eq!(names(&cluster.server, ResourceKind::Pod), ["g-r-0-engine-0", "g-r-0-router-0"]);
}

#[test]
fn cyclic_dependencies_of_components_are_ignored() {
    let components =
        [("a", "b"), ("b", "a")].map(|(name, other)| component(name, 1, &json!({ "startAfter": [other] })));
    let cluster = create(components.into(), |_| {});
    assert_eq!(pods(&cluster.server).len(), 2);
}
