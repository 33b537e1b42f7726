//! Example manifests and the groups in them.

use std::path::{Path, PathBuf};

use moongate_render::RuntimeProfiles;
use rbg_api::conversion::{ApiVersion, convert};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::Value;

/// A stored group of a manifest, with the profiles that it references.
pub(crate) struct ManifestExample {
    pub(crate) path: PathBuf,
    pub(crate) group: RoleBasedGroup,
    pub(crate) profiles: RuntimeProfiles,
}

/// Every group of every example file.
pub(crate) fn groups() -> Vec<ManifestExample> {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/examples")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let text = std::fs::read_to_string(&path).unwrap();
                let objects: Vec<Option<Value>> = serde_saphyr::from_multiple(&text).unwrap();
                groups_of(&path, &objects.into_iter().flatten().collect::<Vec<_>>(), &mut found);
            }
        }
    }
    found
}

fn groups_of(path: &Path, objects: &[Value], found: &mut Vec<ManifestExample>) {
    let profiles = objects.iter().filter(|object| object["kind"] == "ClusterEngineRuntimeProfile");
    let profiles: RuntimeProfiles = profiles
        .map(|profile| {
            let name = profile["metadata"]["name"].as_str().unwrap().to_owned();
            (name, serde_json::from_value(profile["spec"].clone()).unwrap())
        })
        .collect();
    for object in objects.iter().filter(|object| object["kind"] == "RoleBasedGroup") {
        let mut object = convert(object, ApiVersion::V1alpha2).unwrap();
        object["metadata"]["namespace"] = "default".into();
        object["metadata"]["uid"] = "0a0a0a0a-0000-4000-8000-000000000000".into();
        let group: RoleBasedGroup = serde_json::from_value(object).unwrap();
        // Some manifests reference a profile in another file.
        let mut profiles = profiles.clone();
        for runtime in group.spec.roles.iter().flat_map(|role| &role.engine_runtimes) {
            profiles.entry(runtime.profile_name.clone()).or_default();
        }
        found.push(ManifestExample { path: path.to_owned(), group, profiles });
    }
}
