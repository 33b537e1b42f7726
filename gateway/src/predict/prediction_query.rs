//! Hashes the prompts of a request for the groups of engines that may compute them.

use std::sync::Arc;

use bytes::Bytes;
use moongate_block_hash::{HashScheme, HashedBlock};
use moongate_discovery::EngineKind;
use moongate_scheduler::TextPrefix;
use moongate_tokenize::PromptText;

use super::hashed_prefixes::{HashUse, HashedPrefixes};
use super::media::{MediaCounts, MediaLookup};
use super::prompt_tokens::{HashedTokens, PredictionError, PromptExtent, PromptTokens, TokenizerChoice};
use super::reuse_limit::ReuseLimits;
use super::seen_texts::SeenTexts;
use crate::feedback::TokenSource;
use crate::fleet::EngineGroup;
use crate::kv_index::{BlockExtraKeys, BlockKeyspace, BlockSchemes, ChunkHashRule, KvIndex};
use crate::request_body::InferenceApi;

/// Segments that are tokenized of every text, so that short prompts have exact lengths, and all their blocks are known.
const FIRST_SEGMENTS: usize = 2;

/// The prompts of a body, to be hashed for a fleet's groups of engines.
pub(super) struct PredictionQuery {
    pub(super) api: InferenceApi,
    pub(super) body: Bytes,
    /// See [`crate::request_body::RoutingFields::may_change_hashes`].
    pub(super) may_change_hashes: bool,
    /// Each with its source of tokens.
    pub(super) groups: Vec<(Arc<EngineGroup>, TokenizerChoice)>,
    pub(super) limits: ReuseLimits,
    /// For the images and other media of a chat; `None` if it has none.
    pub(super) media: Option<MediaLookup>,
    pub(super) prefixes: Arc<HashedPrefixes>,
    pub(super) index: Arc<KvIndex>,
    /// How much of a text is tokenized, if that is all the same to the engines.
    pub(super) extent: PromptExtent,
    pub(super) seen: Arc<SeenTexts>,
}

