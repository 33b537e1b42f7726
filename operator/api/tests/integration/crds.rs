//! The CRD files in the repository, and properties that every CRD must have.

use std::path::Path;

/// Maximum size that `kubectl apply` can store in its annotation.
const APPLY_LIMIT: usize = 256 * 1024;

#[test]
fn crd_files_match_the_types() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crds");
    let crds = rbg_api::crds::all();
    for crd in &crds {
        let path = folder.join(format!("{}.yaml", crd.spec.names.plural));
        let written =
            std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let fresh = serde_saphyr::to_string(crd).unwrap();
        assert!(
            written == fresh,
            "{} is out of date: run `cargo run -p rbg-api --features objects --example crds`",
            path.display()
        );
        assert!(written.len() < APPLY_LIMIT, "{} is too large for kubectl apply", path.display());
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), crds.len(), "a file of a removed kind");
}

#[test]
fn one_version_is_stored_and_the_older_is_deprecated() {
    for crd in rbg_api::crds::all() {
        let name = crd.spec.names.kind;
        let versions = crd.spec.versions;
        assert_eq!(versions.iter().filter(|version| version.storage).count(), 1, "{name}");
        assert!(versions.iter().all(|version| version.served), "{name}");
        for version in versions {
            let subresources = version.subresources.unwrap();
            assert!(subresources.status.is_some(), "{name}");
            assert_eq!(
                version.name == "v1alpha1",
                version.deprecated == Some(true),
                "{name} {}",
                version.name
            );
        }
    }
}
