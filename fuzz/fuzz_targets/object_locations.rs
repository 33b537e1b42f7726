//! A gateway takes what is missing from a master's list as removed. A batch is accepted completely or not at all, and an accepted one is
//! unchanged after a round trip. Wrong checksums are corrected first, because they would hide everything else.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mooncake_wire::object_locations::{LocationBatch, LocationBatchWriter};

fuzz_target!(|bytes: &[u8]| {
    let _ = LocationBatch::parse(bytes);
    let Some((content, _)) = bytes.split_last_chunk::<4>() else { return };
    let mut bytes = content.to_vec();
    bytes.extend_from_slice(&crc32fast::hash(content).to_le_bytes());
    let Ok(batch) = LocationBatch::parse(&bytes) else { return };
    assert!(batch.objects.len() <= bytes.len());
    let mut writer = LocationBatchWriter::with_capacity(bytes.len());
    for object in &batch.objects {
        assert!(batch.locations(object).count() > 0);
        writer.add(object.key, batch.locations(object));
    }
    let is_whole = writer.len() == batch.objects.len();
    let written = writer.finish(batch.next);
    let again = LocationBatch::parse(&written).expect("our own batch");
    // Only keys that are too long are omitted.
    assert!(is_whole || batch.objects.iter().any(|object| object.key.len() > 16 << 10));
    if is_whole {
        for (one, other) in batch.objects.iter().zip(&again.objects) {
            assert_eq!(one.key, other.key);
            assert!(batch.locations(one).eq(again.locations(other)));
        }
    }
});