/// The prompts with their blocks under every keyspace.
pub(super) struct HashedQuery {
    /// Length of all prompts in tokens.
    pub(super) input_tokens: u32,
    /// Whether that is an estimate, and the engines may have more of the prompt than what was hashed.
    pub(super) is_incomplete: bool,
    /// Beginnings of the text of a long prompt.
    pub(super) text_prefixes: Vec<TextPrefix>,
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
        let extras = BlockExtraKeys::of_body(&self.body, self.may_change_hashes);
        let extent = self.extent(&extras);
        let mut tokens_by_engine: Vec<(EngineKind, Vec<PromptTokens>)> = Vec::new();
        let mut hashed = Vec::with_capacity(self.groups.len());
        for (group, tokenizer) in &self.groups {
            let Some(schemes) = group.keyspace.schemes(&extras) else { continue };
            let same = tokens_by_engine.iter().position(|(engine, _)| *engine == group.engine);
            let mut engine_tokens = match same {
                Some(position) => tokens_by_engine.remove(position),
                None => {
                    let body = (self.api, &*self.body);
                    let (tokenizer, media) = (tokenizer.clone(), self.media.as_ref());
                    (group.engine, PromptTokens::of(body, tokenizer, group, media, extent)?)
                }
            };
            let limit = self.limits.for_engine(group.engine).unwrap_or(usize::MAX);
            let hash = |tokens: &PromptTokens| {
                let blocks = |names_objects, scheme| {
                    let hash_use = HashUse { keyspace: &group.keyspace, names_objects };
                    tokens.blocks(&self.prefixes, hash_use, scheme, extras.is_empty())
                };
                let mut prompt = HashedPrompt::new(tokens, group, &schemes, limit, blocks);
                if self.index.has_special_caches() {
                    prompt.chunks = chunks(tokens, group);
                }
                prompt
            };
            let prompts = engine_tokens.1.iter_mut().map(|tokens| self.hash_as_needed(tokens, hash));
            hashed.push(HashedGroup { group: group.clone(), prompts: prompts.collect::<Result<_, _>>()? });
            tokens_by_engine.push(engine_tokens);
        }
        let Some((_, prompts)) = tokens_by_engine.last() else {
            return Err(PredictionError::InsufficientCacheInfo);
        };
        let text_prefixes = self.text_prefixes(prompts)?;
        let input_tokens = match text_prefixes.last() {
            Some(whole) => whole.tokens,
            None => saturating(prompts.iter().map(PromptTokens::expected_len).sum()),
        };
        Ok(HashedQuery {
            input_tokens,
            is_incomplete: tokens_by_engine
                .iter()
                .any(|(_, all)| all.iter().any(PromptTokens::is_incomplete)),
            media: prompts.first().map_or(MediaCounts::default(), PromptTokens::media),
            tokenized_by: prompts.first().map_or(TokenSource::Client, PromptTokens::tokenized_by),
            text_prefixes,
            groups: hashed,
        })
    }

    /// How much of a text is tokenized. Only of engines whose hits are prefixes of full blocks in the index is it known that they have no
    /// more of a prompt once they lack a block.
    fn extent(&self, extras: &BlockExtraKeys<'_>) -> PromptExtent {
        let may_stop = extras.is_empty()
            && self.limits == ReuseLimits::default()
            && !self.index.has_special_caches()
            && self.groups.iter().all(|(group, _)| !group.has_checkpoints);
        if may_stop { self.extent } else { PromptExtent::Complete }
    }

    /// Hashes a prompt, of a text as much as an engine may have, and what an earlier prompt had in common with it.
    fn hash_as_needed(
        &self,
        tokens: &mut PromptTokens,
        hash: impl Fn(&PromptTokens) -> HashedPrompt,
    ) -> Result<HashedPrompt, PredictionError> {
        if let PromptTokens::Text(text) = tokens {
            let seen = self.seen.count(text.prefix_keys());
            tokenize_to(text, seen.max(FIRST_SEGMENTS))?;
        }
        // Growing steps, so that the beginning is not hashed often.
        let mut step = 1;
        loop {
            let hashed = hash(tokens);
            match tokens {
                PromptTokens::Text(text) if !text.is_complete() && hashed.is_known(&self.index) => {
                    tokenize_to(text, text.tokenized_segments() + step)?;
                    step *= 2;
                }
                _ => return Ok(hashed),
            }
        }
    }

    /// The beginnings of a long text, with which later prompts are compared.
    fn text_prefixes(&self, prompts: &[PromptTokens]) -> Result<Vec<TextPrefix>, PredictionError> {
        let [PromptTokens::Text(text)] = prompts else { return Ok(Vec::new()) };
        self.seen.add(text.prefix_keys());
        if text.is_complete() && text.tokenized_segments() <= FIRST_SEGMENTS {
            return Ok(Vec::new());
        }
        let prefixes = text.prefixes().map_err(PredictionError::Prompt)?.into_iter();
        Ok(prefixes.map(|prefix| TextPrefix { key: prefix.key, tokens: saturating(prefix.tokens) }).collect())
    }
}

fn tokenize_to(text: &mut PromptText, segments: usize) -> Result<(), PredictionError> {
    text.tokenize(segments).map_err(PredictionError::Prompt)
}

fn saturating(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
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
        let has_more = matches!(tokens, PromptTokens::Text(text) if !text.is_complete());
        // An engine always computes at least one token of the prompt.
        let reusable_tokens = tokens.len().saturating_sub(usize::from(!has_more)).min(limit);
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
            chunks: Vec::new(),
        }
    }

    /// Whether an engine, or the store, may have all of these blocks.
    fn is_known(&self, index: &KvIndex) -> bool {
        let has_last = |blocks: &KeyedBlocks| blocks.keys.last().is_none_or(|last| index.is_known(*last));
        has_last(&self.engine_blocks) || self.store_blocks.as_ref().is_some_and(has_last)
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
