//! Parsing and formatting of the engines' object keys.

use mooncake_wire::key::{
    AttentionKind, BlockKeyHash, BlockPart, KeyLayout, LmcacheMpPart, LmcachePart, ObjectKey,
    SglangKeyFormat, SglangPart, SglangRanks, SglangTensor, VllmPart,
};
use proptest::prelude::*;
use serde_json::Value;

/// All keys in the entries of a vector file whose names start with `start`.
fn keys<'v>(vectors: &'v Value, start: &str) -> Vec<&'v str> {
    let named = vectors.as_object().unwrap().iter().filter(|(name, _)| name.starts_with(start));
    named
        .flat_map(|(_, value)| value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice))
        .map(|key| key.as_str().unwrap())
        .collect()
}

fn sglang(
    prefix: &str,
    attention: AttentionKind,
    tp_size: u32,
    pp_size: u32,
    form: SglangKeyFormat,
) -> KeyLayout {
    KeyLayout::Sglang { prefix: prefix.to_owned(), attention, tp_size, pp_size, form }
}

fn formatted(layout: &KeyLayout, page: BlockKeyHash) -> Vec<String> {
    layout.keys(page).map(|key| key.to_string()).collect()
}

const PAGE: &str = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72";

fn page() -> BlockKeyHash {
    BlockKeyHash::from_hex(PAGE).unwrap()
}

#[test]
fn sglang_keys_match_the_vectors() {
    use {AttentionKind::*, SglangKeyFormat::*};
    let vectors: Value = serde_json::from_str(include_str!("../vectors/sglang_vectors.json")).unwrap();
    let named = |name: &str| {
        vectors[name].as_array().unwrap().iter().map(|key| key.as_str().unwrap()).collect::<Vec<_>>()
    };
    let all = keys(&vectors, "keys ");
    assert_eq!(all.len(), 10);
    for key in &all {
        let parsed = ObjectKey::parse(key).unwrap();
        assert_eq!((parsed.hash, parsed.to_string().as_str()), (page(), *key));
    }
    for (layout, name) in [
        (sglang("", Mha, 1, 1, V0_5_3), "keys MHA tp_rank=0 no prefix"),
        (sglang("", Mha, 1, 1, V0_5_10), "keys MHA tp_rank=0 no prefix"),
        (sglang("", Mla, 8, 1, V0_5_3), "keys MLA 0.5.3..0.5.6"),
        (sglang("", Mla, 8, 1, V0_5_10), "keys MLA >=0.5.10 (pp_size==1)"),
        (
            sglang(&KeyLayout::sglang_prefix(None, "Qwen/Qwen3-32B"), Mha, 1, 1, V0_5_10),
            "keys 0.5.23 model Qwen/Qwen3-32B tp0",
        ),
        (
            sglang(&KeyLayout::sglang_prefix(Some("t"), "deepseek-ai/DeepSeek-V3"), Mla, 1, 1, V0_5_10),
            "keys 0.5.23 extra_backend_tag=t model deepseek-ai/DeepSeek-V3 MLA",
        ),
    ] {
        assert_eq!(formatted(&layout, page()), named(name), "{name}");
    }
    let pipelined = formatted(&sglang("", Mha, 4, 2, V0_5_10), page());
    assert_eq!(pipelined.len(), 16);
    for key in named("keys MHA tp_rank=3 pp_rank=1 (pp_size>1)") {
        assert!(pipelined.iter().any(|formatted| formatted == key), "{key}");
    }
    assert_eq!(formatted(&sglang("", Mla, 4, 3, V0_5_10), page())[2..], named("keys MLA pp_rank=2"));
}

