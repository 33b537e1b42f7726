//! An engine, or another server at its address, may return any response. Data stored from a response is bounded.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moongate_discovery::{EngineKind, parse_load, response_sizes};

const MAX_MODELS: usize = 1024;
const MAX_RANKS: usize = 4096;
/// The longest stored text is the path of a tokenizer.
const MAX_TEXT: usize = 4096;

fuzz_target!(|body: &[u8]| {
    let sizes = response_sizes(body);
    assert!(sizes.models <= MAX_MODELS && sizes.ranks <= MAX_RANKS, "{sizes:?}");
    // Two formats of responses are parsed.
    assert!(sizes.event_sources <= 2 * MAX_RANKS && sizes.longest <= MAX_TEXT, "{sizes:?}");
    let _ = parse_load(EngineKind::Sglang, body);
    if let Ok(loads) = parse_load(EngineKind::Vllm, body) {
        let load = loads.total();
        assert!(load.used_tokens <= load.capacity_tokens, "{load:?}");
    }
});
