//! KV events come from engines and masters of any version. Parsing them never panics, and a Mooncake master's events are unchanged after
//! a round trip.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mooncake_wire::events::{EngineEvent, EngineEventBatch, mooncake};

fuzz_target!(|payload: &[u8]| {
    if let Ok(batch) = EngineEventBatch::decode(payload) {
        for event in batch.events().flatten() {
            let EngineEvent::Stored(stored) = event else { continue };
            assert_eq!(stored.hashes.iter().count(), stored.hashes.len());
            assert!(stored.hashes.len() <= payload.len());
            let tokens = stored.tokens.unwrap_or_default();
            assert_eq!(tokens.iter().count(), tokens.len());
            let extra_keys = stored.extra_keys.unwrap_or_default();
            assert_eq!(extra_keys.has_any(), extra_keys.iter().flatten().next().is_some());
        }
    }
    if let Ok(batch) = mooncake::StoreEventBatch::decode(payload) {
        let events: Vec<_> = batch.events().flatten().collect();
        let mut encoded = Vec::new();
        mooncake::encode_batch(batch.timestamp_ms, &events, &mut encoded);
        let again = mooncake::StoreEventBatch::decode(&encoded).expect("our own batch");
        let again: Vec<_> = again.events().map(|event| event.expect("our own event")).collect();
        assert_eq!(again, events);
    }
});