#[test]
fn vllm_keys_match_the_vectors() {
    let vectors: Value = serde_json::from_str(include_str!("../vectors/vllm_vectors.json")).unwrap();
    let all = keys(&vectors, "key ");
    assert_eq!(all.len(), 2);
    for key in &all {
        assert_eq!(ObjectKey::parse(key).unwrap().to_string(), *key);
    }
    let first = ObjectKey::parse(all[0]).unwrap();
    assert_eq!((first.namespace, first.part), ("Qwen3-32B", BlockPart::Vllm(VllmPart::default())));
    let third = ObjectKey::parse(all[1]).unwrap();
    let part = VllmPart { tp: 3, pcp: 0, dcp: 0, pp: 1, group: 1 };
    assert_eq!((third.namespace, third.part), ("prod@Qwen3-32B", BlockPart::Vllm(part)));
    let layout = KeyLayout::Vllm {
        namespace: "prod@Qwen3-32B".to_owned(),
        tp_size: 4,
        pcp_size: 1,
        dcp_size: 1,
        pp_size: 2,
        groups: 2,
    };
    let layout_keys: Vec<_> = layout.keys(third.hash).collect();
    assert_eq!(layout_keys.len(), 16);
    assert_eq!(layout_keys.last(), Some(&third));
}

#[test]
fn lmcache_keys_are_parsed_and_formatted() {
    for (key, negative, bytes) in [
        ("m/l@2@1@44ea817d9387da2c@bfloat16", false, 0x44ea_817d_9387_da2c_u64),
        ("m/l@2@1@-5754ed40775a7be6@bfloat16", true, 0x5754_ed40_775a_7be6_u64.wrapping_neg()),
        ("m/l@2@1@3739a65572d4397@bfloat16", false, 0x373_9a65_572d_4397),
        ("m/l@2@1@d38ce87c68ed379b@bfloat16@user%1@lora%x", false, 0xd38c_e87c_68ed_379b),
    ] {
        let parsed = ObjectKey::parse(key).unwrap();
        let BlockPart::Lmcache(part) = parsed.part else { unreachable!("{parsed:?}") };
        assert_eq!((parsed.namespace, part.world_size, part.worker, part.negative), ("m/l", 2, 1, negative));
        assert_eq!(parsed.hash, BlockKeyHash::new(&bytes.to_be_bytes()).unwrap());
        assert_eq!(parsed.to_string(), key);
    }
    let mp = ObjectKey::parse("m@00000003@1f@0a0b@salt").unwrap();
    let part = BlockPart::LmcacheMp(LmcacheMpPart { kv_rank: 3, group: 0x1f, salt: "salt" });
    assert_eq!((mp.hash, mp.part), (BlockKeyHash::new(&[10, 11]).unwrap(), part));
    let layout = KeyLayout::Lmcache {
        model: "m/l".to_owned(),
        world_size: 2,
        dtype: "half".to_owned(),
        tags: String::new(),
    };
    let page = BlockKeyHash::new(&0x12_u64.to_be_bytes()).unwrap();
    assert_eq!(formatted(&layout, page), ["m/l@2@0@12@half", "m/l@2@1@12@half"]);
}

#[test]
fn keys_of_other_formats_are_rejected() {
    let upper = PAGE.to_uppercase();
    for key in [
        "",
        "hk1",
        "sglang_mooncake_store_warmup_key1234",
        PAGE,
        &format!("{PAGE}_v"),
        &format!("{PAGE}__v"),
        &format!("{PAGE}_00_k"),
        &format!("{PAGE}_+1_k"),
        &format!("{PAGE}_4294967296_k"),
        &format!("{PAGE}_1_2_3_k"),
        &format!("_{PAGE}_0_k"),
        &format!("x{PAGE}_0_k"),
        &format!("{upper}_0_k"),
        &format!("{}_0_k", &PAGE[1..]),
        &format!("é{}_0_k", &PAGE[1..]),
        &format!("m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:@{PAGE}"),
        &format!("@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{PAGE}"),
        "m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@xyz",
        "m@2@1@-0@half",
        "m@2@1@-8000000000000001@half",
        "m@2@1@0f@half",
        "m@2@1@F@half",
        "m@2@1@f@",
        "m@2@1@f@half@",
        "@2@1@f@half",
    ] {
        assert_eq!(ObjectKey::parse(key), None, "{key}");
    }
}

