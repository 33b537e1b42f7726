//! An instances file is accepted completely or not at all: with as many instances as an independent parser finds, and unique ids.

#![no_main]

use std::collections::BTreeSet;

use libfuzzer_sys::fuzz_target;
use moongate_discovery::instance_ids;
use toml::{Table, Value};

const MAX_INSTANCES: usize = 10_000;

fuzz_target!(|text: &str| {
    let Ok(ids) = instance_ids(text) else { return };
    let file: Table = text.parse().expect("what was read is TOML");
    let listed = file.get("instance").and_then(Value::as_array).map_or(0, Vec::len);
    assert_eq!(ids.len(), listed);
    assert!(ids.len() <= MAX_INSTANCES);
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len());
});
