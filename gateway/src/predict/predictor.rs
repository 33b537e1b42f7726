//! Predicts how much of a request's prompt each engine has.

use std::sync::Arc;

use bytes::Bytes;
use moongate_block_hash::HashedBlock;
use moongate_discovery::EngineKind;
use moongate_scheduler::index::{EngineSlot, IndexLookup};
use moongate_scheduler::{CacheHitPrediction, InstanceIndex, TierHits};

use super::feeds::{StoreView, StoreViewStatus};
use super::hybrid_hits::HybridHits;
use super::models::ModelTokenizers;
use super::prompt_tokens::{
    PredictionError, PromptTokens, RequestPrompt, SharedPromptBlocks, TokenizerChoice,
};
use super::store_distance::{StoreDistance, StoredBlockSites};
use super::stored_blocks::StoredBlocks;
use super::tokenize::EngineTokenizer;
use crate::feedback::{ExpectedHits, StoredPrompt, TokenSource};
use crate::fleet::EngineGroup;
use crate::fleet::{FleetMember, FleetSnapshot};
use crate::kv_index::KvIndex;
use crate::kv_index::{BlockExtraKeys, BlockKeyspace};
use crate::memory::MemoryBudget;
use crate::request_body::InferenceApi;

/// Larger bodies are tokenized on a blocking thread: 100 KiB take about a millisecond.
const READ_INLINE: usize = 64 << 10;

/// Memory per byte of a body while it is tokenized, and per JSON value in it.
const BYTES_PER_BODY_BYTE: usize = 6;
const BYTES_PER_VALUE: usize = 200;

/// Predicts cache hits of requests.
#[derive(Debug)]
pub(crate) struct CacheHitPredictor {
    index: Arc<KvIndex>,
    models: Arc<ModelTokenizers>,
    engines: EngineTokenizer,
    store: Option<Arc<StoreView>>,
    /// Budget for long prompts that are being tokenized.
    memory: Arc<MemoryBudget>,
}

/// Predicted cache hits of one request.
#[derive(Debug, Clone, Default)]
pub(crate) struct PromptPrediction {
    /// Exact number of prompt tokens.
    pub(crate) input_tokens: u32,
    pub(crate) tokenized_by: TokenSource,
    /// By the engine's slot in the index.
    by_slot: Vec<EngineHitsInGroup>,
    /// By group: locations of the prompt's blocks in the store.
    block_sites: Vec<StoredBlockSites>,
    /// By group: the prompt's blocks as objects of the store.
    stored: Vec<Option<StoredBlocks>>,
    /// Keys of the prompt's blocks in the first group.
    pages: Arc<[u64]>,
    /// Size of these blocks in tokens.
    page_tokens: u32,
}

/// Hits of one engine.
#[derive(Debug, Clone, Copy, Default)]
struct EngineHitsInGroup {
    hits: TierHits,
    /// Position of the engine's group among those with a prediction.
    group: usize,
}

/// The prompt of a body, to be hashed for a fleet's groups of engines.
struct PredictionQuery {
    api: InferenceApi,
    body: Bytes,
    /// Each with its source of tokens.
    groups: Vec<(Arc<EngineGroup>, TokenizerChoice)>,
}

/// A prompt with its blocks under every keyspace.
struct HashedQuery {
    /// Length of the prompt in tokens.
    input_tokens: u32,
    tokenized_by: TokenSource,
    prompts: Vec<HashedPrompt>,
}

/// The blocks of a prompt under one keyspace.
struct HashedPrompt {
    group: Arc<EngineGroup>,
    engine_blocks: KeyedBlocks,
    /// The same blocks as the store names them, if that differs.
    store_blocks: Option<KeyedBlocks>,
}

/// The blocks that can be taken from a cache.
struct KeyedBlocks {
    blocks: SharedPromptBlocks,
    /// Keys in the index; possibly fewer than blocks.
    keys: Vec<u64>,
}

impl CacheHitPredictor {
    pub(crate) fn new(
        index: Arc<KvIndex>,
        models: Arc<ModelTokenizers>,
        engines: EngineTokenizer,
        store: Option<Arc<StoreView>>,
        memory: Arc<MemoryBudget>,
    ) -> Self {
        Self { index, models, engines, store, memory }
    }

