//! Predictions for an engine of each kind that has cached a prompt.

use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::poll_immediate;
use mooncake_wire::events::{
    BlockHash, EngineEventFormat, OutgoingBlocks, OutgoingEngineEvent, StorageMedium, encode_engine_batch,
};
use moongate_block_hash::{BlockHashChain, HashScheme};
use moongate_discovery::{
    EngineBlockHashing, EngineFacts, EngineInstance, EngineKind, EngineRole, VllmHashAlgorithm,
};
use moongate_runtime::Supervisor;
use moongate_scheduler::ModelIndex;
use moongate_scheduler::index::EngineCacheTier;
use serde_json::{Value, json};

use super::feeds::EngineEventApplier;
use super::hashed_prefixes::HashedPrefixes;
use super::media::{MediaQueries, MediaQueryRunner, MediaTokenCache};
use super::models::ModelTokenizers;
use super::prediction_query::PredictionQuery;
use super::predictor::{CacheHitPredictor, PromptLength, PromptPrediction, PromptResources};
use super::prompt_threads::PromptThreads;
use super::prompt_tokens::{PredictionError, PromptExtent, RequestPrompt, TokenizerChoice};
use super::reuse_limit::ReuseLimits;
use super::seen_texts::SeenTexts;
use super::tokenize::EngineTokenizer;
use crate::feedback::GatewayMetrics;
use crate::fleet::{FleetReader, FleetSnapshot};
use crate::kv_index::{KvIndex, RankSlots};
use crate::memory::MemoryBudget;
use crate::request_body::{InferenceApi, RoutingFields};
use crate::test_fleet;

/// Tokens per block.
pub(super) const PAGE: u32 = 16;

/// One engine, whose cache the test fills.
pub(super) struct OneEngine {
    pub(super) fleet: Arc<FleetSnapshot>,
    pub(super) reader: FleetReader,
    pub(super) index: Arc<KvIndex>,
    pub(super) models: Arc<ModelTokenizers>,
    pub(super) media: Arc<MediaTokenCache>,
    /// Sends the cache's queries.
    pub(super) runner: Option<(MediaQueryRunner, MediaQueries)>,
    pub(super) predictor: CacheHitPredictor,
    threads: PromptThreads,
}

fn instance(engine: EngineKind, url: Option<String>) -> Arc<EngineInstance> {
    let hashing = match engine {
        EngineKind::Vllm => {
            EngineBlockHashing::Vllm { algorithm: VllmHashAlgorithm::Sha256Cbor, seed: "0".to_owned() }
        }
        EngineKind::Sglang => {
            EngineBlockHashing::Sglang { namespaced: Some(true), bigrams: false, namespaced_events: false }
        }
    };
    let facts = EngineFacts {
        models: vec!["m".to_owned()],
        page_size: Some(PAGE),
        context_length: Some(100),
        hashing: Some(hashing),
        events: Some(Vec::new()),
        ..EngineFacts::unreported(engine)
    };
    let instance = test_fleet::with_facts("e", EngineRole::Plain, facts);
    let url = url.unwrap_or_else(|| instance.url.clone());
    Arc::new(EngineInstance { url, ..EngineInstance::clone(&instance) })
}

impl OneEngine {
    pub(super) fn new(engine: EngineKind) -> Self {
        Self::at(engine, None)
    }

    /// An engine at this URL, which is queried for tokens.
    pub(super) fn at(engine: EngineKind, url: Option<String>) -> Self {
        let limit = if url.is_some() { Duration::from_secs(5) } else { Duration::ZERO };
        Self::of(instance(engine, url), 1000, limit)
    }

    /// An engine with an index of this many blocks.
    pub(super) fn with_index(engine: EngineKind, max_blocks: usize) -> Self {
        Self::of(instance(engine, None), max_blocks, Duration::ZERO)
    }

    /// An engine with these facts, and a large index.
    pub(super) fn with_facts(facts: EngineFacts) -> Self {
        Self::of(test_fleet::with_facts("e", EngineRole::Plain, facts), 100_000, Duration::ZERO)
    }

