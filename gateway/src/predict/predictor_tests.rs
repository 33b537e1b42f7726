//! Predictions for an engine of each kind that has cached a prompt.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use moongate_discovery::{
    EngineBlockHashing, EngineFacts, EngineInstance, EngineKind, EngineRole, VllmHashAlgorithm,
};
use moongate_scheduler::ModelIndex;
use moongate_scheduler::index::EngineCacheTier;
use serde_json::{Value, json};

use super::models::ModelTokenizers;
use super::prediction_query::PredictionQuery;
use super::predictor::{CacheHitPredictor, PromptPrediction};
use super::prompt_tokens::{PredictionError, RequestPrompt, TokenizerChoice};
use super::reuse_limit::ReuseLimits;
use super::tokenize::EngineTokenizer;
use crate::feedback::GatewayMetrics;
use crate::fleet::FleetSnapshot;
use crate::kv_index::KvIndex;
use crate::memory::MemoryBudget;
use crate::request_body::{InferenceApi, RoutingFields};
use crate::test_fleet;

/// Tokens per block.
const PAGE: u32 = 16;
/// Estimated length of a prompt with images.
const ESTIMATED: u32 = 700;

/// One engine, whose cache the test fills.
struct OneEngine {
    fleet: FleetSnapshot,
    index: Arc<KvIndex>,
    models: Arc<ModelTokenizers>,
    predictor: CacheHitPredictor,
}

fn instance(engine: EngineKind) -> Arc<EngineInstance> {
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
    test_fleet::with_facts("e", EngineRole::Plain, facts)
}

impl OneEngine {
    fn new(engine: EngineKind) -> Self {
        let index = KvIndex::new(1000);
        let fleet = test_fleet::snapshot(vec![instance(engine)], &FleetSnapshot::default(), &index);
        let tokenize = GatewayMetrics::new(None).tokenize;
        let models = Arc::new(ModelTokenizers::new(Vec::new(), 1 << 20));
        let predictor = CacheHitPredictor::new(
            index.clone(),
            models.clone(),
            EngineTokenizer::new(Duration::ZERO, None, 0, tokenize),
            None,
            MemoryBudget::new("--prompt-memory", 1 << 20),
        );
        Self { fleet, index, models, predictor }
    }

    fn api(body: &Value) -> InferenceApi {
        match (body.get("messages"), body.get("prompt")) {
            (Some(_), _) => InferenceApi::Chat,
            (None, Some(_)) => InferenceApi::Completions,
            (None, None) => InferenceApi::Generate,
        }
    }

    /// Adds the blocks of these tokens to the engine's cache.
    fn compute(&self, tokens: &[u32]) {
        let groups = self.fleet.groups(ModelIndex(0));
        let unavailable = TokenizerChoice::Unavailable(PredictionError::NoTokenizer);
        let query = PredictionQuery {
            api: InferenceApi::Completions,
            body: Bytes::from(json!({ "prompt": tokens }).to_string()),
            groups: groups.iter().map(|group| (group.clone(), unavailable.clone())).collect(),
            limits: ReuseLimits::default(),
            estimated_tokens: 0,
        };
        let slot = groups[0].engines[0].slot;
        for prompt in query.hash().unwrap().groups.iter().flat_map(|group| &group.prompts) {
            let keys = &prompt.engine_blocks.keys;
            self.index.update(|blocks| blocks.add_engine_blocks(slot, EngineCacheTier::L1, keys));
        }
    }

    async fn predict(&self, body: &Value) -> Result<PromptPrediction, PredictionError> {
        let (api, body) = (Self::api(body), Bytes::from(body.to_string()));
        let fields = RoutingFields::read(api, &body).unwrap();
        let prompt = RequestPrompt {
            api,
            model: ModelIndex(0),
            fields: &fields,
            body: &body,
            estimated_tokens: ESTIMATED,
        };
        self.predictor.predict(&self.fleet, prompt).await
    }

    /// Tokens of the prompts, and how many of them are cached.
    async fn hits(&self, body: &Value) -> (u32, u32) {
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
async fn text_before_an_image_is_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let small = concat!(env!("CARGO_MANIFEST_DIR"), "/tokenize/tests/data/small/tokenizer.json");
    std::fs::copy(small, folder.path().join("tokenizer.json")).unwrap();
    let template = "{% for message in messages %}{{ message.role }}:{% for part in message.content %}\
        {{ part.text if part.type == 'text' else '<image>' }}{% endfor %}{% endfor %}";
    let config = json!({ "chat_template": template }).to_string();
    std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
    let world = OneEngine::new(EngineKind::Vllm);
    let mut facts = world.fleet.members[0].facts().unwrap().clone();
    facts.tokenizer = Some(folder.path().to_str().unwrap().to_owned());
    let task = world.models.claim("m", &facts).unwrap();
    world.models.load(&task);

    let image = json!({ "type": "image_url", "image_url": { "url": "https://host/a.png" } });
    let chat = |system: &str| {
        json!({ "messages": [{ "role": "system", "content": [{ "type": "text", "text": system }] },
            { "role": "user", "content": [{ "type": "text", "text": "What?" }, image] }] })
    };
    let long = chat(&"Some words of a system message. ".repeat(20));
    let leading = world.predict(&long).await.unwrap();
    assert_eq!((leading.input_tokens, leading.hits(&world.fleet.members[0]).total()), (ESTIMATED, 0));
    let pages = leading.for_fleet(&world.fleet).pages;
    let slot = world.fleet.groups(ModelIndex(0))[0].engines[0].slot;
    world.index.update(|blocks| blocks.add_engine_blocks(slot, EngineCacheTier::L1, &pages));
    let again = world.predict(&long).await.unwrap();
    assert_eq!(again.hits(&world.fleet.members[0]).total(), u32::try_from(pages.len()).unwrap() * PAGE);
    assert!(
        again.expected_hits(&world.fleet.members[0]).is_none(),
        "the engine may have cached the image too"
    );
    assert!(matches!(world.predict(&chat("")).await, Err(PredictionError::Prompt(_))), "less than a block");
}