    /// Status of the store view; `None` without a store.
    pub(crate) fn store_status(&self) -> Option<StoreViewStatus> {
        self.store.as_ref().map(|store| store.status())
    }

    /// Predicts the hits of each engine that serves the prompt's model.
    pub(crate) async fn predict(
        &self,
        fleet: &FleetSnapshot,
        prompt: RequestPrompt<'_>,
    ) -> Result<PromptPrediction, PredictionError> {
        let RequestPrompt { api, model, fields, body } = prompt;
        let groups = fleet.groups(model);
        if groups.is_empty() {
            return Err(PredictionError::InsufficientCacheInfo);
        }
        let has_events = self.has_event_source(groups);
        let should_query =
            |group: &EngineGroup| has_events && group.keyspace.schemes(&BlockExtraKeys::read(body)).is_some();
        let groups = self.tokenizers(fleet, prompt, should_query).await;
        // Fails before a long text is parsed in vain.
        if let (0, Some(error)) = (fields.prompt_ids, no_tokenizer_error(&groups)) {
            return Err(error);
        }
        let query = PredictionQuery { api, body: body.clone(), groups };
        let HashedQuery { input_tokens, tokenized_by, prompts: hashed } = if body.len() <= READ_INLINE {
            query.hash()?
        } else {
            // Fails only at shutdown, when the result is no longer needed.
            let memory = self.memory.clone();
            let read = move || {
                let _reserved = memory
                    .reserve(reading_bytes(&query.body))
                    .map_err(|_| PredictionError::PromptMemoryExhausted)?;
                query.hash()
            };
            tokio::task::spawn_blocking(read).await.unwrap_or(Err(PredictionError::InsufficientCacheInfo))?
        };
        let mut predicted = PromptPrediction { input_tokens, tokenized_by, ..PromptPrediction::default() };
        if let Some(HashedPrompt { group, engine_blocks, .. }) = hashed.first() {
            predicted.pages = engine_blocks.keys.as_slice().into();
            predicted.page_tokens = group.keyspace.page_tokens();
        }
        let (mut hits, mut store_hits) = (IndexLookup::default(), IndexLookup::default());
        for (position, HashedPrompt { group, engine_blocks, store_blocks }) in hashed.iter().enumerate() {
            if let (Some(store), Some(layout)) = (&self.store, &group.store_naming) {
                let KeyedBlocks { blocks, keys } = store_blocks.as_ref().unwrap_or(engine_blocks);
                store.confirm(layout, &blocks.blocks()[..keys.len()], keys).await;
            }
            self.index.lookup(&engine_blocks.keys, &mut hits);
            if let Some(store_blocks) = store_blocks {
                self.index.lookup(&store_blocks.keys, &mut store_hits);
            }
            let mut hybrid =
                HybridHits::new(&self.index, &group.keyspace, &engine_blocks.blocks, input_tokens);
            for engine in &group.engines {
                let mut blocks = hits.engine(engine.slot);
                let cache_groups = engine.groups.of_hybrid();
                if !cache_groups.is_empty() {
                    let hits =
                        engine.hits(hybrid.of(engine.slot, &cache_groups), group.keyspace.page_tokens());
                    predicted.set_hits(engine.slot, EngineHitsInGroup { hits, group: position });
                    continue;
                }
                if store_blocks.is_some() {
                    // No engine has blocks with the store's names, so the store's run starts at the beginning of the prompt.
                    blocks.shared = store_hits.engine(engine.slot).shared.saturating_sub(blocks.local);
                }
                let hits = engine.hits(blocks, group.keyspace.page_tokens());
                predicted.set_hits(engine.slot, EngineHitsInGroup { hits, group: position });
            }
            let runs = if store_blocks.is_some() { &store_hits.shared } else { &hits.shared };
            let sites = |store: &Arc<StoreView>| {
                StoredBlockSites::of(runs, group.keyspace.page_tokens(), fleet, store)
            };
            let blocks = &store_blocks.as_ref().unwrap_or(engine_blocks).blocks;
            predicted.stored.push(group.store_naming.as_ref().map(|naming| StoredBlocks {
                naming: naming.clone(),
                blocks: blocks.clone(),
                tokens: input_tokens,
            }));
            predicted.block_sites.push(self.store.as_ref().map(sites).unwrap_or_default());
        }
        Ok(predicted)
    }