    /// An engine, with an index of this many blocks and a limit for queries.
    fn of(instance: Arc<EngineInstance>, max_blocks: usize, limit: Duration) -> Self {
        let index = KvIndex::new(max_blocks);
        let fleet = test_fleet::snapshot(vec![instance], &FleetSnapshot::default(), &index);
        let tokenize = GatewayMetrics::new(None).tokenize;
        let memory = MemoryBudget::new("--prompt-memory", 1 << 20);
        let (media, queries) = MediaTokenCache::new(1 << 20, memory.clone(), tokenize.clone());
        let models = Arc::new(ModelTokenizers::new(Vec::new(), 1 << 20));
        let engines = Arc::new(EngineTokenizer::new(limit, None, 0, tokenize.clone()));
        let runner = MediaQueryRunner {
            cache: media.clone(),
            models: models.clone(),
            engines: engines.clone(),
            metrics: tokenize,
        };
        let runner = Some((runner, queries));
        let threads = PromptThreads::start(1, Duration::from_secs(60), &Supervisor::new()).unwrap();
        let predictor = CacheHitPredictor::new(
            index.clone(),
            models.clone(),
            engines,
            media.clone(),
            None,
            PromptResources {
                prefixes: Arc::new(HashedPrefixes::new(1 << 20)),
                threads: threads.clone(),
                memory,
                needs_all_blocks: false,
                seen: Arc::new(SeenTexts::new()),
            },
        );
        let reader = FleetReader::fixed(fleet);
        Self { fleet: reader.current(), reader, index, models, media, runner, predictor, threads }
    }

    fn api(body: &Value) -> InferenceApi {
        match (body.get("messages"), body.get("prompt")) {
            (Some(_), _) => InferenceApi::Chat,
            (None, Some(_)) => InferenceApi::Completions,
            (None, None) => InferenceApi::Generate,
        }
    }

    /// Adds the blocks of these tokens to the engine's cache.
    pub(super) fn compute(&self, tokens: &[u32]) {
        let groups = self.fleet.groups(ModelIndex(0));
        let unavailable = TokenizerChoice::Unavailable(PredictionError::NoTokenizer);
        let query = PredictionQuery {
            api: InferenceApi::Completions,
            body: Bytes::from(json!({ "prompt": tokens }).to_string()),
            may_change_hashes: false,
            groups: groups.iter().map(|group| (group.clone(), unavailable.clone())).collect(),
            limits: ReuseLimits::default(),
            media: None,
            prefixes: Arc::new(HashedPrefixes::new(0)),
            index: self.index.clone(),
            extent: PromptExtent::Complete,
            seen: Arc::new(SeenTexts::new()),
        };
        let slot = groups[0].engines[0].slot;
        for prompt in query.hash().unwrap().groups.iter().flat_map(|group| &group.prompts) {
            let keys = &prompt.engine_blocks.keys;
            self.index.update(|blocks| blocks.add_engine_blocks(slot, EngineCacheTier::L1, keys));
        }
    }

    pub(super) async fn predict(&self, body: &Value) -> Result<PromptPrediction, PredictionError> {
        self.predict_for(ModelIndex(0), body).await
    }

    /// As for a request that is routed.
    pub(super) async fn predict_estimated(&self, body: &Value) -> Result<PromptPrediction, PredictionError> {
        self.predict_with(ModelIndex(0), body, PromptLength::Estimated).await
    }

    pub(super) async fn predict_for(
        &self,
        model: ModelIndex,
        body: &Value,
    ) -> Result<PromptPrediction, PredictionError> {
        self.predict_with(model, body, PromptLength::Exact).await
    }

