//! How much of a request's prompt each engine has.

use std::sync::Arc;

use bytes::Bytes;
use moongate_block_hash::HashedBlock;
use moongate_discovery::EngineKind;
use moongate_scheduler::index::{EngineSlot, IndexLookup};
use moongate_scheduler::{CacheHitPrediction, ModelIndex, TierHits};

use super::block_keyspace::{BlockExtraKeys, BlockKeyspace, SGLANG, VLLM};
use super::feeds::{StoreView, StoreViewStatus};
use super::group::EngineGroup;
use super::index::KvIndex;
use super::models::ModelTokenizers;
use super::prompt_tokens::{PredictionError, PromptTokens, SharedPromptBlocks, TokenizerChoice};
use super::store_distance::{StoreDistance, StoredBlockSites};
use super::tokenize::EngineTokenizer;
use crate::feedback::{ExpectedHits, TokenSource};
use crate::fleet::{FleetMember, FleetSnapshot};
use crate::memory::MemoryBudget;
use crate::request_body::{InferenceApi, RoutingFields};

/// Bodies above this size are read on a thread for blocking work: tokenising 100 KiB takes about a millisecond.
const READ_INLINE: usize = 64 << 10;

/// Memory that a byte of a body takes until its tokens are made, and each value in it besides.
const BYTES_PER_BODY_BYTE: usize = 6;
const BYTES_PER_VALUE: usize = 200;

/// Predicts cache hits.
#[derive(Debug)]
pub(crate) struct CacheHitPredictor {
    index: Arc<KvIndex>,
    models: Arc<ModelTokenizers>,
    engines: EngineTokenizer,
    store: Option<Arc<StoreView>>,
    /// For long prompts that are being read.
    memory: Arc<MemoryBudget>,
}

/// Cache hits of one request.
#[derive(Debug, Clone, Default)]
pub(crate) struct PromptPrediction {
    /// Prompt tokens, exactly.
    pub(crate) input_tokens: u32,
    pub(crate) tokenized_by: TokenSource,
    /// By the engine's slot in the index, with the number of its group.
    by_slot: Vec<(TierHits, usize)>,
    /// By group: where the store has the prompt's pages.
    block_sites: Vec<StoredBlockSites>,
    /// The prompt's pages as the first group of engines names them, with their size in tokens.
    pages: (Arc<[u64]>, u32),
}

/// One question: the prompt of a body under the keyspaces of a fleet's engines.
struct PredictionQuery {
    api: InferenceApi,
    body: Bytes,
    /// Each with who makes tokens of the body as its engines do.
    groups: Vec<(Arc<EngineGroup>, TokenizerChoice)>,
}

/// The pages of a prompt under one keyspace.
struct HashedPrompt {
    group: Arc<EngineGroup>,
    engine_blocks: KeyedBlocks,
    /// The same pages as the store names them, where that differs.
    store_blocks: Option<KeyedBlocks>,
}

/// The pages that can be taken from a cache.
struct KeyedBlocks {
    pages: SharedPromptBlocks,
    /// As the index knows them; there may be fewer than pages.
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

    /// What is known of the store; `None` if the gateway knows none.
    pub(crate) fn store_status(&self) -> Option<StoreViewStatus> {
        self.store.as_ref().map(|store| store.status())
    }