fn sglang_part() -> impl Strategy<Value = SglangPart> {
    let ranks = prop_oneof![
        Just(SglangRanks::Absent),
        Just(SglangRanks::Empty),
        any::<u32>().prop_map(SglangRanks::One),
        any::<(u32, u32)>().prop_map(|(tp, pp)| SglangRanks::Two { tp, pp }),
    ];
    (ranks, any::<bool>()).prop_map(|(ranks, value)| {
        let value = value && matches!(ranks, SglangRanks::One(_) | SglangRanks::Two { .. });
        SglangPart { ranks, tensor: if value { SglangTensor::Value } else { SglangTensor::Key } }
    })
}

proptest! {
    #[test]
    fn sglang_round_trips(namespace in "([a-zA-Z0-9_./-]{1,30})?", hash: [u8; 32], part in sglang_part()) {
        let key = ObjectKey { namespace: &namespace, hash: hash.into(), part: BlockPart::Sglang(part) };
        let text = key.to_string();
        prop_assert_eq!(ObjectKey::parse(&text), Some(key));
    }

    #[test]
    fn vllm_round_trips(
        namespace in "[a-zA-Z0-9_@:./-]{1,30}",
        hash in prop::collection::vec(any::<u8>(), 1..=32),
        (tp, pcp, dcp, pp, group) in any::<(u32, u32, u32, u32, u32)>(),
    ) {
        let part = BlockPart::Vllm(VllmPart { tp, pcp, dcp, pp, group });
        let key = ObjectKey { namespace: &namespace, hash: BlockKeyHash::new(&hash).unwrap(), part };
        let text = key.to_string();
        prop_assert_eq!(ObjectKey::parse(&text), Some(key));
    }

    #[test]
    fn lmcache_round_trips(
        namespace in "[a-zA-Z0-9_./-]{1,30}",
        hash: i64,
        (world_size, worker) in (1..10_000_000_u32, any::<u32>()),
        dtype in "[a-z0-9]{1,10}",
        tags in "([a-z]{1,5}%[a-z@%]{1,5})?",
        signed: bool,
    ) {
        prop_assume!(!tags.ends_with('@'));
        let negative = signed && hash < 0;
        let part = LmcachePart { world_size, worker, negative, dtype: &dtype, tags: &tags };
        let page = BlockKeyHash::new(&hash.to_be_bytes()).unwrap();
        let key = ObjectKey { namespace: &namespace, hash: page, part: BlockPart::Lmcache(part) };
        let text = key.to_string();
        prop_assert_eq!(ObjectKey::parse(&text), Some(key));
    }

    #[test]
    fn lmcache_server_round_trips(
        namespace in "[a-zA-Z0-9_./-]{1,30}",
        hash in prop::collection::vec(any::<u8>(), 1..=32),
        (kv_rank, group) in any::<(u32, u64)>(),
        salt in "[a-z0-9]{0,10}",
    ) {
        let part = BlockPart::LmcacheMp(LmcacheMpPart { kv_rank, group, salt: &salt });
        let key = ObjectKey { namespace: &namespace, hash: BlockKeyHash::new(&hash).unwrap(), part };
        let text = key.to_string();
        prop_assert_eq!(ObjectKey::parse(&text), Some(key));
    }

    /// Every key that is parsed formats to the same text.
    #[test]
    fn parsed_keys_format_identically(key in "[a-z0-9_@:é]{0,20}([0-9a-f]{64})?[a-z0-9_@:-]{0,20}") {
        if let Some(parsed) = ObjectKey::parse(&key) {
            prop_assert_eq!(parsed.to_string(), key);
        }
    }

    #[test]
    fn a_block_has_parts_per_page_distinct_keys(
        (tp_size, pp_size) in (1..9_u32, 1..4_u32),
        mla: bool,
        old: bool,
        hash: [u8; 32],
    ) {
        let attention = if mla { AttentionKind::Mla } else { AttentionKind::Mha };
        let form = if old { SglangKeyFormat::V0_5_3 } else { SglangKeyFormat::V0_5_10 };
        let layout = sglang("m", attention, tp_size, pp_size, form);
        let keys: std::collections::HashSet<_> = formatted(&layout, hash.into()).into_iter().collect();
        prop_assert_eq!(keys.len() as u64, layout.parts_per_page());
    }
}
