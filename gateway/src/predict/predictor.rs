//! Predicts how much of a request's prompt each engine has.

use std::sync::Arc;

use moongate_discovery::{EngineBlockHashing, EngineRole, PrefixCheckpoints};
use moongate_scheduler::index::{EngineHits, EngineSlot, IndexLookup};
use moongate_scheduler::{CacheHitPrediction, InstanceIndex, TextPrefix, TierHits};
use moongate_tokenize::PromptError;

use super::engine_hits::EngineHitsInGroup;
use super::feeds::{StoreView, StoreViewStatus};
use super::hashed_prefixes::HashedPrefixes;
use super::hybrid_hits::HybridHits;
use super::media::{self, MediaCounts, MediaLookup, MediaTokenCache};
use super::models::ModelTokenizers;
use super::prediction_query::{HashedGroup, HashedPrompt, HashedQuery, KeyedBlocks, PredictionQuery};
use super::prompt_threads::{PromptThreads, ReadTooLate, SHORT_PROMPT_BYTES, read_here};
use super::prompt_tokens::{PredictionError, PromptExtent, PromptTokens, RequestPrompt, TokenizerChoice};
use super::reuse_limit::ReuseLimits;
use super::seen_texts::SeenTexts;
use super::store_distance::{StoreDistance, StoredBlockSites};
use super::stored_blocks::StoredBlocks;
use super::tokenize::EngineTokenizer;
use crate::feedback::{ExpectedHits, PredictedEngine, StoredPrompt, TokenSource};
use crate::fleet::EngineGroup;
use crate::fleet::{FleetMember, FleetSnapshot};
use crate::kv_index::{BlockExtraKeys, CachedPrefix, KvIndex, LastBlockKeys, PromptCheckpoints};
use crate::memory::MemoryBudget;
use crate::request_body::MediaParts;

/// Memory per byte of a body while it is tokenized, and per JSON value in it.
const BYTES_PER_BODY_BYTE: usize = 6;
const BYTES_PER_VALUE: usize = 200;

/// Predicts cache hits of requests.
#[derive(Debug)]
pub(crate) struct CacheHitPredictor {
    index: Arc<KvIndex>,
    models: Arc<ModelTokenizers>,
    engines: Arc<EngineTokenizer>,
    media: Arc<MediaTokenCache>,
    store: Option<Arc<StoreView>>,
    resources: PromptResources,
}

/// With what prompts are tokenized and hashed.
#[derive(Debug)]
pub(crate) struct PromptResources {
    pub(crate) prefixes: Arc<HashedPrefixes>,
    pub(crate) threads: PromptThreads,
    /// Budget for prompts that are being tokenized.
    pub(crate) memory: Arc<MemoryBudget>,
    /// Whether every block of a prompt is needed, and not only those that engines may have.
    pub(crate) needs_all_blocks: bool,
    pub(crate) seen: Arc<SeenTexts>,
}

/// How exactly a prediction needs the length of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PromptLength {
    Exact,
    /// What no engine has of a long text need not be tokenized.
    Estimated,
}

/// Predicted cache hits of one request.
#[derive(Debug, Clone, Default)]
pub(crate) struct PromptPrediction {
    /// Number of prompt tokens, of all prompts of a batch: exact unless only the beginning was tokenized.
    pub(crate) input_tokens: u32,
    pub(crate) tokenized_by: TokenSource,
    pub(crate) media: MediaCounts,
    /// By the engine's slot in the index.
    by_slot: Vec<EngineHitsInGroup>,
    /// By group: locations of the prompt's blocks in the store.
    block_sites: Vec<StoredBlockSites>,
    /// By group: the prompt's blocks as objects of the store.
    stored: Vec<Option<StoredBlocks>>,
    /// By group: the last blocks of the prompt; `None` if they say nothing about what is kept of it.
    last_blocks: Vec<Option<LastBlockKeys>>,
    /// Keys of the prompt's blocks in the first group.
    pages: Arc<[u64]>,
    /// Size of these blocks in tokens.
    page_tokens: u32,
    /// Beginnings of the text of a long prompt.
    text_prefixes: Arc<[TextPrefix]>,
    /// Whether the model of an engine is hybrid.
    is_hybrid: bool,
    /// Whether the request has several prompts. The hits are then sums, and there are no blocks.
    is_batch: bool,
    /// Whether the hits are those before an image or other medium whose tokens are unknown, and the length is an estimate.
    is_incomplete: bool,
}

