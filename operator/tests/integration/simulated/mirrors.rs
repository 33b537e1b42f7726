//! Mirrors of pod templates, in groups that were written as v1alpha1.

use moongate_operator::ResourceKind;
use moongate_operator_testkit::OperatorSimulation;
use rbg_api::conversion::{ApiVersion, convert, without_mirrors};
use serde_json::{Value, json};

use super::{claims_settled, names, pods, server, template, unsettled};

/// A group in v1alpha2 that was written as v1alpha1, with mirrors.
fn mirrored(image: &str) -> Value {
    let stateless = json!({ "rbg.workloads.x-k8s.io/role-instance-pattern": "Stateless" });
    let set = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleInstanceSet" });
    let roles = json!([
        { "name": "a", "replicas": 2, "workload": set, "template": template("other:1") },
        { "name": "s", "replicas": 3, "workload": set, "annotations": stateless, "template": template(image) },
    ]);
    let older = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha1", "kind": "RoleBasedGroup",
        "metadata": { "name": "g" }, "spec": { "roles": roles } });
    convert(&older, ApiVersion::V1alpha2).unwrap()
}

fn up(group: Value, seed: u64) -> OperatorSimulation {
    let mut cluster = OperatorSimulation::new(server(), seed);
    cluster.create(ResourceKind::Group, group);
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    cluster
}

fn images(cluster: &OperatorSimulation) -> [Value; 2] {
    let role = &cluster.server.get(ResourceKind::Group, "g").unwrap()["spec"]["roles"][1];
    ["template", "standalonePattern/template"]
        .map(|path| role.pointer(&format!("/{path}/spec/containers/0/image")).cloned().unwrap_or_default())
}

/// Sets the images at the paths of v1alpha1 and v1alpha2.
fn edit(cluster: &mut OperatorSimulation, mirror: Option<&str>, pattern: Option<&str>) {
    cluster.edit(ResourceKind::Group, "g", |group| {
        let role = &mut group["spec"]["roles"][1];
        if let Some(image) = mirror {
            role["template"] = template(image);
        }
        if let Some(image) = pattern {
            role["standalonePattern"]["template"] = template(image);
        }
    });
}

/// The group never claims to be settled before its pods run the image.
fn run(cluster: &mut OperatorSimulation, image: &str) {
    cluster.run(|server| {
        let group = server.get(ResourceKind::Group, "g").unwrap();
        let is_updated = pods(server).values().all(|(.., now)| now == image || now == "other:1");
        assert!(is_updated || !claims_settled(group), "{}", group["status"]);
    });
    assert_eq!(unsettled(&cluster.server), [""; 0]);
}

#[test]
fn an_edit_at_either_path_restarts_the_pods_once() {
    for seed in 0..6 {
        let mut cluster = up(mirrored("i:1"), seed);
        let before = pods(&cluster.server);
        cluster.write_failure_percent = if seed < 3 { 0 } else { 15 };
        cluster.kills_per_mille = if seed < 3 { 0 } else { 10 };
        let edits =
            [(Some("i:2"), None, "i:2"), (None, Some("i:3"), "i:3"), (Some("i:4"), Some("i:5"), "i:5")];
        for (round, (mirror, pattern, image)) in edits.into_iter().enumerate() {
            edit(&mut cluster, mirror, pattern);
            run(&mut cluster, image);
            assert_eq!(images(&cluster), [image, image], "seed {seed}");
            for (name, (uid, restarts, now)) in pods(&cluster.server) {
                assert_eq!(uid, before[&name].0, "seed {seed}: {name}");
                let is_store = now == image;
                assert_eq!(restarts, if is_store { round as i64 + 1 } else { 0 }, "seed {seed}: {name}");
            }
        }
        assert!(cluster.ended.is_empty(), "seed {seed}: {:?}", cluster.ended);
        if seed < 3 {
            let writes = cluster.writes;
            cluster.edit(ResourceKind::Group, "g", |group| group["metadata"]["labels"] = json!({ "a": "b" }));
            cluster.run(|_| {});
            assert_eq!(cluster.writes, writes, "a folded group causes no writes");
        }
    }
}

#[test]
fn a_new_mirror_restarts_nothing() {
    let mut cluster = up(without_mirrors(&mirrored("i:1")), 1);
    let before = (pods(&cluster.server), names(&cluster.server, ResourceKind::Revision));
    cluster.edit(ResourceKind::Group, "g", |group| group["spec"] = mirrored("i:1")["spec"].clone());
    assert_eq!(images(&cluster), ["i:1", "i:1"]);
    let writes = cluster.writes;
    run(&mut cluster, "i:1");
    assert_eq!((pods(&cluster.server), names(&cluster.server, ResourceKind::Revision)), before);
    assert_eq!(cluster.writes - writes, 1, "the status at the new generation");
}
