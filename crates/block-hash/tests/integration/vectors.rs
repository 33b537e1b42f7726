//! Test vectors computed with the engines' own functions.

use moongate_block_hash::{
    BlockDigest, BlockHashChain, DEFAULT_VLLM_SEED, HashScheme, HashedBlock, SglangNamespace, VllmExtraKeys,
    VllmLoraAdapter,
};
use serde_json::Value;

const BIG_IDS: [u32; 7] = [0, 255, 256, 65_535, 65_536, 2_147_483_647, 4_294_967_295];

fn blocks(scheme: HashScheme, tokens: &[u32]) -> Vec<HashedBlock> {
    let mut blocks = Vec::new();
    BlockHashChain::new(scheme).extend(tokens, &mut blocks);
    blocks
}

fn texts(scheme: HashScheme, tokens: &[u32]) -> Vec<String> {
    blocks(scheme, tokens).iter().map(|page| page.digest.to_string()).collect()
}

fn load(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|item| item.as_str().unwrap().to_owned()).collect()
}

fn one_to(last: u32) -> Vec<u32> {
    (1..=last).collect()
}

#[test]
fn sglang_block_hashes_match() {
    let vectors = load(include_str!("../vectors/sglang_vectors.json"));
    let none = SglangNamespace::default();
    let scheme = |page| HashScheme::sglang(page, none).unwrap();
    let list = "tokens=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]";
    for page in [1, 4] {
        let expected = strings(&vectors[format!("page_size={page} {list}")]);
        assert_eq!(texts(scheme(page), &one_to(12)), expected);
    }
    let range: Vec<u32> = (1000..1130).collect();
    assert_eq!(texts(scheme(64), &range), strings(&vectors["page_size=64 tokens=range(1000,1130)"]));
    assert_eq!(texts(scheme(1), &[0]), strings(&vectors["empty-prior single page [0]"]));
    assert_eq!(texts(scheme(1), &[u32::MAX]), strings(&vectors["[4294967295]"]));
    let eagle = HashScheme::sglang_bigrams(4, none).unwrap();
    let expected = strings(&vectors["EAGLE bigram tokens [1,2,3,4,5] ps=4"]);
    assert_eq!(texts(eagle.clone(), &one_to(5)), expected);
    assert_eq!(texts(eagle, &one_to(4)), Vec::<String>::new(), "the last pair is incomplete");
}

#[test]
fn sglang_namespaced_hashes_match() {
    let vectors = load(include_str!("../vectors/sglang_vectors.json"));
    let python = |text: Option<&str>| text.map_or("None".to_owned(), |text| format!("'{text}'"));
    for (extra_key, cache_salt) in [
        (None, None),
        (Some("lora-a"), None),
        (None, Some("salt")),
        (Some("lora-a"), Some("salt")),
        (Some(""), Some("")),
    ] {
        let scheme = HashScheme::sglang(4, SglangNamespace { extra_key, cache_salt }).unwrap();
        let name =
            format!("pages [1..8] ps=4 extra_key={} cache_salt={}", python(extra_key), python(cache_salt));
        assert_eq!(texts(scheme, &one_to(8)), strings(&vectors[&name]), "{name}");
    }
}

#[test]
fn sglang_event_hashes_match() {
    let vectors = load(include_str!("../vectors/sglang_vectors.json"));
    let blocks = blocks(HashScheme::sglang(4, SglangNamespace::default()).unwrap(), &one_to(4));
    assert_eq!(blocks[0].event_hash as i64, vectors["event int64 of page0"].as_i64().unwrap());
}

#[test]
fn sglang_namespaced_event_hashes_match() {
    let vectors = load(include_str!("../vectors/sglang_event_vectors.json"));
    let python = |text: Option<&str>| text.unwrap_or("None").to_owned();
    for (extra_key, cache_salt) in [(Some("key"), None), (None, Some("salt")), (Some("key"), Some("salt"))] {
        let adapter = SglangNamespace { extra_key, cache_salt: None };
        let dynamo = SglangNamespace { extra_key, cache_salt };
        for (format, namespace) in
            [("default", SglangNamespace::default()), ("dynamo", dynamo), ("adapter", adapter)]
        {
            let name = format!("{format} {} {}", python(extra_key), python(cache_salt));
            let expected: Vec<i64> =
                vectors[&name].as_array().unwrap().iter().map(|hash| hash.as_i64().unwrap()).collect();
            let scheme = HashScheme::sglang_namespaced_events(4, cache_salt, namespace).unwrap();
            let found: Vec<i64> =
                blocks(scheme, &one_to(8)).iter().map(|block| block.event_hash as i64).collect();
            assert_eq!(found, expected, "{name}");
        }
    }
}

