//! Recomputes the hashes in recorded KV events of real engines from the events' token ids and parents.

use std::collections::HashMap;

use moongate_block_hash::{BlockHashChain, DEFAULT_VLLM_SEED, HashScheme, SglangNamespace, VllmExtraKeys};
use serde_json::Value;

/// Low 64 bits of a recorded hash: a signed or unsigned number, or all 32 bytes in hex.
fn key(hash: &Value) -> u64 {
    match hash {
        Value::String(hex) => u64::from_str_radix(&hex[hex.len() - 16..], 16).unwrap(),
        Value::Number(number) => number.as_u64().unwrap_or_else(|| number.as_i64().unwrap() as u64),
        other => panic!("unexpected hash {other}"),
    }
}

fn stored(lines: &str) -> Vec<Value> {
    let batches = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    batches
        .flat_map(|batch| batch["batch"][1].as_array().unwrap().clone())
        .filter(|event| event["type"] == "BlockStored")
        .collect()
}

/// Checks all events, starting chains with `scheme(block tokens, event)`; returns the number of compared hashes.
fn count_matching_hashes(lines: &str, scheme: impl Fn(u32, &Value) -> Option<HashScheme>) -> usize {
    let mut known: HashMap<u64, BlockHashChain> = HashMap::new();
    let mut compared = 0;
    for event in stored(lines) {
        let block_tokens = event["block_size"].as_u64().unwrap() as u32;
        let parent = &event["parent_block_hash"];
        let chain = if parent.is_null() {
            scheme(block_tokens, &event).map(BlockHashChain::new)
        } else {
            known.get(&key(parent)).cloned()
        };
        let Some(mut chain) = chain else { continue };
        let tokens: Vec<u32> =
            event["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let hashes = event["block_hashes"].as_array().unwrap();
        for (page, hash) in tokens.chunks(block_tokens as usize).zip(hashes) {
            let mut blocks = Vec::new();
            chain.extend(page, &mut blocks);
            assert_eq!(blocks.len(), 1);
            assert_eq!(blocks[0].event_hash, key(hash));
            if let Value::String(hex) = hash {
                assert_eq!(format!("0x{}", blocks[0].digest), *hex);
            }
            known.insert(blocks[0].event_hash, chain.clone());
            compared += 1;
        }
    }
    compared
}

fn vllm(block_tokens: u32, event: &Value, seed: &str) -> Option<HashScheme> {
    let salt = event["extra_keys"].get(0).and_then(|keys| keys.get(0)).and_then(Value::as_str);
    // A block saved to the store is announced without its extra keys, so a salted one cannot be computed.
    let known = salt.is_some() || event["extra_keys"].is_array();
    let extra = VllmExtraKeys { adapter: None, cache_salt: salt };
    known.then(|| HashScheme::vllm_sha256_cbor(block_tokens, seed, extra).unwrap())
}

#[test]
fn vllm_event_hashes_match() {
    let lines = include_str!("../vectors/kvevents-vllm-basic.jsonl");
    assert_eq!(count_matching_hashes(lines, |page, event| vllm(page, event, "0")), 7);
    for lines in [
        include_str!("../vectors/kvevents-vllm-evict-clear-int0.jsonl"),
        include_str!("../vectors/kvevents-vllm-evict-clear-int1.jsonl"),
    ] {
        assert_eq!(count_matching_hashes(lines, |page, event| vllm(page, event, DEFAULT_VLLM_SEED)), 106);
    }
}

#[test]
fn vllm_event_hashes_of_stored_blocks_match() {
    let lines = include_str!("../vectors/kvevents-vllm-mooncakestore-producer.jsonl");
    let compared = count_matching_hashes(lines, |page, event| vllm(page, event, DEFAULT_VLLM_SEED));
    assert!(compared > 2000, "{compared}");
}

#[test]
fn sglang_event_hashes_match() {
    let lines = include_str!("../vectors/kvevents-sglang-0.5.23.jsonl");
    let compared = count_matching_hashes(lines, |page, event| {
        Some(HashScheme::sglang_events(page, event["cache_salt"].as_str()).unwrap())
    });
    assert_eq!(compared, 456 + 4 * 21, "includes four events of a salted prompt");
    let plain = count_matching_hashes(lines, |page, event| {
        let plain = event["cache_salt"].is_null();
        plain.then(|| HashScheme::sglang(page, SglangNamespace::default()).unwrap())
    });
    assert_eq!(plain, 456);
}
