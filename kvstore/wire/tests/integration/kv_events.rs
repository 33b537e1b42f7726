//! Events recorded from real engines and a real Mooncake master, and malformed ones.
//!
//! `tests/vectors/events/*.jsonl` are recordings: `payload_hex` contains the bytes on the wire, `batch` the result of msgspec, an
//! independent decoder. `mooncake-0.3.13.hex` contains payloads of Mooncake's own publisher.

use std::fs;
use std::path::{Path, PathBuf};

use mooncake_wire::events::mooncake::{self, StoreEventKind, StoreEventObject};
use mooncake_wire::events::{
    BlockHash, EngineEvent, EngineEventBatch, EngineEventFormat, EventDecodeError, ExtraKey, LoraAdapter,
    OutgoingBlocks, OutgoingEngineEvent, StorageMedium, encode_engine_batch,
};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::from_hex;

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/events")
}

/// Recorded payloads of all engines with their decoded batches.
fn recorded() -> Vec<(Vec<u8>, Value)> {
    let mut files: Vec<_> = fs::read_dir(vectors()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    assert_eq!(files.len(), 5);
    let lines = files.iter().flat_map(|path| {
        let text = fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect::<Vec<_>>()
    });
    lines.map(|mut line| (from_hex(line["payload_hex"].as_str().unwrap()), line["batch"].take())).collect()
}

/// Packs JSON as MessagePack; strings starting with `0x` become binary.
fn pack(value: &Value, out: &mut Vec<u8>) {
    let head = |short: u8, limit: usize, long: u8, length: usize, out: &mut Vec<u8>| {
        if length < limit {
            out.push(short | length as u8);
        } else {
            out.push(long);
            out.extend((length as u16).to_be_bytes());
        }
    };
    match value {
        Value::Null => out.push(0xc0),
        Value::Bool(value) => out.push(0xc2 + u8::from(*value)),
        Value::Number(number) => {
            if let Some(number) = number.as_u64() {
                out.push(0xcf);
                out.extend(number.to_be_bytes());
            } else if let Some(number) = number.as_i64() {
                out.push(0xd3);
                out.extend(number.to_be_bytes());
            } else {
                out.push(0xcb);
                out.extend(number.as_f64().unwrap().to_be_bytes());
            }
        }
        Value::String(text) => match text.strip_prefix("0x") {
            Some(hex) => {
                out.extend([0xc4, (hex.len() / 2) as u8]);
                out.extend(from_hex(hex));
            }
            None => {
                head(0xa0, 32, 0xda, text.len(), out);
                out.extend(text.as_bytes());
            }
        },
        Value::Array(values) => {
            head(0x90, 16, 0xdc, values.len(), out);
            values.iter().for_each(|value| pack(value, out));
        }
        Value::Object(members) => {
            head(0x80, 16, 0xde, members.len(), out);
            for (name, value) in members {
                pack(&json!(name), out);
                pack(value, out);
            }
        }
    }
}

fn packed(value: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    pack(value, &mut out);
    out
}

/// A hash as JSON: signed if `like`, the recorded value, is signed (SGLang).
fn hash_json(hash: BlockHash<'_>, like: &Value) -> Value {
    match hash {
        BlockHash::Int(hash) if like.is_i64() && !like.is_u64() => json!(hash.cast_signed()),
        BlockHash::Int(hash) => json!(hash),
        BlockHash::Digest(digest) => {
            let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            json!(format!("0x{hex}"))
        }
    }
}

fn assert_hashes<'a>(hashes: impl ExactSizeIterator<Item = BlockHash<'a>>, expected: &Value) {
    let expected = expected.as_array().unwrap();
    assert_eq!(hashes.len(), expected.len());
    for (hash, expected) in hashes.zip(expected) {
        assert_eq!(hash_json(hash, expected), *expected);
    }
}

