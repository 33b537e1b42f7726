//! Public manifests survive a round trip through the types and through conversion.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::path::{Path, PathBuf};

use rbg_api::conversion::{ApiVersion, convert};
use rbg_api::{v1alpha1, v1alpha2};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

fn manifests() -> Vec<(PathBuf, Value)> {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "yaml") {
                let text = std::fs::read_to_string(&path).unwrap();
                let objects: Vec<Option<Value>> = serde_saphyr::from_multiple(&text).unwrap();
                found.extend(objects.into_iter().flatten().map(|object| (path.clone(), object)));
            }
        }
    }
    found.retain(|(_, object)| {
        object["apiVersion"].as_str().is_some_and(|version| version.starts_with("workloads.x-k8s.io/"))
    });
    found
}

/// Differences after a round trip, except for defaults that are added.
fn lost(before: &Value, after: &Value, at: &str, found: &mut Vec<String>) {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            for (name, value) in before {
                match after.get(name) {
                    Some(after) => lost(value, after, &format!("{at}/{name}"), found),
                    // Defaults equal to absence are not written.
                    None if [Value::Null, 0.into(), false.into()].contains(value) => {}
                    None if value.as_object().is_some_and(serde_json::Map::is_empty) => {}
                    None if value.as_array().is_some_and(Vec::is_empty) => {}
                    None => found.push(format!("{at}/{name}")),
                }
            }
        }
        (Value::Array(before), Value::Array(after)) if before.len() == after.len() => {
            before.iter().zip(after).for_each(|(before, after)| lost(before, after, at, found));
        }
        (before, after) if before == after => {}
        _ => found.push(at.to_owned()),
    }
}

fn check<T: DeserializeOwned + Serialize>(path: &Path, object: &Value) {
    let typed: T =
        serde_json::from_value(object.clone()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut found = Vec::new();
    let written = serde_json::to_value(&typed).unwrap();
    lost(&object["spec"], &written["spec"], "spec", &mut found);
    lost(&object["status"], &written["status"], "status", &mut found);
    assert!(found.is_empty(), "{} loses {found:?}", path.display());
}

#[test]
fn every_manifest_survives_a_round_trip() {
    let manifests = manifests();
    assert!(manifests.len() > 80, "only {} manifests", manifests.len());
    for (path, object) in &manifests {
        let version = object["apiVersion"].as_str().and_then(ApiVersion::parse);
        let kind = object["kind"].as_str().unwrap();
        match (version.unwrap(), kind) {
            (ApiVersion::V1alpha1, "RoleBasedGroup") => check::<v1alpha1::RoleBasedGroup>(path, object),
            (ApiVersion::V1alpha1, "RoleBasedGroupSet") => check::<v1alpha1::RoleBasedGroupSet>(path, object),
            (ApiVersion::V1alpha1, "InstanceSet") => check::<v1alpha1::InstanceSet>(path, object),
            (ApiVersion::V1alpha1, "Instance") => check::<v1alpha1::Instance>(path, object),
            (ApiVersion::V1alpha1, "ClusterEngineRuntimeProfile") => {
                check::<v1alpha1::ClusterEngineRuntimeProfile>(path, object);
            }
            (ApiVersion::V1alpha2, "RoleBasedGroup") => check::<v1alpha2::RoleBasedGroup>(path, object),
            (ApiVersion::V1alpha2, "RoleBasedGroupSet") => check::<v1alpha2::RoleBasedGroupSet>(path, object),
            (ApiVersion::V1alpha2, "RoleInstanceSet") => check::<v1alpha2::RoleInstanceSet>(path, object),
            (ApiVersion::V1alpha2, "RoleInstance") => check::<v1alpha2::RoleInstance>(path, object),
            (ApiVersion::V1alpha2, "CoordinatedPolicy") => check::<v1alpha2::CoordinatedPolicy>(path, object),
            (ApiVersion::V1alpha2, "ClusterEngineRuntimeProfile") => {
                check::<v1alpha2::ClusterEngineRuntimeProfile>(path, object);
            }
            (ApiVersion::V1alpha2, "RoleBasedGroupScalingAdapter") => {
                check::<v1alpha2::RoleBasedGroupScalingAdapter>(path, object);
            }
            (ApiVersion::V1alpha2, "RoleBasedGroupWarmup") => {
                check::<v1alpha2::RoleBasedGroupWarmup>(path, object);
            }
            other => panic!("{}: {other:?}", path.display()),
        }
    }
}

#[test]
fn every_manifest_survives_conversion_and_back() {
    let kinds = ["RoleBasedGroup", "RoleBasedGroupSet"];
    let mut converted = 0;
    for (path, object) in
        manifests().iter().filter(|(_, object)| kinds.iter().any(|kind| object["kind"] == *kind))
    {
        let from = object["apiVersion"].as_str().and_then(ApiVersion::parse).unwrap();
        let to = if from == ApiVersion::V1alpha1 { ApiVersion::V1alpha2 } else { ApiVersion::V1alpha1 };
        let there = convert(object, to).unwrap();
        match (to, object["kind"].as_str().unwrap()) {
            (ApiVersion::V1alpha1, "RoleBasedGroup") => check::<v1alpha1::RoleBasedGroup>(path, &there),
            (ApiVersion::V1alpha1, _) => check::<v1alpha1::RoleBasedGroupSet>(path, &there),
            (ApiVersion::V1alpha2, "RoleBasedGroup") => check::<v1alpha2::RoleBasedGroup>(path, &there),
            (ApiVersion::V1alpha2, _) => check::<v1alpha2::RoleBasedGroupSet>(path, &there),
        }
        assert_eq!(&convert(&there, from).unwrap(), object, "{}", path.display());
        converted += 1;
    }
    assert!(converted > 40, "only {converted} manifests");
}
