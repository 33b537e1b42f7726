//! The gateway reads request bodies with a scanner of its own on top of `serde_json`'s parser. It must take exactly the bodies that
//! `serde_json` takes as an object: one that it took by mistake would be spliced and sent to an engine.

#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value};

fuzz_target!(|body: &[u8]| {
    let expected = serde_json::from_slice::<Map<String, Value>>(body);
    assert_eq!(moongate_gateway::accepts(body), expected.is_ok(), "serde_json says {expected:?}");
});
