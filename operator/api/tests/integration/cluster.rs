//! The discovery file in both forms, as recorded from a live operator and as documented.
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

use rbg_api::{DiscoveredGroup, DiscoveryFile, DiscoveryFileError};

fn read(text: &str) -> Result<DiscoveredGroup, DiscoveryFileError> {
    serde_saphyr::from_str::<DiscoveryFile>(text).expect("valid YAML").resolve()
}

/// Recorded from RBG at `993491f`: ConfigMap `sglang-pd-with-mooncake`.
const RECORDED: &str = "group:\n  name: sglang-pd-with-mooncake\n  roles:\n  - mooncake-master\n  - mooncake-store\n  - router\n  - prefill\n  - decode\n  size: 5\nroles:\n  decode:\n    instances:\n    - address: sglang-pd-with-mooncake-decode-0.s-sglang-pd-with-mooncake-decode\n    size: 1\n  mooncake-master:\n    instances:\n    - address: sglang-pd-with-mooncake-mooncake-master-0.s-sglang-pd-with-mooncake-mooncake-master\n    size: 1\n  mooncake-store:\n    instances:\n    - address: sglang-pd-with-mooncake-mooncake-store-0.s-sglang-pd-with-mooncake-mooncake-store\n    - address: sglang-pd-with-mooncake-mooncake-store-1.s-sglang-pd-with-mooncake-mooncake-store\n    size: 3\n  prefill:\n    instances:\n    - address: sglang-pd-with-mooncake-prefill-0.s-sglang-pd-with-mooncake-prefill\n    size: 1\n  router:\n    instances:\n    - address: sglang-pd-with-mooncake-router-0.s-sglang-pd-with-mooncake-router\n    size: 1\n";

#[test]
fn recorded_file_keeps_the_roles_in_spec_order() {
    let config = read(RECORDED).unwrap();
    assert_eq!(config.group, "sglang-pd-with-mooncake");
    assert_eq!(config.namespace, None);
    let names: Vec<&str> = config.roles.iter().map(|role| role.name.as_str()).collect();
    assert_eq!(names, ["mooncake-master", "mooncake-store", "router", "prefill", "decode"]);
    let prefill = &config.roles[3].instances[0];
    assert_eq!(prefill.address, "sglang-pd-with-mooncake-prefill-0.s-sglang-pd-with-mooncake-prefill");
    assert_eq!(
        prefill.alternative.as_deref(),
        Some("sglang-pd-with-mooncake-prefill-0-0.s-sglang-pd-with-mooncake-prefill"),
        "a leader-worker role's pod is named <instance>-0"
    );
    assert!(prefill.ports.is_empty());
}

#[test]
fn ports_may_be_numbers_or_text_and_invalid_ones_are_dropped() {
    let config = read(
        "group: {name: g, roles: [p]}\nroles:\n  p:\n    instances:\n    - address: a.b\n      ports: {h_ttp: 80, b: \"8998\", c: 0, d: 70000, e: x}\n",
    )
    .unwrap();
    let ports = &config.roles[0].instances[0].ports;
    assert_eq!(ports.iter().map(|(k, v)| (k.as_str(), *v)).collect::<Vec<_>>(), [("b", 8998), ("h_ttp", 80)]);
}

#[test]
fn the_template_form_is_expanded_without_the_excluded_indices() {
    let config = read(
        "namespace: sgl\ngroup: epd\nroles:\n  router: {replicas: 1, size: 1}\n  decode: {replicas: 3, excludes: [1], size: 4}\n",
    )
    .unwrap();
    assert_eq!(config.namespace.as_deref(), Some("sgl"));
    let decode = &config.roles[0];
    let addresses: Vec<&str> = decode.instances.iter().map(|instance| instance.address.as_str()).collect();
    assert_eq!(
        addresses,
        [
            "epd-decode-0-0.s-epd-decode.sgl.svc.cluster.local",
            "epd-decode-2-0.s-epd-decode.sgl.svc.cluster.local"
        ]
    );
    assert_eq!(decode.instances[0].alternative, None, "four pods per instance: the leader has the suffix");
    assert_eq!(
        config.roles[1].instances[0].alternative.as_deref(),
        Some("epd-router-0.s-epd-router.sgl.svc.cluster.local")
    );
}

#[test]
fn errors_of_unusable_files_name_the_cause() {
    assert_eq!(read("other: 1\n"), Err(DiscoveryFileError::Missing("group")));
    assert_eq!(read("group: {name: g}\n"), Err(DiscoveryFileError::Missing("roles")));
    assert_eq!(
        read("group: g\nroles: {p: {replicas: 18446744073709551615}}\n"),
        Err(DiscoveryFileError::TooMany(u64::MAX))
    );
    assert_eq!(read("group: g\nroles: {p: {size: 1}}\n"), Err(DiscoveryFileError::NoInstances("p".into())));
    assert_eq!(
        read("group: {name: g}\nroles: {p: {instances: [{}]}}\n"),
        Err(DiscoveryFileError::NoAddress { role: "p".into(), index: 0 })
    );
}

#[test]
fn empty_roles_and_unknown_fields_are_tolerated() {
    let config =
        read("group: {name: g, roles: [p, q], hue: 3}\nroles: {p: , z: {instances: [], more: {}}}\n")
            .unwrap();
    assert_eq!(config.roles.len(), 2);
    assert!(config.roles.iter().all(|role| role.instances.is_empty()));
}
