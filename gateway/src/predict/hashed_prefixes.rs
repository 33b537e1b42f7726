//! Cache of block hashes, so that the beginning of a prompt that is sent again is not hashed again.

use std::hash::BuildHasher;
use std::sync::Arc;

use foldhash::quality::RandomState;
use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use moongate_block_hash::{BlockHashChain, HashScheme, HashedBlock};
use moongate_tokenize::SegmentedTokens;

use super::prompt_tokens::HashedTokens;
use crate::kv_index::BlockKeyspace;

/// Overhead of an entry in bytes, besides its blocks.
const ENTRY_OVERHEAD_BYTES: usize = 160;

/// What a chain of hashes depends on, besides the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct HashUse<'a> {
    pub(super) keyspace: &'a BlockKeyspace,
    /// Whether the hashes are those in the names of a store's objects, and not those in events.
    pub(super) names_objects: bool,
}

/// For the beginnings of prompts, the blocks that end in the last segment of each.
pub(crate) struct HashedPrefixes {
    cache: Cache<u64, Arc<[HashedBlock]>, RandomState>,
    hasher: RandomState,
}

impl HashedPrefixes {
    /// A cache of at most `bytes`.
    pub(crate) fn new(bytes: u64) -> Self {
        let weigher = |_: &u64, blocks: &Arc<[HashedBlock]>| {
            u32::try_from(size_of_val(&**blocks) + ENTRY_OVERHEAD_BYTES).unwrap_or(u32::MAX)
        };
        let cache = Cache::builder()
            .max_capacity(bytes)
            .weigher(weigher)
            .eviction_policy(EvictionPolicy::lru())
            .build_with_hasher(RandomState::default());
        Self { cache, hasher: RandomState::default() }
    }

    /// The full blocks of a prompt. `scheme` is that of the use, without extra keys of the request.
    pub(super) fn hash(
        &self,
        prompt: &SegmentedTokens,
        hash_use: HashUse<'_>,
        scheme: HashScheme,
    ) -> HashedTokens {
        let block_tokens = hash_use.keyspace.page_tokens().max(1) as usize;
        let use_hash = self.hasher.hash_one(hash_use);
        let prefixes: Vec<(usize, u64)> = prompt
            .prefixes()
            .map(|(tokens, prefix)| (tokens, self.hasher.hash_one((prefix, use_hash))))
            .collect();
        let mut blocks = Vec::with_capacity(prompt.len() / block_tokens);
        let mut found = 0;
        while let Some(part) = prefixes.get(found).and_then(|(_, key)| self.cache.get(key)) {
            blocks.extend_from_slice(&part);
            found += 1;
        }
        let mut from = blocks.len();
        let mut rest = Vec::with_capacity(prompt.len() - from * block_tokens);
        prompt.slices_from(from * block_tokens).for_each(|ids| rest.extend_from_slice(ids));
        BlockHashChain::resume(scheme, &blocks).extend(&rest, &mut blocks);
        for &(tokens, key) in &prefixes[found..] {
            // A block that also depends on the next token (bigrams) belongs to the segment with that token.
            let to = (tokens.saturating_sub(1) / block_tokens).clamp(from, blocks.len());
            self.cache.insert(key, blocks[from..to].into());
            from = to;
        }
        HashedTokens::new(blocks)
    }
}

impl std::fmt::Debug for HashedPrefixes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HashedPrefixes").field("entries", &self.cache.entry_count()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use moongate_discovery::{EngineBlockHashing, EngineFacts, EngineKind, VllmHashAlgorithm};
    use moongate_tokenize::{PromptDialect, PromptLimits, PromptTokenizer, TextPrompt};
    use proptest::prelude::*;

    use super::*;

    fn schemes() -> Vec<(EngineBlockHashing, HashScheme)> {
        let sglang =
            |bigrams| EngineBlockHashing::Sglang { namespaced: None, bigrams, namespaced_events: false };
        let vllm =
            EngineBlockHashing::Vllm { algorithm: VllmHashAlgorithm::Sha256Cbor, seed: "0".to_owned() };
        vec![
            (sglang(false), HashScheme::sglang_events(16, None).unwrap()),
            (sglang(true), HashScheme::sglang_bigrams(16, Default::default()).unwrap()),
            (vllm, HashScheme::vllm_sha256_cbor(16, "0", Default::default()).unwrap()),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        #[test]
        fn blocks_equal_those_without_the_cache(ends in prop::collection::vec((0..3_usize, "[a-z ]{0,400}"), 1..8)) {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tokenize/tests/data/small");
            let model = PromptTokenizer::load(&folder, PromptDialect::Vllm, PromptLimits::default()).unwrap();
            let prefixes = HashedPrefixes::new(1 << 20);
            let begins = ["one more word ".repeat(1_000), "<|im_start|>".repeat(100), String::new()];
            for (begin, end) in ends {
                let text = TextPrompt::Text(format!("{}{end}", begins[begin]));
                let prompt = model.tokenize_text(&text, false).unwrap();
                for (hashing, scheme) in schemes() {
                    let facts = EngineFacts {
                        models: vec!["m".to_owned()],
                        page_size: Some(16),
                        hashing: Some(hashing),
                        ..EngineFacts::unreported(EngineKind::Vllm)
                    };
                    let keyspace = BlockKeyspace::from_facts(&facts).unwrap();
                    let hash_use = HashUse { keyspace: &keyspace, names_objects: false };
                    let cached = prefixes.hash(prompt.ids(), hash_use, scheme.clone());
                    let whole = HashedTokens::of(&prompt.ids().to_vec(), scheme);
                    prop_assert_eq!(cached.blocks(), whole.blocks());
                }
            }
        }
    }
}