/// Lookups of one prompt's blocks, reused for the next.
#[derive(Default)]
struct TierLookups {
    engines: IndexLookup,
    store: IndexLookup,
    chunks: IndexLookup,
}

impl CacheHitPredictor {
    pub(crate) fn new(
        index: Arc<KvIndex>,
        models: Arc<ModelTokenizers>,
        engines: Arc<EngineTokenizer>,
        media: Arc<MediaTokenCache>,
        store: Option<Arc<StoreView>>,
        resources: PromptResources,
    ) -> Self {
        Self { index, models, engines, media, store, resources }
    }

    /// Status of the store view; `None` without a store.
    pub(crate) fn store_status(&self) -> Option<StoreViewStatus> {
        self.store.as_ref().map(|store| store.status())
    }

    /// Estimated tokens of the images, audio and video of a request for a model.
    pub(crate) fn media_tokens(&self, model: &str, parts: &MediaParts) -> u64 {
        media::estimate(parts, self.models.image_rule(model))
    }

    /// For the images, audio and video of a request; `None` if it has none.
    fn media_lookup(&self, fleet: &FleetSnapshot, prompt: RequestPrompt<'_>) -> Option<MediaLookup> {
        let parts = MediaParts::clone(prompt.fields.media.as_ref()?);
        let model = fleet.model_name(prompt.model)?.clone();
        Some(MediaLookup {
            cache: self.media.clone(),
            may_query: self.engines.may_render_media(fleet, prompt.model),
            rule: self.models.image_rule(&model),
            model,
            parts,
        })
    }

    /// Predicts the hits of each engine that serves the prompt's model.
    pub(crate) async fn predict(
        &self,
        fleet: &FleetSnapshot,
        prompt: RequestPrompt<'_>,
        length: PromptLength,
    ) -> Result<PromptPrediction, PredictionError> {
        let RequestPrompt { api, model, fields, body } = prompt;
        let groups = fleet.groups(model);
        if groups.is_empty() {
            return Err(PredictionError::InsufficientCacheInfo);
        }
        let has_events = self.has_event_source(groups);
        let may_change_hashes = fields.may_change_hashes;
        let should_query = |group: &EngineGroup| {
            let extras = BlockExtraKeys::of_body(body, may_change_hashes);
            has_events && group.keyspace.schemes(&extras).is_some()
        };
        let groups = self.tokenizers(fleet, prompt, should_query).await;
        // Fails before a long text is parsed in vain.
        if let (0, Some(error)) = (fields.prompt_ids, no_tokenizer_error(&groups)) {
            return Err(error);
        }
        let limits = ReuseLimits::read(api, fields, body);
        let media = self.media_lookup(fleet, prompt);
        let prefixes = self.resources.prefixes.clone();
        let needs_all =
            length == PromptLength::Exact || self.resources.needs_all_blocks || self.store.is_some();
        let query = PredictionQuery {
            api,
            body: body.clone(),
            may_change_hashes,
            groups,
            limits,
            media,
            prefixes,
            index: self.index.clone(),
            extent: if needs_all { PromptExtent::Complete } else { PromptExtent::AsNeeded },
            seen: self.resources.seen.clone(),
        };
        let hashed = self.read(body, may_read_here(body, &query.groups), move || query.hash()).await?;
        Ok(self.look_up(fleet, &hashed).await)
    }