    /// What each engine that serves `model` has of the prompt in `body`, which begins as `head` says.
    pub(crate) async fn predict(
        &self,
        fleet: &FleetSnapshot,
        api: InferenceApi,
        model: ModelIndex,
        head: &RoutingFields<'_>,
        body: &Bytes,
    ) -> Result<PromptPrediction, PredictionError> {
        let groups = fleet.groups(model);
        if groups.is_empty() {
            return Err(PredictionError::InsufficientCacheInfo);
        }
        let is_fed = self.has_event_source(groups);
        let ask =
            |group: &EngineGroup| is_fed && group.keyspace.schemes(&BlockExtraKeys::read(body)).is_some();
        let groups = self.tokenizers(fleet, (api, body), model, head, ask).await;
        // Known before a long text is read for nothing.
        if let (0, Some(why)) = (head.prompt_ids, no_tokenizer_error(&groups)) {
            return Err(why);
        }
        let question = PredictionQuery { api, body: body.clone(), groups };
        let (input_tokens, tokenized_by, hashed) = if body.len() <= READ_INLINE {
            question.hash()?
        } else {
            // It only fails at shutdown, when nobody wants the answer.
            let memory = self.memory.clone();
            let read = move || {
                let _reserved = memory
                    .reserve(reading_bytes(&question.body))
                    .map_err(|_| PredictionError::PromptMemoryExhausted)?;
                question.hash()
            };
            tokio::task::spawn_blocking(read).await.unwrap_or(Err(PredictionError::InsufficientCacheInfo))?
        };
        let mut predicted = PromptPrediction { input_tokens, tokenized_by, ..PromptPrediction::default() };
        if let Some(HashedPrompt { group, engine_blocks: own, .. }) = hashed.first() {
            predicted.pages = (own.keys.as_slice().into(), group.keyspace.page_tokens());
        }
        let (mut hits, mut in_store) = (IndexLookup::default(), IndexLookup::default());
        for (number, HashedPrompt { group, engine_blocks: own, store_blocks: stored }) in
            hashed.iter().enumerate()
        {
            if let (Some(store), Some(layout)) = (&self.store, &group.store_naming) {
                let KeyedBlocks { pages, keys } = stored.as_ref().unwrap_or(own);
                store.confirm(layout, &pages.pages()[..keys.len()], keys).await;
            }
            self.index.lookup(&own.keys, &mut hits);
            if let Some(stored) = stored {
                self.index.lookup(&stored.keys, &mut in_store);
            }
            for engine in &group.engines {
                let mut pages = hits.engine(engine.slot);
                if stored.is_some() {
                    // Nobody has pages of that name, so the store's begin with the prompt.
                    pages.shared = in_store.engine(engine.slot).shared.saturating_sub(pages.local);
                }
                predicted.set_hits(engine.slot, engine.hits(pages, group.keyspace.page_tokens()), number);
            }
            let runs = if stored.is_some() { &in_store.shared } else { &hits.shared };
            let at = |store: &Arc<StoreView>| {
                StoredBlockSites::of(runs, group.keyspace.page_tokens(), fleet, store)
            };
            predicted.block_sites.push(self.store.as_ref().map(at).unwrap_or_default());
        }
        Ok(predicted)
    }

    /// The tokens that each kind of engine makes of the prompt in `body`, by the engine's name.
    pub(crate) async fn tokens(
        &self,
        fleet: &FleetSnapshot,
        api: InferenceApi,
        model: ModelIndex,
        head: &RoutingFields<'_>,
        body: &Bytes,
    ) -> Result<Vec<(&'static str, Vec<u32>)>, PredictionError> {
        let groups = self.tokenizers(fleet, (api, body), model, head, |_| true).await;
        let (body, memory) = (body.clone(), self.memory.clone());
        let make = move || {
            let _reserved =
                memory.reserve(reading_bytes(&body)).map_err(|_| PredictionError::PromptMemoryExhausted)?;
            let mut made: Vec<(&str, Vec<u32>)> = Vec::new();
            for (group, tokenizer) in groups {
                let name = match group.engine {
                    EngineKind::Sglang => SGLANG,
                    EngineKind::Vllm => VLLM,
                };
                if !made.iter().any(|(engine, _)| *engine == name) {
                    made.push((name, PromptTokens::of(api, &body, tokenizer)?.to_vec()));
                }
            }
            Ok(made)
        };
        // It only fails at shutdown, when nobody wants the answer.
        tokio::task::spawn_blocking(make).await.unwrap_or(Err(PredictionError::InsufficientCacheInfo))
    }

    /// The groups of engines that serve `model`, each with who makes tokens of a body as they do. Where nobody can here, an engine is
    /// asked, if `ask` says that it is worth it.
    async fn tokenizers(
        &self,
        fleet: &FleetSnapshot,
        body: (InferenceApi, &Bytes),
        model: ModelIndex,
        head: &RoutingFields<'_>,
        ask: impl Fn(&EngineGroup) -> bool,
    ) -> Vec<(Arc<EngineGroup>, TokenizerChoice)> {
        let name = fleet.model_name(model).map_or("", AsRef::as_ref);
        let deadline = self.engines.deadline();
        let mut with_tokenizer: Vec<(Arc<EngineGroup>, TokenizerChoice)> = Vec::new();
        for group in fleet.groups(model) {
            let same = with_tokenizer.iter().find(|(other, _)| other.engine == group.engine);
            let tokenizer = if let Some((_, tokenizer)) = same {
                tokenizer.clone()
            } else if let Some(model) = self.models.get(name, group.engine) {
                TokenizerChoice::Local(model)
            } else if head.prompt_ids > 0 {
                TokenizerChoice::Unavailable(PredictionError::NoTokenizer)
            } else if !ask(group) {
                TokenizerChoice::Unavailable(PredictionError::InsufficientCacheInfo)
            } else {
                match self.engines.tokens(fleet, model, group.engine, body, deadline).await {
                    Ok(told) => TokenizerChoice::Engine(told),
                    Err(why) => TokenizerChoice::Unavailable(why),
                }
            };
            with_tokenizer.push((group.clone(), tokenizer));
        }
        with_tokenizer
    }

