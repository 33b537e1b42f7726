//! The gateway parses request bodies with its own scanner on top of `serde_json`'s parser. It must accept exactly the bodies that
//! `serde_json` accepts as an object: an invalid body would be modified and sent to an engine.

#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value};

fuzz_target!(|body: &[u8]| {
    let expected = serde_json::from_slice::<Map<String, Value>>(body);
    assert_eq!(moongate_gateway::accepts(body), expected.is_ok(), "serde_json says {expected:?}");
});