fn assert_event(event: EngineEvent<'_>, expected: &Value) {
    let text = |value: Option<&str>| json!(value);
    match event {
        EngineEvent::Stored(stored) => {
            assert_eq!(expected["type"], "BlockStored");
            assert_hashes(stored.hashes.iter(), &expected["block_hashes"]);
            let parent = &expected["parent_block_hash"];
            assert_eq!(stored.parent.map_or(Value::Null, |hash| hash_json(hash, parent)), *parent);
            let tokens: Vec<u32> = stored.tokens.unwrap().iter().collect();
            assert_eq!(json!(tokens), expected["token_ids"]);
            assert_eq!(tokens.len(), stored.hashes.len() * stored.block_size as usize);
            assert_eq!(json!(stored.block_size), expected["block_size"]);
            assert_eq!(text(stored.medium.map(StorageMedium::name)), expected["medium"]);
            assert_eq!(stored.lora, None, "the recordings have no LoRA adapter");
            let extra_keys = stored.extra_keys.map(|blocks| {
                let blocks = blocks.iter().map(|keys| {
                    let keys = keys.map(|key| match key {
                        ExtraKey::Text(text) => json!(text),
                        ExtraKey::Opaque => panic!("the recordings have only text keys"),
                    });
                    Some(keys.collect::<Vec<_>>()).filter(|keys| !keys.is_empty())
                });
                blocks.collect::<Vec<_>>()
            });
            assert_eq!(json!(extra_keys), expected["extra_keys"]);
            assert_eq!(text(stored.cache_salt), expected["cache_salt"]);
            assert_eq!(json!(stored.group), expected["group_idx"]);
        }
        EngineEvent::Removed(removed) => {
            assert_eq!(expected["type"], "BlockRemoved");
            assert_hashes(removed.hashes.iter(), &expected["block_hashes"]);
            assert_eq!(text(removed.medium.map(StorageMedium::name)), expected["medium"]);
            assert_eq!(json!(removed.group), expected["group_idx"]);
        }
        EngineEvent::Cleared(medium) => {
            assert_eq!(expected["type"], "AllBlocksCleared");
            assert_eq!(medium, None);
        }
    }
}

#[test]
fn recorded_events_decode_to_the_recorded_batches() {
    let (mut media, mut salted, mut digests, mut cleared) = (Vec::new(), 0, 0, 0);
    for (payload, expected) in recorded() {
        let batch = EngineEventBatch::decode(&payload).unwrap();
        // serde_json parses such numbers with an error in the last bit.
        assert!((batch.timestamp - expected[0].as_f64().unwrap()).abs() < 1e-6);
        assert_eq!(json!(batch.dp_rank), expected[2]);
        let events = expected[1].as_array().unwrap();
        assert_eq!(batch.events().len(), events.len());
        for (event, expected) in batch.events().zip(events) {
            let event = event.unwrap();
            assert_event(event, expected);
            if let EngineEvent::Stored(stored) = event {
                media.push(stored.medium.unwrap().to_string());
                let has_keys = stored.extra_keys.is_some_and(|keys| keys.has_any());
                salted += usize::from(has_keys || stored.cache_salt.is_some());
                digests += usize::from(matches!(stored.hashes.iter().next(), Some(BlockHash::Digest(_))));
            }
            cleared += usize::from(matches!(event, EngineEvent::Cleared(_)));
        }
    }
    for medium in [StorageMedium::Gpu, StorageMedium::CpuPinned, StorageMedium::StoreMemory] {
        assert!(media.contains(&medium.to_string()), "{medium} is missing in the recordings");
    }
    assert!(salted > 0 && digests > 0 && cleared > 0, "{salted} {digests} {cleared}");
}

/// Fields of an event that the encoder expects as slices.
struct CopiedEventFields<'a> {
    hashes: Vec<BlockHash<'a>>,
    tokens: Vec<u32>,
    extra_keys: Option<Vec<Option<&'a str>>>,
}

