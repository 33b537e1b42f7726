//! A stored and extended chain gives the same hashes as one over the whole prompt.

use moongate_block_hash::{BlockHashChain, HashScheme, SglangNamespace, VllmExtraKeys, VllmLoraAdapter};
use proptest::prelude::*;

fn scheme(kind: u8, block_tokens: u32) -> HashScheme {
    let namespace = SglangNamespace { extra_key: None, cache_salt: Some("salt") };
    let adapter = Some(VllmLoraAdapter { name: "a", path: Some("/a") });
    let extra = VllmExtraKeys { adapter, cache_salt: Some("salt") };
    match kind {
        0 => HashScheme::sglang(block_tokens, SglangNamespace::default()),
        1 => HashScheme::sglang(block_tokens, namespace),
        2 => HashScheme::sglang_bigrams(block_tokens, namespace),
        3 => HashScheme::vllm_sha256(block_tokens, "0", extra),
        4 => HashScheme::vllm_sha256_cbor(block_tokens, "0", extra),
        5 => HashScheme::lmcache_sha256_cbor(block_tokens, 7),
        _ => HashScheme::lmcache_builtin(block_tokens, u64::MAX),
    }
    .unwrap()
}

proptest! {
    #[test]
    fn extended_chains_match_whole_prompts(
        kind in 0u8..7,
        block_tokens in 1u32..20,
        tokens in prop::collection::vec(any::<u32>(), 0..200),
        mut cuts in prop::collection::vec(0usize..200, 0..6),
    ) {
        let scheme = scheme(kind, block_tokens);
        let mut whole = Vec::new();
        let mut chain = BlockHashChain::new(scheme.clone());
        chain.extend(&tokens, &mut whole);
        let lookahead = usize::from(kind == 2);
        prop_assert_eq!(whole.len(), tokens.len().saturating_sub(lookahead) / block_tokens as usize);
        prop_assert_eq!(chain.covered_tokens(), whole.len() * block_tokens as usize);

        cuts.sort_unstable();
        cuts.push(tokens.len());
        let mut resumed = BlockHashChain::new(scheme);
        let mut blocks = Vec::new();
        for cut in cuts {
            let prompt = &tokens[..cut.min(tokens.len())];
            let mut extended = resumed.clone();
            extended.extend(&prompt[resumed.covered_tokens()..], &mut blocks);
            resumed = extended;
        }
        prop_assert_eq!(blocks, whole);
    }
}