    async fn predict_with(
        &self,
        model: ModelIndex,
        body: &Value,
        length: PromptLength,
    ) -> Result<PromptPrediction, PredictionError> {
        let (api, body) = (Self::api(body), Bytes::from(body.to_string()));
        let fields = RoutingFields::read(api, &body).unwrap();
        let prompt = RequestPrompt { api, model, fields: &fields, body: &body };
        self.predictor.predict(&self.fleet, prompt, length).await
    }

    /// Tokens of the prompts, and how many of them are cached.
    pub(super) async fn hits(&self, body: &Value) -> (u32, u32) {
        let predicted = self.predict(body).await.unwrap();
        (predicted.input_tokens, predicted.hits(&self.fleet.members[0]).total())
    }
}

fn tokens(first: u32, count: u32) -> Vec<u32> {
    (first..first + count).collect()
}

#[tokio::test]
async fn hits_of_a_batch_are_summed() {
    for engine in [EngineKind::Vllm, EngineKind::Sglang] {
        let world = OneEngine::new(engine);
        world.compute(&tokens(0, 65));
        assert_eq!(world.hits(&json!({ "prompt": tokens(0, 80) })).await, (80, 64));
        let batch = json!({ "prompt": [tokens(0, 40), tokens(500, 90), tokens(500, 90), tokens(0, 64)] });
        assert_eq!(world.hits(&batch).await, (284, 32 + 48), "an uncached prefix counts in none of them");
        let predicted = world.predict(&batch).await.unwrap();
        assert!(predicted.expected_hits(&world.fleet.members[0]).is_none());
        assert!(predicted.for_fleet(&world.fleet).pages.is_empty());
        let large = json!({ "prompt": vec![[1]; 1025] });
        assert_eq!(world.predict(&large).await.err(), Some(PredictionError::NotSinglePrompt));
    }
}

#[tokio::test]
async fn prompt_logprobs_bypass_the_cache() {
    let vllm = OneEngine::new(EngineKind::Vllm);
    let sglang = OneEngine::new(EngineKind::Sglang);
    for world in [&vllm, &sglang] {
        world.compute(&tokens(0, 65));
        let echo = json!({ "prompt": tokens(0, 80), "echo": true, "logprobs": 1 });
        assert_eq!(world.hits(&echo).await, (80, 0));
    }
    let logprobs = json!({ "prompt": tokens(0, 80), "prompt_logprobs": 0 });
    assert_eq!((vllm.hits(&logprobs).await, sglang.hits(&logprobs).await), ((80, 0), (80, 64)));
    let generate = json!({ "input_ids": tokens(0, 80), "return_logprob": true, "logprob_start_len": 40 });
    assert_eq!(sglang.hits(&generate).await, (80, 32));
}

#[tokio::test]
async fn prompts_with_a_salt_have_other_blocks() {
    let vllm = OneEngine::new(EngineKind::Vllm);
    vllm.compute(&tokens(0, 65));
    let salted = json!({ "prompt": tokens(0, 80), "cache_salt": "tenant" });
    assert_eq!(vllm.hits(&salted).await, (80, 0));
    let inner = json!({ "prompt": tokens(0, 80), "metadata": { "cache_salt": "tenant" } });
    assert_eq!(vllm.hits(&inner).await, (80, 64), "engines read the body's own members only");
}

#[tokio::test]
async fn only_the_tokens_that_vllm_keeps_count() {
    let body = |limit: i64| json!({ "prompt": tokens(0, 80), "truncate_prompt_tokens": limit });
    let vllm = OneEngine::new(EngineKind::Vllm);
    vllm.compute(&tokens(16, 65));
    assert_eq!(vllm.hits(&body(64)).await, (64, 48));
    assert_eq!(vllm.hits(&body(63)).await, (63, 0), "other blocks");
    assert_eq!(vllm.hits(&body(-1)).await, (80, 0), "within the context");
    let longer = json!({ "prompt": tokens(1000, 120), "truncate_prompt_tokens": -1 });
    assert_eq!(vllm.hits(&longer).await, (99, 0));
    let sglang = OneEngine::new(EngineKind::Sglang);
    sglang.compute(&tokens(0, 65));
    assert_eq!(sglang.hits(&body(64)).await, (80, 64), "SGLang ignores the member");
}

