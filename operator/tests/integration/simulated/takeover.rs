//! Takeover of objects that upstream's controller left: no pod is restarted or replaced, and updates continue.

use std::path::Path;

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator_testkit::OperatorSimulation;
use serde_json::Value;

use super::{documents, names, pods, unsettled};

const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/recorded");

fn left_behind(group: &str) -> SimulatedApiServer {
    let mut server = super::server();
    // The recorded files do not distinguish the kinds of pods.
    for kind in ResourceKind::ALL.into_iter().filter(|kind| ResourceKind::parse(kind.name()) == Some(*kind)) {
        let path = Path::new(RECORDED).join(group).join(format!("{}.yaml", kind.resource().plural));
        if path.exists() {
            documents(&path).into_iter().for_each(|object| server.restore(kind, object));
        }
    }
    server
}

#[test]
fn upstreams_objects_keep_running() {
    for group in ["v1alpha1-ris", "v1alpha2-pd-mooncake", "v1alpha2-stateless-lw"] {
        let server = left_behind(group);
        let before = pods(&server);
        assert_eq!(before.len(), 7);
        let specs = |server: &SimulatedApiServer| -> Vec<Value> {
            server.all(ResourceKind::Pod).map(|pod| pod["spec"].clone()).collect()
        };
        let specs_before = specs(&server);
        let instances = names(&server, ResourceKind::Instance);
        let mut cluster = OperatorSimulation::new(server, 1);
        cluster.run(|_| {});
        assert_eq!(unsettled(&cluster.server), [""; 0], "{group}");
        assert_eq!(pods(&cluster.server), before, "{group}");
        assert_eq!(specs(&cluster.server), specs_before, "{group}");
        assert_eq!(names(&cluster.server, ResourceKind::Instance), instances, "{group}");
        assert!(cluster.ended.is_empty(), "{group}: {:?}", cluster.ended);
    }
}

#[test]
fn in_place_update_after_takeover_restarts_each_target_once() {
    for (group, name, role) in [
        ("v1alpha2-pd-mooncake", "sglang-pd-with-mooncake", "mooncake-store"),
        ("v1alpha2-stateless-lw", "sl", "store"),
    ] {
        let mut cluster = OperatorSimulation::new(left_behind(group), 2);
        cluster.run(|_| {});
        let before = pods(&cluster.server);
        cluster.edit(ResourceKind::Group, name, |group| {
            let roles = group["spec"]["roles"].as_array_mut().unwrap();
            let pattern = &mut roles.iter_mut().find(|one| one["name"] == role).unwrap()["standalonePattern"];
            let template = match pattern.get("template") {
                Some(_) => &mut pattern["template"],
                None => &mut pattern["templateRef"]["patch"],
            };
            template["spec"]["containers"][0]["image"] = "new:2".into();
        });
        cluster.run(|_| {});
        assert_eq!(unsettled(&cluster.server), [""; 0], "{group}");
        for (pod, (uid, restarts, image)) in pods(&cluster.server) {
            let expected = if pod.contains("-store-") {
                (1, "new:2")
            } else {
                (before[&pod].1, before[&pod].2.as_str())
            };
            assert_eq!((&uid, (restarts, image.as_str())), (&before[&pod].0, expected), "{group}: {pod}");
        }
    }
}
