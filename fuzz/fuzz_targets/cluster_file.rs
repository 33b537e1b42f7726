//! RBG's discovery file is mounted into pods by the running operator. A small file never yields more instances than the limit, and each
//! instance has an address and ports.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rbg_api::DiscoveryFile;
use rbg_api::discovery_file::MAX_INSTANCES;

fuzz_target!(|text: &str| {
    let Ok(file) = serde_saphyr::from_str::<DiscoveryFile>(text) else { return };
    let Ok(config) = file.resolve() else { return };
    let instances = || config.roles.iter().flat_map(|role| &role.instances);
    assert!(instances().count() as u64 <= MAX_INSTANCES);
    assert!(instances().all(|instance| instance.ports.values().all(|port| *port != 0)));
    let mut roles: Vec<&str> = config.roles.iter().map(|role| role.name.as_str()).collect();
    roles.sort_unstable();
    roles.dedup();
    assert_eq!(roles.len(), config.roles.len(), "each role once");
});
