//! Hashes the prompts of a request for the groups of engines that may compute them.

use std::sync::Arc;

use bytes::Bytes;
use moongate_block_hash::{HashScheme, HashedBlock};
use moongate_discovery::EngineKind;

use super::hashed_prefixes::{HashUse, HashedPrefixes};
use super::media::{MediaCounts, MediaLookup};
use super::prompt_tokens::{HashedTokens, PredictionError, PromptTokens, TokenizerChoice};
use super::reuse_limit::ReuseLimits;
use crate::feedback::TokenSource;
use crate::fleet::EngineGroup;
use crate::kv_index::{BlockExtraKeys, BlockKeyspace, BlockSchemes, ChunkHashRule};
use crate::request_body::InferenceApi;

/// The prompts of a body, to be hashed for a fleet's groups of engines.
pub(super) struct PredictionQuery {
    pub(super) api: InferenceApi,
    pub(super) body: Bytes,
    /// Each with its source of tokens.
    pub(super) groups: Vec<(Arc<EngineGroup>, TokenizerChoice)>,
    pub(super) limits: ReuseLimits,
    /// For the images and other media of a chat; `None` if it has none.
    pub(super) media: Option<MediaLookup>,
    pub(super) prefixes: Arc<HashedPrefixes>,
}

/// The prompts with their blocks under every keyspace.
pub(super) struct HashedQuery {
    /// Length of all prompts in tokens.
    pub(super) input_tokens: u32,
    /// Whether that is an estimate, and only the beginning of the prompt was hashed.
    pub(super) is_incomplete: bool,
    pub(super) media: MediaCounts,
    pub(super) tokenized_by: TokenSource,
    pub(super) groups: Vec<HashedGroup>,
}

/// The prompts as a group of engines hashes them.
pub(super) struct HashedGroup {
    pub(super) group: Arc<EngineGroup>,
    /// One, or each of a batch.
    pub(super) prompts: Vec<HashedPrompt>,
}

/// The blocks of a prompt under one keyspace.
pub(super) struct HashedPrompt {
    pub(super) engine_blocks: KeyedBlocks,
    /// The same blocks as the store names them, if that differs.
    pub(super) store_blocks: Option<KeyedBlocks>,
    /// Number of tokens that an engine may take from its cache.
    pub(super) reusable_tokens: usize,
    /// The prompt's chunks under each rule of the engines' LMCaches.
    pub(super) chunks: Vec<HashedChunks>,
}

/// The blocks that can be taken from a cache.
pub(super) struct KeyedBlocks {
    pub(super) blocks: HashedTokens,
    /// Keys in the index; possibly fewer than blocks.
    pub(super) keys: Vec<u64>,
}

/// The full chunks of a prompt as LMCache hashes them.
pub(super) struct HashedChunks {
    pub(super) rule: ChunkHashRule,
    /// Keys in the index.
    pub(super) keys: Vec<u64>,
}

impl PredictionQuery {
    pub(super) fn hash(self) -> Result<HashedQuery, PredictionError> {
        let extras = BlockExtraKeys::read(&self.body);
        let (mut input_tokens, mut tokenized_by, mut is_incomplete) = (0, TokenSource::Client, false);
        let mut media = MediaCounts::default();
        let mut tokens_by_engine: Vec<(EngineKind, Vec<PromptTokens>)> = Vec::new();
        let mut hashed = Vec::with_capacity(self.groups.len());
        for (group, tokenizer) in self.groups {
            let Some(schemes) = group.keyspace.schemes(&extras) else { continue };
            if !tokens_by_engine.iter().any(|(engine, _)| *engine == group.engine) {
                let prompts = PromptTokens::of(self.api, &self.body, tokenizer, &group, self.media.as_ref())?;
                tokens_by_engine.push((group.engine, prompts));
            }
            let Some((_, prompts)) = tokens_by_engine.iter().find(|(engine, _)| *engine == group.engine)
            else {
                continue;
            };
            input_tokens = prompts.iter().map(PromptTokens::expected_len).sum();
            media = prompts.first().map_or(media, PromptTokens::media);
            is_incomplete |= prompts.iter().any(PromptTokens::is_incomplete);
            tokenized_by = prompts.first().map_or(TokenSource::Client, PromptTokens::tokenized_by);
            let limit = self.limits.for_engine(group.engine).unwrap_or(usize::MAX);
            let hash = |tokens: &PromptTokens| {
                let blocks = |names_objects, scheme| {
                    let hash_use = HashUse { keyspace: &group.keyspace, names_objects };
                    tokens.blocks(&self.prefixes, hash_use, scheme, extras.is_empty())
                };
                HashedPrompt::new(tokens, &group, &schemes, limit, blocks)
            };
            let prompts = prompts.iter().map(hash).collect();
            hashed.push(HashedGroup { group, prompts });
        }
        if hashed.is_empty() {
            Err(PredictionError::InsufficientCacheInfo)
        } else {
            let input_tokens = u32::try_from(input_tokens).unwrap_or(u32::MAX);
            Ok(HashedQuery { input_tokens, is_incomplete, media, tokenized_by, groups: hashed })
        }
    }
}

impl HashedPrompt {
    /// Of which an engine reuses at most `limit` tokens. `blocks` hashes it by a scheme, also for the names of a store's objects.
    fn new(
        tokens: &PromptTokens,
        group: &EngineGroup,
        schemes: &BlockSchemes,
        limit: usize,
        blocks: impl Fn(bool, HashScheme) -> HashedTokens,
    ) -> Self {
        let keyspace = &group.keyspace;
        // An engine always computes at least one token of the prompt.
        let reusable_tokens = tokens.len().saturating_sub(1).min(limit);
        let name = |names_objects, scheme| {
            let blocks = blocks(names_objects, scheme);
            let usable = reusable_blocks(blocks.blocks(), reusable_tokens, keyspace);
            let keys = usable.iter().map(|block| keyspace.namespace().key(block.event_hash)).collect();
            KeyedBlocks { blocks, keys }
        };
        Self {
            engine_blocks: name(false, schemes.events.clone()),
            store_blocks: schemes.store.clone().map(|scheme| name(true, scheme)),
            reusable_tokens,
            chunks: chunks(tokens, group),
        }
    }
}

/// LMCache finds chunks of a prompt whatever its salt is.
fn chunks(tokens: &PromptTokens, group: &EngineGroup) -> Vec<HashedChunks> {
    let rules = group.chunk_rules();
    if rules.is_empty() {
        return Vec::new();
    }
    let tokens = tokens.to_vec();
    let hash = |rule: ChunkHashRule| HashedChunks { rule, keys: rule.keys(&group.keyspace, &tokens) };
    rules.into_iter().map(hash).collect()
}

/// The blocks in the first `limit` tokens.
fn reusable_blocks<'a>(
    blocks: &'a [HashedBlock],
    limit: usize,
    keyspace: &BlockKeyspace,
) -> &'a [HashedBlock] {
    let blocks_in_limit = limit / keyspace.page_tokens().max(1) as usize;
    &blocks[..blocks_in_limit.min(blocks.len())]
}
