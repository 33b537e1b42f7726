//! Replays recordings of real engines: the KV events that prompts caused, and how much of each prompt was cached.
//! `tests/engines/record.py` makes them.

use moongate_block_hash::VllmMediaItem;
use moongate_discovery::{
    EngineBlockHashing, EngineFacts, EngineKind, LoraAdapterFacts, PrefixCheckpoints, VllmHashAlgorithm,
};
use moongate_scheduler::ModelIndex;
use moongate_scheduler::index::IndexLookup;
use serde::Deserialize;

use super::feeds::EngineEventApplier;
use super::predictor_tests::OneEngine;
use super::prompt_tokens::HashedTokens;
use crate::feedback::ExpectedHits;
use crate::kv_index::{BlockExtraKeys, HashRuleStatus};

/// A line of a recording.
#[derive(Deserialize)]
#[serde(untagged)]
enum RecordedStep {
    Prompt(RecordedPrompt),
    Events { events: String },
}

#[derive(Deserialize)]
struct RecordedPrompt {
    model: String,
    prompt: Vec<u32>,
    cached: u32,
    /// Tokens of the response; `None`: two.
    response: Option<u64>,
    /// The data-parallel rank that has computed it.
    #[serde(default)]
    rank: usize,
    salt: Option<String>,
    cache_salt: Option<String>,
    extra_key: Option<String>,
    /// The engine's hash, the first token and the length of each image.
    #[serde(default)]
    media: Vec<(String, u32, u32)>,
}

/// Shares of all prompt tokens.
#[derive(Debug)]
struct Accuracy {
    right: f64,
    /// Predicted, but not found.
    false_hits: f64,
    cached: f64,
}

fn facts(block_tokens: u32, adapters: &[(&str, &str)]) -> EngineFacts {
    let adapter = |&(name, path): &(&str, &str)| LoraAdapterFacts {
        name: name.to_owned(),
        path: Some(path.to_owned()),
        id: None,
    };
    let names = adapters.iter().map(|(name, _)| (*name).to_owned());
    EngineFacts {
        models: std::iter::once("tiny".to_owned()).chain(names).collect(),
        page_size: Some(block_tokens),
        events: Some(Vec::new()),
        hashing: Some(EngineBlockHashing::Vllm {
            algorithm: VllmHashAlgorithm::Sha256Cbor,
            seed: "vllm-none-hash".to_owned(),
        }),
        adapters: adapters.iter().map(adapter).collect(),
        ..EngineFacts::unreported(EngineKind::Vllm)
    }
}