    /// Reads a prompt `here` or on one of the threads for that, within the memory for prompts.
    async fn read<T: Send + 'static>(
        &self,
        body: &[u8],
        here: bool,
        read: impl FnOnce() -> Result<T, PredictionError> + Send + 'static,
    ) -> Result<T, PredictionError> {
        let reserved = self.resources.memory.reserve(reading_bytes(body));
        let reserved = reserved.map_err(|_| PredictionError::PromptMemoryExhausted)?;
        let read = move || {
            let read = read();
            drop(reserved);
            read
        };
        let result = if here { read_here(read) } else { self.resources.threads.run(body.len(), read).await };
        result.unwrap_or_else(|ReadTooLate| Err(PredictionError::Late))
    }

    /// Finds what each engine has of the prompts.
    async fn look_up(&self, fleet: &FleetSnapshot, hashed: &HashedQuery) -> PromptPrediction {
        let HashedQuery { input_tokens, is_incomplete, media, tokenized_by, .. } = *hashed;
        let HashedQuery { groups, text_prefixes, .. } = hashed;
        let mut predicted = PromptPrediction {
            input_tokens,
            is_incomplete,
            media,
            tokenized_by,
            text_prefixes: text_prefixes.as_slice().into(),
            ..PromptPrediction::default()
        };
        let mut lookups = TierLookups::default();
        for (position, HashedGroup { group, prompts }) in groups.iter().enumerate() {
            let [prompt] = prompts.as_slice() else {
                // What a prompt of a batch shares only with an earlier one is not counted: engines may compute both at once.
                predicted.is_batch = true;
                for prompt in prompts {
                    self.add_hits(group, position, prompt, &mut lookups, &mut predicted);
                }
                predicted.last_blocks.push(None);
                predicted.stored.push(None);
                predicted.block_sites.push(StoredBlockSites::default());
                continue;
            };
            let HashedPrompt { engine_blocks, store_blocks, reusable_tokens, .. } = prompt;
            // A request for log probabilities reuses less of its prompt than the next one can.
            let is_unlimited = !is_incomplete && *reusable_tokens + 1 == input_tokens as usize;
            predicted.last_blocks.push(is_unlimited.then(|| {
                let blocks = engine_blocks.blocks.blocks();
                LastBlockKeys::of(blocks, engine_blocks.keys.len(), &group.keyspace)
            }));
            if position == 0 {
                predicted.pages = engine_blocks.keys.as_slice().into();
                predicted.page_tokens = group.keyspace.page_tokens();
            }
            let KeyedBlocks { blocks, keys } = store_blocks.as_ref().unwrap_or(engine_blocks);
            if let (Some(store), Some(layout)) = (&self.store, &group.store_naming) {
                store.confirm(layout, &blocks.blocks()[..keys.len()], keys).await;
            }
            self.add_hits(group, position, prompt, &mut lookups, &mut predicted);
            let runs = if store_blocks.is_some() { &lookups.store.shared } else { &lookups.engines.shared };
            let sites = |store: &Arc<StoreView>| {
                StoredBlockSites::of(runs, group.keyspace.page_tokens(), fleet, store)
            };
            let naming = group.store_naming.as_ref().filter(|_| !is_incomplete);
            predicted.stored.push(naming.map(|naming| StoredBlocks {
                naming: naming.clone(),
                blocks: blocks.clone(),
                tokens: input_tokens,
            }));
            predicted.block_sites.push(self.store.as_ref().map(sites).unwrap_or_default());
        }
        predicted
    }

    /// Adds the hits of one prompt in the engines of a group.
    fn add_hits(
        &self,
        group: &EngineGroup,
        position: usize,
        prompt: &HashedPrompt,
        lookups: &mut TierLookups,
        predicted: &mut PromptPrediction,
    ) {
        let HashedPrompt { engine_blocks, store_blocks, reusable_tokens, chunks } = prompt;
        self.index.lookup(&engine_blocks.keys, &mut lookups.engines);
        if let Some(store_blocks) = store_blocks {
            self.index.lookup(&store_blocks.keys, &mut lookups.store);
        }
        let reusable_tokens = u32::try_from(*reusable_tokens).unwrap_or(u32::MAX);
        let mut hybrid =
            HybridHits::new(&self.index, &group.keyspace, &engine_blocks.blocks, reusable_tokens);
        // Most engines of a large fleet have nothing of a prompt.
        let skips_others = position == 0 && store_blocks.is_none() && !self.index.has_special_caches();
        for engine in &group.engines {
            let mut blocks = lookups.engines.engine(engine.slot);
            if skips_others && blocks == EngineHits::default() {
                continue;
            }
            let full_blocks = blocks.local;
            let cache_groups = engine.groups.of_hybrid();
            if !cache_groups.is_empty() {
                blocks = hybrid.of(engine.slot, &cache_groups);
                predicted.is_hybrid = true;
            } else if store_blocks.is_some() {
                // No engine has blocks with the store's names, so the store's run starts at the beginning of the prompt.
                blocks.shared = lookups.store.engine(engine.slot).shared.saturating_sub(blocks.local);
            }
            let page_tokens = group.keyspace.page_tokens();
            let mut added = EngineHitsInGroup::of_blocks(engine, blocks, page_tokens, position);
            added.full_tokens = full_blocks.saturating_mul(page_tokens);
            if cache_groups.is_empty() {
                added.add_chunks(&self.index, engine, chunks, reusable_tokens, &mut lookups.chunks);
                added.drop_last_block(engine, page_tokens);
            }
            predicted.add_hits(engine.slot, added);
        }
    }

    /// Tokens of a prompt for each kind of engine, by its name.
    pub(crate) async fn tokens(
        &self,
        fleet: &FleetSnapshot,
        prompt: RequestPrompt<'_>,
    ) -> Result<Vec<(&'static str, Vec<u32>)>, PredictionError> {
        let groups = self.tokenizers(fleet, prompt, |_| true).await;
        let media = self.media_lookup(fleet, prompt);
        let (api, body) = (prompt.api, prompt.body.clone());
        let here = may_read_here(&body, &groups);
        let make = move || {
            let mut tokens_by_engine: Vec<(&str, Vec<u32>)> = Vec::new();
            for (group, tokenizer) in groups {
                let name = group.engine.as_str();
                if !tokens_by_engine.iter().any(|(engine, _)| *engine == name) {
                    let (media, extent) = (media.as_ref(), PromptExtent::Complete);
                    let prompts = PromptTokens::of((api, &body), tokenizer, &group, media, extent)?;
                    let [prompt] = prompts.as_slice() else { return Err(PredictionError::NotSinglePrompt) };
                    if prompt.is_incomplete() {
                        return Err(PredictionError::Prompt(PromptError::Multimodal("media".to_owned())));
                    }
                    tokens_by_engine.push((name, prompt.to_vec()));
                }
            }
            Ok(tokens_by_engine)
        };
        self.read(prompt.body, here, make).await
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
    // Sums of bytes in blocks of a constant size are vectorized.
    let values_in =
        |part: &[u8]| part.iter().map(|byte| u8::from(matches!(byte, b',' | b'{' | b'['))).sum::<u8>();
    let (blocks, rest) = body.as_chunks::<128>();
    let values: usize = blocks.iter().map(|block| usize::from(values_in(block))).sum();
    let values = values + usize::from(values_in(rest));
    BYTES_PER_BODY_BYTE * body.len() + BYTES_PER_VALUE * values
}