impl<'a> CopiedEventFields<'a> {
    fn of(event: &EngineEvent<'a>) -> Self {
        let text = |key| match key {
            ExtraKey::Text(text) => text,
            ExtraKey::Opaque => panic!("the recordings have only text keys"),
        };
        match event {
            EngineEvent::Stored(stored) => Self {
                hashes: stored.hashes.iter().collect(),
                tokens: stored.tokens.unwrap().iter().collect(),
                extra_keys: stored
                    .extra_keys
                    .map(|blocks| blocks.iter().map(|mut keys| keys.next().map(text)).collect()),
            },
            EngineEvent::Removed(removed) => {
                Self { hashes: removed.hashes.iter().collect(), tokens: Vec::new(), extra_keys: None }
            }
            EngineEvent::Cleared(_) => Self { hashes: Vec::new(), tokens: Vec::new(), extra_keys: None },
        }
    }
}

#[test]
fn recorded_payloads_re_encode_to_the_same_bytes() {
    for (payload, expected) in recorded() {
        let batch = EngineEventBatch::decode(&payload).unwrap();
        let events: Vec<EngineEvent<'_>> = batch.events().map(Result::unwrap).collect();
        let copies: Vec<CopiedEventFields<'_>> = events.iter().map(CopiedEventFields::of).collect();
        let written: Vec<OutgoingEngineEvent<'_>> = events
            .iter()
            .zip(&copies)
            .map(|(event, copy)| match event {
                EngineEvent::Stored(stored) => OutgoingEngineEvent::Stored(OutgoingBlocks {
                    hashes: &copy.hashes,
                    parent: stored.parent,
                    tokens: &copy.tokens,
                    block_size: stored.block_size,
                    medium: stored.medium.unwrap(),
                    cache_salt: stored.cache_salt,
                    extra_keys: copy.extra_keys.as_deref(),
                }),
                EngineEvent::Removed(removed) => {
                    OutgoingEngineEvent::Removed { hashes: &copy.hashes, medium: removed.medium.unwrap() }
                }
                EngineEvent::Cleared(_) => OutgoingEngineEvent::Cleared,
            })
            .collect();
        let sender = if expected.to_string().contains("group_idx") {
            EngineEventFormat::Vllm
        } else {
            EngineEventFormat::Sglang
        };
        let mut out = Vec::new();
        encode_engine_batch(sender, batch.timestamp, &written, batch.dp_rank.unwrap(), &mut out);
        assert_eq!(out, payload, "{expected}");
    }
}

/// vLLM's integer hashes are the last 8 bytes of its digests: the same run was recorded in both forms.
#[test]
fn integer_hashes_are_the_low_64_bits_of_digests() {
    let first = |file: &str| {
        let text = fs::read_to_string(vectors().join(file)).unwrap();
        let line: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        let payload = from_hex(line["payload_hex"].as_str().unwrap());
        let event = EngineEventBatch::decode(&payload).unwrap().events().next().unwrap().unwrap();
        let EngineEvent::Stored(stored) = event else { panic!("{event:?}") };
        (
            stored.hashes.iter().map(BlockHash::low64).collect::<Vec<_>>(),
            stored.tokens.unwrap().iter().sum::<u32>(),
        )
    };
    assert_eq!(first("vllm-0.32-digests.jsonl"), first("vllm-0.32-evict-clear.jsonl"));
}

/// Until about 0.11, vLLM and SGLang sent arrays, with the fields in the order of today's maps.
#[test]
fn arrays_decode_like_maps() {
    const STORED: [&str; 9] = [
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ];
    let mut compared = 0;
    for (payload, expected) in recorded() {
        let batch = EngineEventBatch::decode(&payload).unwrap();
        let arrays = expected[1].as_array().unwrap().iter().map(|event| {
            let names = match event["type"].as_str().unwrap() {
                "BlockStored" => &STORED[..],
                "BlockRemoved" => &["block_hashes", "medium", "group_idx"],
                _ => &[],
            };
            let members = names.iter().map(|name| event[name].clone());
            [event["type"].clone()].into_iter().chain(members).collect::<Value>()
        });
        let payload = packed(&json!([expected[0], arrays.collect::<Value>()]));
        let old = EngineEventBatch::decode(&payload).unwrap();
        assert_eq!((old.dp_rank, batch.dp_rank), (None, Some(0)));
        for ((old, new), expected) in old.events().zip(batch.events()).zip(expected[1].as_array().unwrap()) {
            // Arrays do not contain SGLang's salt.
            if expected.get("cache_salt").is_none() {
                assert_event(old.unwrap(), expected);
                assert_eq!(std::mem::discriminant(&old.unwrap()), std::mem::discriminant(&new.unwrap()));
                compared += 1;
            }
        }
    }
    assert!(compared > 100, "{compared}");
}

