//! Every RoleBasedGroup among upstream's examples converges, and those that were recorded have the recorded objects.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator_testkit::OperatorSimulation;
use rbg_api::conversion::{ApiVersion, convert};
use serde_json::Value;

use super::{documents, names, unsettled};

const TESTDATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata");

/// Groups of the examples, as v1alpha2.
fn groups() -> Vec<(PathBuf, Value)> {
    let mut folders = vec![Path::new(TESTDATA).join("examples")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let groups =
                documents(&path).into_iter().filter(|object| object["kind"] == ResourceKind::Group.name());
            found.extend(groups.map(|group| (path.clone(), convert(&group, ApiVersion::V1alpha2).unwrap())));
        }
    }
    found
}

fn applied(group: Value) -> SimulatedApiServer {
    let mut cluster = OperatorSimulation::new(super::server(), 1);
    cluster.create(ResourceKind::Group, group);
    cluster.run(|_| {});
    cluster.server
}

#[test]
fn every_group_converges() {
    let groups = groups();
    assert!(groups.len() > 40, "only {}", groups.len());
    let mut failed = Vec::new();
    for (path, group) in groups {
        // The LeaderWorkerSet controller is not simulated, and profiles are not part of the simulation.
        let text = group["spec"].to_string();
        if text.contains("/LeaderWorkerSet\"") || text.contains("\"engineRuntimes\"") {
            continue;
        }
        let server = applied(group);
        failed.extend(unsettled(&server).into_iter().map(|why| format!("{}: {why}", path.display())));
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn the_recorded_groups_get_the_recorded_objects() {
    for group in ["v1alpha2-pd-mooncake", "v1alpha2-stateless-lw"] {
        let recorded = |kind: ResourceKind| {
            let path = Path::new(TESTDATA)
                .join("recorded")
                .join(group)
                .join(format!("{}.yaml", kind.resource().plural));
            documents(&path)
        };
        let mut object = recorded(ResourceKind::Group).remove(0);
        object.as_object_mut().unwrap().remove("status");
        let server = applied(object);
        for kind in [
            ResourceKind::ConfigMap,
            ResourceKind::Service,
            ResourceKind::Set,
            ResourceKind::Instance,
            ResourceKind::Pod,
        ] {
            let recorded = recorded(kind)
                .into_iter()
                .map(|object| object["metadata"]["name"].as_str().unwrap().to_owned());
            assert_eq!(families(names(&server, kind)), families(recorded.collect()), "{group}: {kind:?}");
        }
    }
}

/// Number of objects by name, with random suffixes removed.
fn families(names: Vec<String>) -> BTreeMap<String, usize> {
    let mut families = BTreeMap::new();
    for name in names {
        let random = name
            .rsplit_once('-')
            .filter(|(_, end)| end.len() == 5 && !end.chars().all(|letter| "aeiou".contains(letter)));
        let family = match random {
            Some((front, end)) if front.ends_with("store") && end.parse::<u32>().is_err() => front.to_owned(),
            _ => name,
        };
        *families.entry(family).or_default() += 1;
    }
    families
}