/// Whether the connection's thread may read a prompt.
fn may_read_here(body: &[u8], groups: &[(Arc<EngineGroup>, TokenizerChoice)]) -> bool {
    body.len() <= SHORT_PROMPT_BYTES
        && groups.iter().all(|(_, tokenizer)| match tokenizer {
            TokenizerChoice::Local(tokenizer) => tokenizer.suits_every_thread(),
            TokenizerChoice::Engine(_) | TokenizerChoice::Unavailable(_) => true,
        })
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

impl PromptPrediction {
    /// Adds an engine's hits of one prompt.
    fn add_hits(&mut self, slot: EngineSlot, added: EngineHitsInGroup) {
        if self.by_slot.len() <= slot.as_usize() {
            self.by_slot.resize(slot.as_usize() + 1, Default::default());
        }
        self.by_slot[slot.as_usize()].add_prompt(added);
    }

    fn of(&self, member: &FleetMember) -> EngineHitsInGroup {
        let hits = member.slot().and_then(|slot| self.by_slot.get(slot.slot().as_usize()));
        hits.copied().unwrap_or_default()
    }

    /// The hits of an engine.
    pub(crate) fn hits(&self, member: &FleetMember) -> TierHits {
        self.of(member).hits
    }

    /// The hits that an engine should report, if the request goes there; `None` for a batch, of which vLLM reports only the last prompt's,
    /// and for a prompt of which only the beginning is known.
    pub(crate) fn expected_hits(&self, member: &FleetMember) -> Option<ExpectedHits> {
        if self.is_batch || self.is_incomplete {
            return None;
        }
        let hits_in_group = self.of(member);
        let EngineHitsInGroup { hits, dropped_tokens, in_chunks, .. } = hits_in_group;
        let rank = (member.rank_count() > 1).then_some(member.rank);
        let speculates = member.facts().is_some_and(|facts| facts.speculates);
        let block_tokens = member.keyspace.as_ref().map_or(0, |keyspace| keyspace.page_tokens());
        let engine = member
            .slot()
            .map(|slot| PredictedEngine::new(member.name.clone(), slot, rank, speculates, block_tokens));
        let input_tokens = self.input_tokens;
        let checkpoints = self.checkpoints(member, hits_in_group);
        let pending_tokens = 0;
        Some(ExpectedHits {
            hits,
            input_tokens,
            dropped_tokens,
            in_chunks,
            engine,
            checkpoints,
            pending_tokens,
        })
    }

    /// Where the prompt can be reused when its request has ended, for an engine whose events do not say it.
    fn checkpoints(&self, member: &FleetMember, hits: EngineHitsInGroup) -> Option<PromptCheckpoints> {
        let facts = member.facts()?;
        // What an engine that speculates keeps is not verified.
        let has_pairs = matches!(facts.hashing, Some(EngineBlockHashing::Sglang { bigrams: true, .. }));
        let has_windows = facts.checkpoints == Some(PrefixCheckpoints::RequestEndsAndBranches) && !has_pairs;
        let keys = (*self.last_blocks.get(hits.group)?)?;
        let block_tokens = member.keyspace.as_ref()?.page_tokens();
        let cached = CachedPrefix {
            full: hits.full_tokens,
            reusable: hits.hits.total(),
            limit: self.input_tokens.saturating_sub(1),
        };
        let is_prefill = member.instance.role == EngineRole::Prefill;
        let checkpoints = PromptCheckpoints::new(member.slot()?, keys, cached, block_tokens, is_prefill);
        has_windows.then_some(checkpoints)
    }

    /// The prompt's objects in the store of the engine that computes it; `None` without a store.
    pub(crate) fn stored_prompt(&self, engine: EngineSlot) -> Option<Box<dyn StoredPrompt>> {
        let EngineHitsInGroup { group, .. } =
            self.by_slot.get(engine.as_usize()).copied().unwrap_or_default();
        let stored = self.stored.get(group)?.clone()?;
        Some(Box::new(stored))
    }

    /// The hits in the order of a fleet's cluster.
    pub(crate) fn for_fleet(&self, fleet: &FleetSnapshot) -> CacheHitPrediction {
        // Short, if no engine has anything.
        let slots = if self.by_slot.is_empty() { &[][..] } else { &fleet.slots };
        let of_members = || {
            slots.iter().map(|slot| {
                slot.and_then(|slot| self.by_slot.get(slot.as_usize())).copied().unwrap_or_default()
            })
        };
        let distance = StoreDistance::new(&self.block_sites, fleet).map(|mut distance| {
            InstanceIndex::all()
                .zip(of_members())
                .map(|(engine, EngineHitsInGroup { hits, group, .. })| {
                    distance.network_distance(engine, group, hits)
                })
                .collect()
        });
        CacheHitPrediction {
            per_instance: of_members().map(|member| member.hits).collect(),
            network_distance: distance.unwrap_or_default(),
            pages: self.pages.clone(),
            page_tokens: self.page_tokens,
            text_prefixes: self.text_prefixes.clone(),
            excludes_pending: self.is_hybrid,
            ..CacheHitPrediction::default()
        }
    }
}