#[test]
fn short_and_long_arrays_are_decoded() {
    let events = json!([
        ["BlockStored", [1, -2], null, [7, 8, 9, 10], 2, null],
        ["BlockStored", [1], 5, [7], 1, 3, "CPU"],
        ["BlockRemoved", [1]],
        ["AllBlocksCleared"],
        ["BlockStored", [1], 5, [7], 1, 3, "CPU", "adapter", [["salt", 3]], 2, "full_attention", null, "new"],
    ]);
    let payload = packed(&json!([1.5, events]));
    let events: Vec<_> = EngineEventBatch::decode(&payload).unwrap().events().map(Result::unwrap).collect();
    let EngineEvent::Stored(first) = events[0] else { panic!("{events:?}") };
    let hashes: Vec<_> = first.hashes.iter().collect();
    assert_eq!(hashes, [BlockHash::Int(1), BlockHash::Int(u64::MAX - 1)]);
    assert_eq!((first.parent, first.medium, first.lora, first.block_size), (None, None, None, 2));
    let EngineEvent::Stored(second) = events[1] else { panic!("{events:?}") };
    let parent = Some(BlockHash::Int(5));
    assert_eq!(
        (second.parent, second.medium, second.lora),
        (parent, Some(StorageMedium::Cpu), Some(LoraAdapter::Id(3)))
    );
    assert!(
        matches!(events[2], EngineEvent::Removed(removed) if removed.hashes.len() == 1 && removed.medium.is_none())
    );
    assert_eq!(events[3], EngineEvent::Cleared(None));
    let EngineEvent::Stored(last) = events[4] else { panic!("{events:?}") };
    assert_eq!((last.lora, last.group), (Some(LoraAdapter::Name("adapter")), Some(2)));
    let keys: Vec<_> = last.extra_keys.unwrap().iter().flatten().collect();
    assert_eq!(keys, [ExtraKey::Text("salt"), ExtraKey::Opaque]);
}

#[test]
fn an_unsupported_event_does_not_affect_the_others() {
    let stored = |member: &str, value: Value| {
        let mut event =
            json!({"type": "BlockStored", "block_hashes": [1], "token_ids": [2], "block_size": 1});
        event[member] = value;
        event
    };
    let unexpected = |name: &'static str| Some(EventDecodeError::Unexpected(name));
    let cases = [
        (stored("new_member", json!({"a": [[1], {"b": null}]})), None),
        (stored("token_ids", json!([[1, 2], [2, 3]])), None),
        (stored("token_ids", json!([1_u64 << 32])), None),
        (stored("block_hashes", json!(["text"])), unexpected("block_hashes")),
        (stored("block_hashes", json!(["0x0123"])), unexpected("block_hashes")),
        (stored("block_hashes", Value::Null), Some(EventDecodeError::Missing("block_hashes"))),
        (stored("parent_block_hash", json!([1])), unexpected("parent_block_hash")),
        (stored("block_size", json!(-1)), unexpected("block_size")),
        (stored("medium", json!(7)), unexpected("medium")),
        (stored("extra_keys", json!(["salt"])), unexpected("extra_keys")),
        (stored("lora_id", json!("0123456789")), None),
        (stored("lora_id", json!(-1)), unexpected("lora_id")),
        (stored("type", json!("BlockMoved")), Some(EventDecodeError::UnknownKind)),
        (json!({"block_hashes": [1], "block_size": 1}), Some(EventDecodeError::UnknownKind)),
        (json!([]), Some(EventDecodeError::UnknownKind)),
        (json!("text"), Some(EventDecodeError::UnknownKind)),
    ];
    for (event, error) in cases {
        let payload = packed(&json!([1.5, [event, {"type": "AllBlocksCleared"}], 3]));
        let batch = EngineEventBatch::decode(&payload).unwrap();
        assert_eq!(batch.dp_rank, Some(3));
        let events: Vec<_> = batch.events().collect();
        assert_eq!(events[0].err(), error, "{event}");
        assert_eq!(events[1..], [Ok(EngineEvent::Cleared(None))], "{event}");
    }
}