    /// Tokens of a prompt for each kind of engine, by its name.
    pub(crate) async fn tokens(
        &self,
        fleet: &FleetSnapshot,
        prompt: RequestPrompt<'_>,
    ) -> Result<Vec<(&'static str, Vec<u32>)>, PredictionError> {
        let groups = self.tokenizers(fleet, prompt, |_| true).await;
        let (api, body, memory) = (prompt.api, prompt.body.clone(), self.memory.clone());
        let make = move || {
            let _reserved =
                memory.reserve(reading_bytes(&body)).map_err(|_| PredictionError::PromptMemoryExhausted)?;
            let mut tokens_by_engine: Vec<(&str, Vec<u32>)> = Vec::new();
            for (group, tokenizer) in groups {
                let name = group.engine.as_str();
                if !tokens_by_engine.iter().any(|(engine, _)| *engine == name) {
                    tokens_by_engine.push((name, PromptTokens::of(api, &body, tokenizer)?.to_vec()));
                }
            }
            Ok(tokens_by_engine)
        };
        // Fails only at shutdown, when the result is no longer needed.
        tokio::task::spawn_blocking(make).await.unwrap_or(Err(PredictionError::InsufficientCacheInfo))
    }

    /// The groups of engines that serve the prompt's model, each with its source of tokens. Without a local tokenizer, an engine is queried if
    /// `should_query` returns true for the group.
    async fn tokenizers(
        &self,
        fleet: &FleetSnapshot,
        prompt: RequestPrompt<'_>,
        should_query: impl Fn(&EngineGroup) -> bool,
    ) -> Vec<(Arc<EngineGroup>, TokenizerChoice)> {
        let name = fleet.model_name(prompt.model).map_or("", AsRef::as_ref);
        let deadline = self.engines.deadline();
        let mut with_tokenizer: Vec<(Arc<EngineGroup>, TokenizerChoice)> = Vec::new();
        for group in fleet.groups(prompt.model) {
            let same = with_tokenizer.iter().find(|(other, _)| other.engine == group.engine);
            let tokenizer = if let Some((_, tokenizer)) = same {
                tokenizer.clone()
            } else if let Some(model) = self.models.get(name, group.engine) {
                TokenizerChoice::Local(model)
            } else if prompt.fields.prompt_ids > 0 {
                TokenizerChoice::Unavailable(PredictionError::NoTokenizer)
            } else if !should_query(group) {
                TokenizerChoice::Unavailable(PredictionError::InsufficientCacheInfo)
            } else {
                match self.engines.tokens(fleet, prompt, group.engine, deadline).await {
                    Ok(tokens) => TokenizerChoice::Engine(tokens),
                    Err(error) => TokenizerChoice::Unavailable(error),
                }
            };
            with_tokenizer.push((group.clone(), tokenizer));
        }
        with_tokenizer
    }

    /// Whether anything is known of these engines' caches: otherwise tokens would be useless.
    fn has_event_source(&self, groups: &[Arc<EngineGroup>]) -> bool {
        groups.iter().any(|group| group.publishes || (group.store_naming.is_some() && self.store.is_some()))
    }
}

/// Upper limit of the memory to tokenize a body: its values, the rendered text, its pieces and the tokens, each about as long as
/// the body; and the overhead per value. Commas inside strings are counted too, which overestimates.
fn reading_bytes(body: &[u8]) -> usize {
    let values = body.iter().filter(|byte| matches!(byte, b',' | b'{' | b'[')).count();
    BYTES_PER_BODY_BYTE * body.len() + BYTES_PER_VALUE * values
}

/// Why no group has a source of tokens.
fn no_tokenizer_error(groups: &[(Arc<EngineGroup>, TokenizerChoice)]) -> Option<PredictionError> {
    let mut reasons = groups.iter().map(|(_, tokenizer)| match tokenizer {
        TokenizerChoice::Unavailable(error) => Some(error.clone()),
        TokenizerChoice::Local(_) | TokenizerChoice::Engine(_) => None,
    });
    let first = reasons.next()??;
    reasons.all(|error| error.is_some()).then_some(first)
}