#[tokio::test]
async fn chunks_of_lmcache_extend_an_engines_own_blocks() {
    const CHUNK: u32 = 2 * PAGE;
    let world = OneEngine::new(EngineKind::Vllm);
    world.compute(&tokens(0, 17));
    let member = &world.fleet.members[0];
    let (slot, keyspace) = (member.slot().unwrap(), member.keyspace.as_ref().unwrap());
    let root = HashScheme::lmcache_root_of_vllm("0");
    let mut chunks = Vec::new();
    BlockHashChain::new(HashScheme::lmcache_sha256_cbor(CHUNK, root).unwrap())
        .extend(&tokens(0, 96), &mut chunks);
    let mut payload = Vec::new();
    let first = tokens(0, CHUNK);
    let hashes: Vec<BlockHash<'_>> = chunks.iter().map(|chunk| BlockHash::Int(chunk.event_hash)).collect();
    let stored = |chunk: usize| {
        OutgoingEngineEvent::Stored(OutgoingBlocks {
            hashes: &hashes[chunk..=chunk],
            parent: chunk.checked_sub(1).map(|parent| hashes[parent]),
            tokens: &first,
            block_size: CHUNK,
            medium: StorageMedium::StoreMemory,
            cache_salt: None,
            extra_keys: None,
        })
    };
    let events = [stored(0), stored(1)];
    encode_engine_batch(EngineEventFormat::Vllm, 0.0, &events, 0, &mut payload);
    let slots: RankSlots = Arc::new([slot.clone()]);
    let mut applier = EngineEventApplier::new(slots, 0, 0, keyspace.clone()).unwrap();
    applier.apply(&payload).unwrap();

    let hits = async |length: u32| {
        let predicted = world.predict(&json!({ "prompt": tokens(0, length) })).await.unwrap();
        let hits = predicted.hits(&world.fleet.members[0]);
        (hits.l1_tokens, hits.l2_tokens)
    };
    assert_eq!(hits(96).await, (16, 48), "two chunks");
    assert_eq!(hits(64).await, (16, 47), "one token is always computed");
    assert_eq!(hits(40).await, (16, 16));
    for _ in 0..8 {
        slot.hit_history().observe_chunks(16, true, 16);
    }
    assert_eq!(hits(96).await, (16, 0), "the engine does not find them");
}

#[tokio::test]
async fn last_block_is_left_out_for_engines_that_compute_it_again() {
    let world = OneEngine::new(EngineKind::Vllm);
    world.compute(&tokens(0, 65));
    let body = json!({ "prompt": tokens(0, 80) });
    assert_eq!(world.hits(&body).await, (80, 64));
    for _ in 0..8 {
        world.fleet.members[0].slot().unwrap().hit_history().observe(64, 48, PAGE.into());
    }
    assert_eq!(world.hits(&body).await, (80, 48));
    let expected = world.predict(&body).await.unwrap().expected_hits(&world.fleet.members[0]).unwrap();
    assert_eq!((expected.hits.l1_tokens, expected.dropped_tokens), (48, PAGE));
}

#[tokio::test]
async fn short_prompts_wait_for_no_thread() {
    let world = OneEngine::new(EngineKind::Sglang);
    let (release, released) = mpsc::channel::<()>();
    let busy = world.threads.run(1, move || released.recv());
    let predict = async {
        assert_eq!(world.hits(&json!({ "prompt": tokens(0, 80) })).await, (80, 0));
        let body = json!({ "prompt": tokens(0, 2000) });
        let mut long = pin!(world.hits(&body));
        assert_eq!(poll_immediate(&mut long).await, None);
        release.send(()).unwrap();
        assert_eq!(long.await, (2000, 0));
    };
    let (ended, ()) = tokio::join!(busy, predict);
    assert_eq!(ended, Ok(Ok(())));
}
