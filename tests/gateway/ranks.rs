//! Data-parallel ranks: each has a cache of its own, and a repeated prompt goes to the rank that has it.

use std::time::Duration;

use futures_util::future::join_all;
use moongate_loadtest::engine::{KvEventOptions, SimEngine, SimEngineOptions, VllmConnector};
use serde_json::{Value, json};

use crate::harness::TEST_TIMEOUT;
use crate::harness::fleet::{TestFleet, TestFleetBuilder};

const RANKS: usize = 2;
/// Long enough that a cached prompt is worth more than an even distribution.
const PROMPT_TOKENS: u64 = 12_000;

/// Without the loads that engines report: one of a moment in which a request ended counts that request as another gateway's, until
/// the next report up to a second later, so that the rank's next prompt goes to the other one.
const OWN_LOADS: &str = "--load-interval=0s";

fn with_ranks(config: SimEngineOptions) -> SimEngineOptions {
    SimEngineOptions {
        kv_events: Some(KvEventOptions::default()),
        dp_size: u32::try_from(RANKS).unwrap(),
        ..config.fast()
    }
}

/// A prompt that shares no block with others.
fn body(world: &TestFleet, number: u64) -> Value {
    let ids: Vec<u64> = (0..PROMPT_TOKENS).map(|at| number * 1_000 + at % 997).collect();
    json!({"model": world.model(), "prompt": ids, "max_tokens": 3})
}

/// Predicted cached tokens on each rank of the engine that computes prompts.
async fn predict(world: &TestFleet, body: &Value) -> Vec<u64> {
    let url = world.gateway.admin_url("/debug/predict/v1/completions");
    let answer: Value = world.client.post(url).json(body).send().await.unwrap().json().await.unwrap();
    let engines = answer["engines"].as_array().unwrap_or_else(|| panic!("no prediction: {answer}"));
    let ranks: Vec<&Value> = engines.iter().filter(|engine| engine["role"] != "decode").collect();
    for (rank, engine) in ranks.iter().enumerate() {
        assert!(engine["instance"].as_str().unwrap().ends_with(&format!("#{rank}")), "{answer}");
    }
    let cached =
        |engine: &&Value| engine["l1_tokens"].as_u64().unwrap() + engine["l2_tokens"].as_u64().unwrap();
    ranks.iter().map(cached).collect()
}

/// Waits until the gateway has indexed the prompt, and returns the rank that has it.
async fn rank_of(world: &TestFleet, body: &Value) -> usize {
    let page = world.engines.all().next().unwrap().options().page_size as u64;
    let usable = (PROMPT_TOKENS - 1) / page * page;
    let wait = async {
        loop {
            let cached = predict(world, body).await;
            assert_eq!(cached.len(), RANKS);
            if let Some(rank) = cached.iter().position(|tokens| *tokens == usable) {
                assert_eq!(cached.iter().sum::<u64>(), usable, "only one rank has it: {cached:?}");
                return rank;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, wait).await.expect("the prompt is not indexed")
}

async fn send(world: &TestFleet, body: &Value) {
    let response = world.post("/v1/completions", body.to_string()).await;
    assert_eq!(response.status(), 200);
    let answer: Value = response.json().await.unwrap();
    assert_eq!(answer["usage"]["prompt_tokens"], PROMPT_TOKENS, "{answer}");
}

/// Prompt tokens that the engine has taken from its cache so far.
fn cached(engine: &SimEngine) -> u64 {
    let stats = engine.stats();
    stats.cached_device_tokens + stats.cached_host_tokens
}

async fn metric(world: &TestFleet, name: &str) -> u64 {
    let url = world.gateway.admin_url("/metrics");
    let text = world.client.get(url).send().await.unwrap().text().await.unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

async fn repeated_prompts_return_to_their_rank(world: &TestFleet) {
    let prompts: Vec<Value> = (1..=12).map(|number| body(world, number)).collect();
    let engine: &SimEngine = world.engines.prefills.first().unwrap_or_else(|| &world.engines.workers[0]);
    join_all(prompts.iter().map(|prompt| send(world, prompt))).await;
    let first = engine.stats().by_dp_rank;
    assert!(first.iter().all(|count| *count > 0), "prompts at once are spread over the ranks: {first:?}");
    assert_eq!(cached(engine), 0);
    let ranks = join_all(prompts.iter().map(|prompt| rank_of(world, prompt))).await;
    for (prompt, rank) in prompts.iter().zip(ranks) {
        let (sent, found) = (engine.stats().by_dp_rank[rank], cached(engine));
        let predicted = predict(world, prompt).await[rank];
        send(world, prompt).await;
        assert_eq!(engine.stats().by_dp_rank[rank], sent + 1, "it goes to the rank that has it");
        assert_eq!(cached(engine), found + predicted);
    }
}

/// The engine's reports of cached tokens are as predicted.
async fn no_prediction_was_wrong(world: &TestFleet) {
    assert!(metric(world, "moongate_prediction_cached_tokens_total{tier=\"l1\"}").await > 100_000);
    assert_eq!(metric(world, "moongate_prediction_false_positive_tokens_total").await, 0);
    assert_eq!(metric(world, "moongate_prediction_false_negative_tokens_total").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_of_workers_are_addressed() {
    for fleet in [TestFleetBuilder::vllm(VllmConnector::Nixl), TestFleetBuilder::sglang()] {
        let world = fleet.plain(1).tune(with_ranks).flag(OWN_LOADS).start().await;
        repeated_prompts_return_to_their_rank(&world).await;
        no_prediction_was_wrong(&world).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_of_pairs_are_addressed() {
    for fleet in [TestFleetBuilder::vllm(VllmConnector::Nixl), TestFleetBuilder::sglang()] {
        let world = fleet.pairs(1).tune(with_ranks).flag(OWN_LOADS).start().await;
        repeated_prompts_return_to_their_rank(&world).await;
        no_prediction_was_wrong(&world).await;
    }
}

/// The decode reports all transferred tokens as cached, so only the prefill's own count can be compared.
#[tokio::test(flavor = "multi_thread")]
async fn ranks_of_mooncake_pairs_are_addressed() {
    let world = TestFleetBuilder::vllm(VllmConnector::Mooncake)
        .pairs(1)
        .tune(with_ranks)
        .flag(OWN_LOADS)
        .start()
        .await;
    repeated_prompts_return_to_their_rank(&world).await;
}