#[test]
fn vllm_block_hashes_match() {
    let vectors = load(include_str!("../vectors/vllm_vectors.json"));
    let make = |algorithm, page, extra| match algorithm {
        "sha256" => HashScheme::vllm_sha256(page, DEFAULT_VLLM_SEED, extra).unwrap(),
        _ => HashScheme::vllm_sha256_cbor(page, DEFAULT_VLLM_SEED, extra).unwrap(),
    };
    for algorithm in ["sha256", "sha256_cbor"] {
        let none = VllmExtraKeys::default();
        let expected = strings(&vectors[format!("{algorithm} block_size=4 tokens=1..12")]);
        assert_eq!(texts(make(algorithm, 4, none), &one_to(12)), expected);
        let range: Vec<u32> = (1000..1048).collect();
        let expected = strings(&vectors[format!("{algorithm} block_size=16 tokens=1000..1047")]);
        assert_eq!(texts(make(algorithm, 16, none), &range), expected);
        let expected = &vectors[format!("{algorithm} big ids [0,255,256,65535,65536,2147483647,4294967295]")];
        assert_eq!(texts(make(algorithm, 7, none), &BIG_IDS), [expected.as_str().unwrap()]);
        let adapter = Some(VllmLoraAdapter { name: "lora-a", path: None });
        let expected = &vectors[format!("{algorithm} extra_keys=(\"lora-a\",)")];
        let found = texts(make(algorithm, 4, VllmExtraKeys { adapter, cache_salt: None }), &one_to(4));
        assert_eq!(found, [expected.as_str().unwrap()]);
    }
}

#[test]
fn vllm_event_hashes_match() {
    let scheme = HashScheme::vllm_sha256_cbor(4, DEFAULT_VLLM_SEED, VllmExtraKeys::default()).unwrap();
    // The last 8 bytes of the digest.
    assert_eq!(blocks(scheme, &one_to(4))[0].event_hash, 0x84b1_46b1_51d5_5111);
}

#[test]
fn lmcache_chunk_hashes_match() {
    let tokens = one_to(12);
    let builtin = HashScheme::lmcache_builtin(4, 0).unwrap();
    assert_eq!(texts(builtin.clone(), &tokens), ["44ea817d9387da2c", "-5754ed40775a7be6", "3739a65572d4397"]);
    let second = blocks(builtin, &tokens)[1];
    assert_eq!(second.digest, BlockDigest::Signed(-0x5754_ed40_775a_7be6));
    assert_eq!(second.event_hash as i64, -0x5754_ed40_775a_7be6);
    let cbor = HashScheme::lmcache_sha256_cbor(4, 0).unwrap();
    assert_eq!(texts(cbor, &tokens), ["7e36a06c49df122e", "108f6ddba914556d", "d38ce87c68ed379b"]);
    let root = HashScheme::lmcache_root_of_vllm(DEFAULT_VLLM_SEED);
    assert_eq!(root, 0x9bd9_6a48_5ad8_4efd);
    let cbor = HashScheme::lmcache_sha256_cbor(4, root).unwrap();
    assert_eq!(texts(cbor, &tokens), ["522558a1570001db", "549fbcf1cac2637b", "7884ec81320f021c"]);
}

#[test]
fn lmcache_root_follows_from_the_first_chunk() {
    let tokens: Vec<u32> = (1000..1512).collect();
    // Python's hash of NONE_HASH=7704629474003611416.
    let root = 7_704_629_474_003_611_416_i64 % ((1 << 61) - 1);
    let chunks = blocks(HashScheme::lmcache_builtin_after(256, root).unwrap(), &tokens);
    let parent = |chunk: usize| {
        HashScheme::lmcache_builtin_parent(&tokens[chunk * 256..][..256], chunks[chunk].event_hash)
    };
    assert_eq!(parent(0), Some(root));
    // Hashed as a number, a parent is reduced modulo 2^61 - 1.
    let after = HashScheme::lmcache_builtin_after(256, parent(1).unwrap()).unwrap();
    assert_eq!(blocks(after, &tokens[256..])[0].event_hash, chunks[1].event_hash);
}