/// SGLang with LoRA adapters, by their names and identifiers.
fn sglang(adapters: &[(&str, &str)]) -> EngineFacts {
    let adapter = |&(name, id): &(&str, &str)| LoraAdapterFacts {
        name: name.to_owned(),
        path: None,
        id: Some(id.to_owned()),
    };
    let names = adapters.iter().map(|(name, _)| format!("tiny:{name}"));
    EngineFacts {
        engine: EngineKind::Sglang,
        models: std::iter::once("tiny".to_owned()).chain(names).collect(),
        hashing: Some(EngineBlockHashing::Sglang {
            namespaced: Some(true),
            bigrams: false,
            namespaced_events: false,
        }),
        adapters: adapters.iter().map(adapter).collect(),
        ..facts(32, &[])
    }
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// Predicts every prompt from the events and responses before it.
fn replay(recording: &str, facts: &EngineFacts) -> Accuracy {
    let (accuracy, status) = replay_with_status(recording, facts);
    assert_eq!(status, HashRuleStatus::Confirmed);
    accuracy
}

/// Returns also what was found about the engine's hashes.
fn replay_with_status(recording: &str, facts: &EngineFacts) -> (Accuracy, HashRuleStatus) {
    let (accuracies, status) = replay_ranks(recording, facts);
    let [accuracy] = <[Accuracy; 1]>::try_from(accuracies).unwrap();
    (accuracy, status)
}

/// Returns the accuracy of each rank's predictions.
fn replay_ranks(recording: &str, facts: &EngineFacts) -> (Vec<Accuracy>, HashRuleStatus) {
    let world = OneEngine::with_facts(facts.clone());
    let first = &world.fleet.members[0];
    let (slots, keyspace) = (first.slots.clone(), first.keyspace.clone().unwrap());
    let mut applier =
        EngineEventApplier::new(slots.clone(), 0, 0, keyspace).unwrap().with_checkpoints(facts.checkpoints);
    let mut answered = None;
    let mut counts: Vec<TokenCounts> = slots.iter().map(|_| TokenCounts::default()).collect();
    for line in recording.lines() {
        match serde_json::from_str(line).unwrap() {
            RecordedStep::Events { events } => {
                assert_eq!(applier.apply(&bytes(&events)).unwrap().undecodable, 0);
            }
            RecordedStep::Prompt(prompt) => {
                // Events reach the gateway before the end of the response.
                if let Some((expected, last)) = answered.take() {
                    learn(&expected, &last);
                }
                if prompt.media.is_empty() {
                    let expected = predict(&world, &prompt);
                    let predicted = expected.as_ref().map_or(0, |expected| expected.hits.total());
                    counts[prompt.rank].add(&prompt, predicted);
                    answered = expected.map(|expected| (expected, prompt));
                } else {
                    let predicted = predict_media(&world, &prompt);
                    counts[prompt.rank].add(&prompt, predicted);
                }
            }
        }
    }
    (counts.into_iter().map(TokenCounts::accuracy).collect(), slots[0].hash_rule().status())
}

/// Tokens of recorded prompts.
#[derive(Debug, Default)]
struct TokenCounts {
    tokens: u32,
    wrong: u32,
    false_hits: u32,
    cached: u32,
}

impl TokenCounts {
    fn add(&mut self, prompt: &RecordedPrompt, predicted: u32) {
        self.tokens += u32::try_from(prompt.prompt.len()).unwrap();
        self.cached += prompt.cached;
        self.wrong += predicted.abs_diff(prompt.cached);
        self.false_hits += predicted.saturating_sub(prompt.cached);
    }

    fn accuracy(self) -> Accuracy {
        let share = |part: u32| f64::from(part) / f64::from(self.tokens);
        Accuracy {
            right: 1.0 - share(self.wrong),
            false_hits: share(self.false_hits),
            cached: share(self.cached),
        }
    }
}

/// Learns from the response to a prompt.
fn learn(expected: &ExpectedHits, recorded: &RecordedPrompt) {
    expected.engine.as_ref().unwrap().observe(expected, recorded.cached.into());
    if let Some(checkpoints) = &expected.checkpoints {
        checkpoints.learn(Some(recorded.response.unwrap_or(2)), Some(recorded.cached.into()));
    }
}

/// Predicts the hits of a prompt of token ids. Requests with unsupported members have no prediction.
fn predict(world: &OneEngine, recorded: &RecordedPrompt) -> Option<ExpectedHits> {
    let mut body = serde_json::json!({ "prompt": recorded.prompt });
    let members = [("cache_salt", &recorded.cache_salt), ("extra_key", &recorded.extra_key)];
    for (name, value) in members.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?))) {
        body[name] = value.as_str().into();
    }
    let model = world.fleet.model(&recorded.model).unwrap_or(ModelIndex(0));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let predicted = runtime.block_on(world.predict_for(model, &body)).ok()?;
    predicted.expected_hits(&world.fleet.members[recorded.rank])
}

