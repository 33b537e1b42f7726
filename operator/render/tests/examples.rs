//! Every group that people have manifests of yields its objects.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use moongate_render::{GangScheduler, Group, Kept, Profiles, RoleTarget};
use rbg_api::conversion::{Version, convert};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::Value;

fn manifests() -> Vec<(PathBuf, Vec<Value>)> {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/examples")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "yaml") {
                let text = std::fs::read_to_string(&path).unwrap();
                let objects: Vec<Option<Value>> = serde_saphyr::from_multiple(&text).unwrap();
                found.push((path, objects.into_iter().flatten().collect()));
            }
        }
    }
    found
}

#[test]
fn every_group_yields_its_objects() {
    let mut groups = 0;
    for (path, objects) in manifests() {
        let profiles = objects.iter().filter(|object| object["kind"] == "ClusterEngineRuntimeProfile");
        let profiles: Profiles = profiles
            .map(|profile| {
                let name = profile["metadata"]["name"].as_str().unwrap().to_owned();
                (name, serde_json::from_value(profile["spec"].clone()).unwrap())
            })
            .collect();
        for object in objects.iter().filter(|object| object["kind"] == "RoleBasedGroup") {
            check(&path, object, &profiles);
            groups += 1;
        }
    }
    assert!(groups > 40, "only {groups} groups");
}

fn check(path: &Path, object: &Value, profiles: &Profiles) {
    let mut object = convert(object, Version::V1alpha2).unwrap();
    object["metadata"]["namespace"] = "default".into();
    let object: RoleBasedGroup = serde_json::from_value(object).unwrap();
    // Some manifests name a profile that another file has.
    let named = object.spec.roles.iter().flat_map(|role| &role.engine_runtimes);
    let mut profiles = profiles.clone();
    named.for_each(|runtime| {
        profiles.entry(runtime.profile_name.clone()).or_default();
    });
    let group = Group::new(&object, &profiles, GangScheduler::default()).unwrap();
    let mut names = BTreeSet::new();
    for spec in &object.spec.roles {
        let role = group.role(spec).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let target = RoleTarget::of(spec);
        let workload = role.workload(&target, &Kept::default());
        let workload = workload.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(
            names.insert(workload.name().to_owned()),
            "{}: two are called {}",
            path.display(),
            workload.name()
        );
        // The same spec yields the same object and revision.
        assert_eq!(workload, role.workload(&target, &Kept::default()).unwrap());
        drop(role.service(&target, "uid"));
    }
    group.config_map(&BTreeMap::new()).unwrap();
    group.coordinated_policy().unwrap();
}