impl PredictionQuery {
    fn hash(self) -> Result<HashedQuery, PredictionError> {
        let extras = BlockExtraKeys::read(&self.body);
        let (mut input_tokens, mut tokenized_by) = (0, TokenSource::Client);
        let mut tokens_by_engine: Vec<(EngineKind, PromptTokens)> = Vec::new();
        let mut hashed = Vec::with_capacity(self.groups.len());
        for (group, tokenizer) in self.groups {
            let Some(schemes) = group.keyspace.schemes(&extras) else { continue };
            if !tokens_by_engine.iter().any(|(engine, _)| *engine == group.engine) {
                tokens_by_engine.push((group.engine, PromptTokens::of(self.api, &self.body, tokenizer)?));
            }
            let Some((_, tokens)) = tokens_by_engine.iter().find(|(engine, _)| *engine == group.engine)
            else {
                continue;
            };
            input_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            tokenized_by = tokens.tokenized_by();
            let name = |scheme| {
                let blocks = tokens.blocks(&group.keyspace, scheme, extras.is_empty());
                let usable = reusable_blocks(blocks.blocks(), tokens.len(), &group.keyspace);
                let keys =
                    usable.iter().map(|block| group.keyspace.namespace().key(block.event_hash)).collect();
                KeyedBlocks { blocks, keys }
            };
            let (engine_blocks, store_blocks) = (name(schemes.events), schemes.store.map(name));
            hashed.push(HashedPrompt { group, engine_blocks, store_blocks });
        }
        if hashed.is_empty() {
            Err(PredictionError::InsufficientCacheInfo)
        } else {
            Ok(HashedQuery { input_tokens, tokenized_by, prompts: hashed })
        }
    }
}

/// Blocks that an engine can take from a cache: it always computes at least one token of the prompt.
fn reusable_blocks<'a>(
    blocks: &'a [HashedBlock],
    tokens: usize,
    keyspace: &BlockKeyspace,
) -> &'a [HashedBlock] {
    let limit = tokens.saturating_sub(1) / keyspace.page_tokens().max(1) as usize;
    &blocks[..limit.min(blocks.len())]
}

impl PromptPrediction {
    fn set_hits(&mut self, slot: EngineSlot, hits: EngineHitsInGroup) {
        if self.by_slot.len() <= slot.as_usize() {
            self.by_slot.resize(slot.as_usize() + 1, Default::default());
        }
        self.by_slot[slot.as_usize()] = hits;
    }

    fn of(&self, member: &FleetMember) -> EngineHitsInGroup {
        let hits = member.slot().and_then(|slot| self.by_slot.get(slot.slot().as_usize()));
        hits.copied().unwrap_or_default()
    }

    /// The hits that an engine should report, if the request goes there.
    pub(crate) fn expected_hits(&self, member: &FleetMember) -> ExpectedHits {
        ExpectedHits { hits: self.of(member).hits, input_tokens: self.input_tokens }
    }

    /// The prompt's objects in the store of the engine that computes it; `None` without a store.
    pub(crate) fn stored_prompt(&self, engine: EngineSlot) -> Option<Box<dyn StoredPrompt>> {
        let EngineHitsInGroup { group, .. } = self.by_slot.get(engine.as_usize())?;
        let stored = self.stored.get(*group)?.clone()?;
        Some(Box::new(stored))
    }

    /// The hits in the order of a fleet's cluster.
    pub(crate) fn for_fleet(&self, fleet: &FleetSnapshot) -> CacheHitPrediction {
        let of_members = || fleet.members.iter().map(|member| self.of(member));
        let distance = StoreDistance::new(&self.block_sites, fleet).map(|mut distance| {
            InstanceIndex::all()
                .zip(of_members())
                .map(|(engine, EngineHitsInGroup { hits, group })| {
                    distance.network_distance(engine, group, hits)
                })
                .collect()
        });
        CacheHitPrediction {
            per_instance: of_members().map(|member| member.hits).collect(),
            network_distance: distance.unwrap_or_default(),
            pages: self.pages.clone(),
            page_tokens: self.page_tokens,
            ..CacheHitPrediction::default()
        }
    }
}