#[test]
fn malformed_batches_are_rejected() {
    for (batch, error) in [
        (json!([1.5]), EventDecodeError::Malformed),
        (json!({"ts": 1.5}), EventDecodeError::Malformed),
        (json!([1.5, 3]), EventDecodeError::Malformed),
        (json!(["now", []]), EventDecodeError::Malformed),
        (json!([1.5, [], "rank"]), EventDecodeError::Malformed),
    ] {
        assert_eq!(EngineEventBatch::decode(&packed(&batch)).err(), Some(error), "{batch}");
    }
    let (payload, _) = recorded().swap_remove(0);
    for end in 0..payload.len() {
        assert_eq!(
            EngineEventBatch::decode(&payload[..end]).err(),
            Some(EventDecodeError::Truncated),
            "up to {end}"
        );
    }
}

#[test]
fn mooncake_events_match_its_publisher() {
    let key = |key, group, medium| StoreEventObject { key, group, medium };
    let expected = [
        ("default", StoreEventKind::Stored(key("12345678901234567890", None, StorageMedium::StoreMemory))),
        ("t1", StoreEventKind::Stored(key("0xdeadbeef", Some("g1"), StorageMedium::StoreDisk))),
        ("t1", StoreEventKind::Removed(key("0xdeadbeef", Some("g1"), StorageMedium::StoreMemory))),
        ("default", StoreEventKind::Stored(key("e3b0c442_0_k", None, StorageMedium::StoreMemory))),
        ("default", StoreEventKind::Removed(key("e3b0c442_0_k", None, StorageMedium::StoreMemory))),
    ];
    let text = fs::read_to_string(vectors().join("mooncake-0.3.13.hex")).unwrap();
    assert_eq!(text.lines().count(), expected.len());
    for (index, (line, (tenant, change))) in text.lines().zip(expected).enumerate() {
        let payload = from_hex(line);
        let batch = mooncake::StoreEventBatch::decode(&payload).unwrap();
        let events: Vec<_> = batch.events().collect::<Result<_, _>>().unwrap();
        let timestamp_ms = batch.timestamp_ms;
        let id = index as u64 + 1;
        assert_eq!(events, [mooncake::StoreEvent { id, timestamp_ms, tenant, backend: "pool-a", change }]);
        let mut encoded = Vec::new();
        mooncake::encode_batch(timestamp_ms, &events, &mut encoded);
        assert_eq!(encoded, payload);
    }
}

/// Decodes everything in a payload.
fn read_all(payload: &[u8]) {
    if let Ok(batch) = EngineEventBatch::decode(payload) {
        for event in batch.events() {
            let shown = format!("{event:?}");
            assert!(!shown.is_empty());
        }
    }
    if let Ok(batch) = mooncake::StoreEventBatch::decode(payload) {
        assert!(batch.events().len() <= payload.len());
        batch.events().for_each(drop);
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_do_not_panic(payload in prop::collection::vec(any::<u8>(), 0..300)) {
        read_all(&payload);
    }

    #[test]
    fn damaged_payloads_do_not_panic(
        choice in any::<prop::sample::Index>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        thread_local!(static RECORDED: Vec<Vec<u8>> = recorded().into_iter().map(|(payload, _)| payload).collect());
        let mut payload = RECORDED.with(|recorded| choice.get(recorded).clone());
        for (index, byte) in damage {
            *index.get_mut(&mut payload) = byte;
        }
        read_all(&payload);
    }
}