/// Predicts the hits of a prompt with images, from its tokens and the engine's hashes of the images.
fn predict_media(world: &OneEngine, recorded: &RecordedPrompt) -> u32 {
    let engine = world.fleet.members[0].slot().unwrap();
    let keyspace = world.fleet.members[0].keyspace.as_ref().unwrap();
    let request =
        recorded.salt.as_ref().map_or("{}".to_owned(), |salt| format!(r#"{{"cache_salt":"{salt}"}}"#));
    let scheme = keyspace.schemes(&BlockExtraKeys::read(request.as_bytes())).unwrap().events;
    let item = |(identifier, offset, length): &(String, u32, u32)| VllmMediaItem {
        identifier: identifier.as_str().into(),
        offset: *offset,
        length: *length,
    };
    let scheme = scheme.with_media(recorded.media.iter().map(item).collect()).unwrap();
    let blocks = HashedTokens::of(&recorded.prompt, scheme);
    let usable = (recorded.prompt.len() - 1) / keyspace.page_tokens() as usize;
    let keys: Vec<u64> =
        blocks.blocks().iter().take(usable).map(|block| keyspace.namespace().key(block.event_hash)).collect();
    let mut lookup = IndexLookup::default();
    world.index.lookup(&keys, &mut lookup);
    lookup.engine(engine.slot()).local * keyspace.page_tokens()
}

#[test]
fn adapters_are_predicted_as_found() {
    let adapters = [("poet", "/tmp/adapters/poet"), ("coder", "/tmp/adapters/coder")];
    let recording = include_str!("recordings/vllm-lora.jsonl");
    let accuracy = replay(recording, &facts(32, &adapters));
    assert!(accuracy.right >= 0.99 && accuracy.cached > 0.2, "{accuracy:?}");
    // Without their paths, the adapters would have other hashes.
    let without = replay(recording, &facts(32, &[]));
    assert!(without.right < 0.97, "{without:?}");
}

#[test]
fn sglang_adapters_are_predicted_as_found() {
    let adapters =
        [("poet", "e37dc9aa2ee959e2a5183181e43aeda0"), ("coder", "133c1cf482bc55a2b3a48601f6045779")];
    let recording = include_str!("recordings/sglang-lora.jsonl");
    let accuracy = replay(recording, &sglang(&adapters));
    assert!(accuracy.right >= 0.99 && accuracy.cached > 0.2, "{accuracy:?}");
    // Without their identifiers, the adapters would have the base model's hashes.
    let without = replay(recording, &sglang(&[]));
    assert!(without.right < 0.97, "{without:?}");
}

#[test]
fn sglang_sliding_windows_are_never_predicted_falsely() {
    let recording = include_str!("recordings/sglang-spark.jsonl");
    let hybrid = EngineFacts { checkpoints: Some(PrefixCheckpoints::RequestEndsAndBranches), ..sglang(&[]) };
    let accuracy = replay(recording, &hybrid);
    // A response of one token keeps windows that cannot be known, and new branches find them here.
    assert!(accuracy.right >= 0.85 && accuracy.cached > 0.3, "{accuracy:?}");
    assert_eq!(accuracy.false_hits, 0.0, "{accuracy:?}");
    // All blocks in events would be too many.
    let all = replay(recording, &sglang(&[]));
    assert!(all.false_hits > 0.0, "{all:?}");
}

#[test]
fn recurrent_states_are_predicted_as_found() {
    let accuracy = replay(include_str!("recordings/vllm-lfm2.jsonl"), &facts(128, &[]));
    assert!(accuracy.right >= 0.99 && accuracy.cached > 0.3, "{accuracy:?}");
}

#[test]
fn sliding_windows_are_predicted_as_found() {
    let accuracy = replay(include_str!("recordings/vllm-gemma3.jsonl"), &facts(32, &[]));
    assert!(accuracy.right >= 0.99 && accuracy.cached > 0.3, "{accuracy:?}");
}

/// The recorded engines, if the gateway assumed another rule or could not compute theirs.
#[test]
fn other_hash_rules_are_recognized_and_blocks_indexed_by_tokens() {
    let opaque = EngineBlockHashing::Opaque { name: "xxhash".to_owned() };
    let seed = EngineBlockHashing::Vllm { algorithm: VllmHashAlgorithm::Sha256, seed: "7".to_owned() };
    let default_seed = "sha256_cbor with hash seed \"vllm-none-hash\"";
    for (hashing, actual) in [(opaque, "xxhash"), (seed, default_seed)] {
        for (block_tokens, recording) in [
            (32, include_str!("recordings/vllm-gemma3.jsonl")),
            (128, include_str!("recordings/vllm-lfm2.jsonl")),
        ] {
            let facts = EngineFacts { hashing: Some(hashing.clone()), ..facts(block_tokens, &[]) };
            let (accuracy, status) = replay_with_status(recording, &facts);
            assert_eq!(status, HashRuleStatus::Different { actual: Some(actual.to_owned()) });
            assert!(accuracy.right >= 0.99 && accuracy.cached > 0.2, "{actual}: {accuracy:?}");
        }
        // Adapters' blocks are not indexed; none of them is taken for one of the base model.
        let facts = EngineFacts { hashing: Some(hashing), ..facts(32, &[]) };
        let (accuracy, _) = replay_with_status(include_str!("recordings/vllm-lora.jsonl"), &facts);
        assert!((0.5..0.99).contains(&accuracy.right), "{actual}: {accuracy:?}");
    }
}

#[test]
fn images_are_predicted_as_found() {
    let recording = include_str!("recordings/vllm-qwen2-vl.jsonl");
    let accuracy = replay(recording, &facts(32, &[]));
    assert!(accuracy.right >= 0.99 && accuracy.cached > 0.3, "{accuracy:?}");
    // Without the images' hashes, only blocks before the first image would be found.
    let without = recording.replace(r#""media": [["#, r#""other": [["#);
    assert!(replay(&without, &facts(32, &[])).right < 0.8);
}

#[test]
fn ranks_of_one_engine_are_predicted_as_found() {
    let two = EngineFacts { dp_size: 2, ..facts(32, &[]) };
    let (accuracies, status) = replay_ranks(include_str!("recordings/vllm-dp.jsonl"), &two);
    assert_eq!((accuracies.len(), status), (2, HashRuleStatus::Confirmed));
    for accuracy in &accuracies {
        assert!(accuracy.right >= 0.99 && accuracy.cached > 0.3, "{accuracies:?}");
    }
}

#[test]
fn chunks_of_lmcache_are_predicted_as_found() {
    let recording = include_str!("recordings/vllm-lmcache.jsonl");
    let accuracy = replay(recording, &facts(32, &[]));
    assert!(accuracy.right >= 0.99 && accuracy.cached > 0.3, "{accuracy:?}");
    // Without events about chunks, whose medium is "cpu", what vLLM has lost would be missed.
    const MEDIUM_OF_CHUNKS: &str = "a3637075";
    let without: Vec<&str> = recording.lines().filter(|line| !line.contains(MEDIUM_OF_CHUNKS)).collect();
    assert!(without.len() < recording.lines().count());
    assert!(replay(&without.join("\n"), &facts(32, &[])).right < 0.95);
}

#[test]
fn the_block_that_speculation_drops_is_learned() {
    let recording = include_str!("recordings/vllm-eagle.jsonl");
    let accuracy = replay(recording, &EngineFacts { speculates: true, ..facts(32, &[]) });
    // Eight responses are needed to learn it.
    assert!(accuracy.right >= 0.96 && accuracy.cached > 0.3, "{accuracy:?}");
    let unknown = replay(recording, &facts(32, &[]));
    assert!(unknown.right < 0.92, "{unknown:?}");
}

#[test]
fn namespaces_in_events_are_predicted_as_found() {
    let adapters =
        [("poet", "42a8565c47835e2b98ffa6610ea3aa5f"), ("coder", "607062d4dfcc54109b64aeda6f26a879")];
    let recording = include_str!("recordings/sglang-dynamo.jsonl");
    let hashing = |namespaced_events| {
        Some(EngineBlockHashing::Sglang { namespaced: Some(true), bigrams: false, namespaced_events })
    };
    let accuracy = replay(recording, &EngineFacts { hashing: hashing(true), ..sglang(&adapters) });
    assert!(accuracy.right >= 0.99 && accuracy.cached > 0.3, "{accuracy:?}");
    // With the other format, hashes of adapters and keys would differ.
    let (other, _) =
        replay_with_status(recording, &EngineFacts { hashing: hashing(false), ..sglang(&adapters) });
    assert!(other.right < 0.9, "{other:?}");
}

#[test]
fn blocks_with_unknown_hashes_are_predicted_by_tokens() {
    let hashing = Some(EngineBlockHashing::Opaque { name: "xxhash".to_owned() });
    let recording = include_str!("recordings/vllm-xxhash.jsonl");
    let (accuracy, status) = replay_with_status(recording, &EngineFacts { hashing, ..facts(32, &[]) });
    assert_eq!(status, HashRuleStatus::Different { actual: Some("xxhash".to_owned()) });
    assert!(accuracy.right >= 0.99 && accuracy.cached > 0.3, "{accuracy:?}");
    // The same if another rule was assumed.
    let (accuracy, status) = replay_with_status(recording, &facts(32, &[]));
    assert_eq!(status, HashRuleStatus::Different { actual: None });
    assert!(accuracy.right >= 0.99, "{accuracy:?}");
}