    /// Whether anything can be known of what these engines cache: otherwise their tokens are worth no question.
    fn has_event_source(&self, groups: &[Arc<EngineGroup>]) -> bool {
        groups.iter().any(|group| group.publishes || (group.store_naming.is_some() && self.store.is_some()))
    }
}

/// Memory to make tokens of a body, at most: its values, the rendered text, its pieces, and the tokens, about as long as the body each;
/// and what each value costs besides its text. Commas inside texts are counted too, which errs on the safe side.
fn reading_bytes(body: &[u8]) -> usize {
    let values = body.iter().filter(|byte| matches!(byte, b',' | b'{' | b'[')).count();
    BYTES_PER_BODY_BYTE * body.len() + BYTES_PER_VALUE * values
}

/// Why nobody makes tokens for any of the groups.
fn no_tokenizer_error(groups: &[(Arc<EngineGroup>, TokenizerChoice)]) -> Option<PredictionError> {
    let mut reasons = groups.iter().map(|(_, tokenizer)| match tokenizer {
        TokenizerChoice::Unavailable(why) => Some(why.clone()),
        TokenizerChoice::Local(_) | TokenizerChoice::Engine(_) => None,
    });
    let first = reasons.next()??;
    reasons.all(|why| why.is_some()).then_some(first)
}

impl PredictionQuery {
    /// The prompt's length in tokens, who has made them, and its pages under every keyspace.
    fn hash(self) -> Result<(u32, TokenSource, Vec<HashedPrompt>), PredictionError> {
        let extras = BlockExtraKeys::read(&self.body);
        let (mut input_tokens, mut tokenized_by) = (0, TokenSource::Client);
        let mut made: Vec<(EngineKind, PromptTokens)> = Vec::new();
        let mut hashed = Vec::with_capacity(self.groups.len());
        for (group, tokenizer) in self.groups {
            let Some(names) = group.keyspace.schemes(&extras) else { continue };
            if !made.iter().any(|(engine, _)| *engine == group.engine) {
                made.push((group.engine, PromptTokens::of(self.api, &self.body, tokenizer)?));
            }
            let Some((_, tokens)) = made.iter().find(|(engine, _)| *engine == group.engine) else { continue };
            input_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            tokenized_by = tokens.tokenized_by();
            let name = |scheme| {
                let pages = tokens.pages(&group.keyspace, scheme, extras.is_empty());
                let usable = reusable_blocks(pages.pages(), tokens.len(), &group.keyspace);
                let keys =
                    usable.iter().map(|page| group.keyspace.namespace().key(page.event_hash)).collect();
                KeyedBlocks { pages, keys }
            };
            let (own, stored) = (name(names.events), names.store.map(name));
            hashed.push(HashedPrompt { group, engine_blocks: own, store_blocks: stored });
        }
        if hashed.is_empty() {
            Err(PredictionError::InsufficientCacheInfo)
        } else {
            Ok((input_tokens, tokenized_by, hashed))
        }
    }
}

/// Pages that an engine can take from a cache: it always computes at least one token of the prompt.
fn reusable_blocks<'a>(
    pages: &'a [HashedBlock],
    tokens: usize,
    keyspace: &BlockKeyspace,
) -> &'a [HashedBlock] {
    let most = tokens.saturating_sub(1) / keyspace.page_tokens().max(1) as usize;
    &pages[..most.min(pages.len())]
}

impl PromptPrediction {
    fn set_hits(&mut self, slot: EngineSlot, hits: TierHits, group: usize) {
        if self.by_slot.len() <= slot.as_usize() {
            self.by_slot.resize(slot.as_usize() + 1, Default::default());
        }
        self.by_slot[slot.as_usize()] = (hits, group);
    }

    /// What one engine has of the prompt, and its group.
    fn of(&self, member: &FleetMember) -> (TierHits, usize) {
        self.by_slot.get(member.endpoint.index_slot.slot().as_usize()).copied().unwrap_or_default()
    }

    /// What an engine should report, if the request goes there.
    pub(crate) fn expected_hits(&self, member: &FleetMember) -> ExpectedHits {
        ExpectedHits { hits: self.of(member).0, input_tokens: self.input_tokens }
    }

    /// The hits in the order of a fleet's cluster.
    pub(crate) fn for_fleet(&self, fleet: &FleetSnapshot) -> CacheHitPrediction {
        let of_members = || fleet.members.iter().map(|member| self.of(member));
        let farness = StoreDistance::new(&self.block_sites, fleet).map(|mut reach| {
            of_members()
                .enumerate()
                .map(|(at, (hits, group))| reach.network_distance(at, group, hits))
                .collect()
        });
        CacheHitPrediction {
            per_instance: of_members().map(|(hits, _)| hits).collect(),
            farness: farness.unwrap_or_default(),
            pages: self.pages.0.clone(),
            page_tokens: self.pages.1,
            ..CacheHitPrediction::default()
        }
    }
}
