//! Blocks with images, as hashed by vLLM's own functions. `tests/vectors/make_vllm_media.py` makes the vectors.

use moongate_block_hash::{
    BlockHashChain, DEFAULT_VLLM_SEED, HashScheme, HashSchemeError, SglangNamespace, VllmExtraKeys,
    VllmLoraAdapter, VllmMediaItem,
};
use serde_json::Value;

const BLOCK_TOKENS: u32 = 16;

fn media(case: &Value) -> Vec<VllmMediaItem> {
    let number = |value: &Value| u32::try_from(value.as_u64().unwrap()).unwrap();
    let item = |item: &Value| VllmMediaItem {
        identifier: item[0].as_str().unwrap().into(),
        offset: number(&item[1]),
        length: number(&item[2]),
    };
    case["media"].as_array().unwrap().iter().map(item).collect()
}

#[test]
fn vllm_hashes_media_into_their_blocks() {
    let vectors: Value = serde_json::from_str(include_str!("../vectors/vllm_media_vectors.json")).unwrap();
    for (name, case) in vectors.as_object().unwrap() {
        let adapter = case["lora"]
            .as_array()
            .map(|lora| VllmLoraAdapter { name: lora[0].as_str().unwrap(), path: lora[1].as_str() });
        let extra = VllmExtraKeys { adapter, cache_salt: case["salt"].as_str() };
        let blocks = u32::try_from(case["blocks"].as_u64().unwrap()).unwrap();
        let tokens: Vec<u32> = (1000..1000 + BLOCK_TOKENS * blocks + 3).collect();
        for (algorithm, scheme) in [
            ("sha256", HashScheme::vllm_sha256(BLOCK_TOKENS, DEFAULT_VLLM_SEED, extra)),
            ("sha256_cbor", HashScheme::vllm_sha256_cbor(BLOCK_TOKENS, DEFAULT_VLLM_SEED, extra)),
        ] {
            let mut found = Vec::new();
            let scheme = scheme.unwrap().with_media(media(case)).unwrap();
            BlockHashChain::new(scheme).extend(&tokens, &mut found);
            let found: Vec<String> = found.iter().map(|block| block.digest.to_string()).collect();
            assert_eq!(Value::from(found), case[algorithm], "{name}, {algorithm}");
        }
    }
}

#[test]
fn other_schemes_have_no_rule_for_media() {
    let scheme = HashScheme::sglang(BLOCK_TOKENS, SglangNamespace::default()).unwrap();
    assert_eq!(scheme.with_media(Vec::new()).err(), Some(HashSchemeError::MediaUnsupported));
}
