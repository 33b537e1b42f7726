//! The operator's plans on an in-memory cluster, with reproducible random orders of events.

mod components;
mod examples;
mod fault_recovery;
mod gangs;
mod hooks;
mod kills;
mod mirrors;
mod nodes;
mod ports;
mod pre_pull;
mod restarts;
mod scale_in;
mod status_truth;
mod stuck_updates;
mod takeover;
mod topology;
mod upstream;
mod warmup;
mod writes;

use std::collections::BTreeMap;
use std::path::Path;

use k8s_openapi::jiff::Timestamp;
use moongate_operator::ResourceKind;
use moongate_operator::forecast::{ContainerOutcome, SimulatedApiServer};
use moongate_operator_testkit::OperatorSimulation;
use serde_json::{Value, json};

/// A cluster without objects, in which some container images determine the containers' outcome.
fn server() -> SimulatedApiServer {
    let mut server = SimulatedApiServer::new(Timestamp::from_second(1_790_000_000).unwrap());
    server.container_outcome = |image| match image.split(':').next().unwrap() {
        "broken" => ContainerOutcome::Exits("Error", 1),
        "shell-less" => ContainerOutcome::Exits("StartError", 128),
        "stuck" => ContainerOutcome::NotStarted("CreateContainerError"),
        "absent" => ContainerOutcome::NotStarted("ImagePullBackOff"),
        _ => ContainerOutcome::Runs,
    };
    server
}

/// A cluster with a group that is up.
fn up(roles: Value, seed: u64) -> OperatorSimulation {
    let mut simulation = OperatorSimulation::new(server(), seed);
    simulation
        .create(ResourceKind::Group, json!({ "metadata": { "name": "g" }, "spec": { "roles": roles } }));
    simulation.run(|_| {});
    assert_eq!(unsettled(&simulation.server), [""; 0]);
    simulation
}

fn role(name: &str, replicas: i32, image: &str) -> Value {
    json!({ "name": name, "replicas": replicas, "standalonePattern": { "template": template(image) } })
}

fn template(image: &str) -> Value {
    json!({ "spec": { "containers": [{ "name": "c", "image": image }] } })
}

fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a Value> {
    object["status"]["conditions"].as_array()?.iter().find(|one| one["type"] == kind)
}

fn is(object: &Value, kind: &str, status: &str) -> bool {
    condition(object, kind).is_some_and(|one| one["status"] == status)
}

/// Whether the group reports at its present generation that it is ready and settled.
fn claims_settled(group: &Value) -> bool {
    group["status"]["observedGeneration"] == group["metadata"]["generation"]
        && is(group, "Ready", "True")
        && is(group, "Progressing", "False")
        && is(group, "RollingUpdateInProgress", "False")
}

/// Groups that do not report it, with their conditions.
fn unsettled(server: &SimulatedApiServer) -> Vec<String> {
    let unsettled = server.all(ResourceKind::Group).filter(|group| !claims_settled(group));
    unsettled.map(|group| format!("{}: {}", group["metadata"]["name"], group["status"])).collect()
}

/// Pods by name: UID, restart count and image of the first container.
fn pods(server: &SimulatedApiServer) -> BTreeMap<String, (String, i64, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let one = |pod: &Value| {
        let status = &pod["status"]["containerStatuses"][0];
        let restarts = status["restartCount"].as_i64().unwrap_or(0);
        (text(&pod["metadata"]["name"]), (text(&pod["metadata"]["uid"]), restarts, text(&status["image"])))
    };
    server.all(ResourceKind::Pod).map(one).collect()
}

fn names(server: &SimulatedApiServer, kind: ResourceKind) -> Vec<String> {
    server.all(kind).map(|object| object["metadata"]["name"].as_str().unwrap().to_owned()).collect()
}

/// All YAML documents of a file.
fn documents(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let documents: Vec<Option<Value>> = serde_saphyr::from_multiple(&text).unwrap();
    documents.into_iter().flatten().collect()
}
