//! Prompts whose pages are in a store, and the cache hits that a gateway predicts for them.

use std::time::{Duration, Instant};

use moongate_block_hash::{BlockHashChain, HashScheme, SglangNamespace};
use moongate_loadtest::engine::SimEngineOptions;
use serde_json::{Value, json};

use super::fleet::{TestFleet, TestFleetBuilder};
use super::metrics::metric;

/// Generous, because it only detects a test that hangs.
const LIMIT: Duration = Duration::from_secs(60);
/// Tokens of a page, and the minimum that an SGLang engine reads from the store.
pub(crate) const BLOCK_TOKENS: u32 = 64;
pub(crate) const STORE_THRESHOLD_TOKENS: u64 = 256;
/// Bytes of an object, where they do not matter.
pub(crate) const SMALL_OBJECT_BYTES: usize = 4096;
/// A page's objects: keys and values.
pub(crate) type BlockObjectKeys = [String; 2];

/// An engine that uses the store, and a gateway that looks into it through its master's admin server.
pub(crate) async fn start_fleet_with_store(admin: &str, flags: &[&str]) -> TestFleet {
    let fleet = TestFleetBuilder::sglang()
        .plain(1)
        .tune(|config| SimEngineOptions { use_storage: true, ..config.fast() });
    let fleet = fleet.flag(&format!("--mooncake-admin={admin}"));
    flags.iter().fold(fleet, |fleet, flag| fleet.flag(flag)).start().await
}

/// A prompt all of whose `pages` can come from a cache: an engine computes at least one token.
pub(crate) fn prompt(number: u32, pages: u32) -> Vec<u32> {
    (0..=pages * BLOCK_TOKENS).map(|at| number * 1_000 + at % 997).collect()
}

/// The objects that the engine would store for a prompt.
pub(crate) fn objects(prompt: &[u32]) -> Vec<BlockObjectKeys> {
    let mut pages = Vec::new();
    BlockHashChain::new(HashScheme::sglang(BLOCK_TOKENS, SglangNamespace::default()).unwrap())
        .extend(prompt, &mut pages);
    pages.iter().map(|page| ["k", "v"].map(|tensor| format!("sim_{}_0_{tensor}", page.digest))).collect()
}

/// The number of tokens that the engine would load from the store, according to the gateway.
pub(crate) async fn predicted_store_tokens(world: &TestFleet, prompt: &[u32]) -> u64 {
    predicted_store_tokens_at(&world.client, &world.gateway.admin_url(""), &world.model(), prompt).await
}

/// The same for the gateway whose admin listener has this URL.
pub(crate) async fn predicted_store_tokens_at(
    client: &reqwest::Client,
    admin: &str,
    model: &str,
    prompt: &[u32],
) -> u64 {
    let engine = predicted_engine_at(client, admin, model, prompt).await;
    assert_eq!((&engine["l1_tokens"], &engine["l2_tokens"]), (&json!(0), &json!(0)), "{engine}");
    engine["l3_tokens"].as_u64().unwrap()
}

/// The gateway's prediction for the first engine.
pub(crate) async fn predicted_engine(world: &TestFleet, prompt: &[u32]) -> Value {
    predicted_engine_at(&world.client, &world.gateway.admin_url(""), &world.model(), prompt).await
}

async fn predicted_engine_at(client: &reqwest::Client, admin: &str, model: &str, prompt: &[u32]) -> Value {
    let body = json!({"model": model, "prompt": prompt});
    let request = client.post(format!("{admin}/debug/predict/v1/completions")).json(&body);
    let answer: Value = request.send().await.unwrap().json().await.unwrap();
    answer["engines"][0].clone()
}

/// Waits until the predicted tokens are those of `pages` pages. `allowed` must hold for every other number before.
pub(crate) async fn wait_for_prediction(
    world: &TestFleet,
    prompt: &[u32],
    pages: u32,
    allowed: impl Fn(u64) -> bool,
) -> Duration {
    let (begun, expected) = (Instant::now(), u64::from(pages * BLOCK_TOKENS));
    let mut last = 0;
    while begun.elapsed() < LIMIT {
        last = predicted_store_tokens(world, prompt).await;
        if last == expected {
            return begun.elapsed();
        }
        assert!(allowed(last), "{last} tokens on the way to {expected}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{last} tokens are predicted, not {expected}");
}

/// Waits until the prediction is `pages` pages, and was never larger.
pub(crate) async fn wait_for_growth_to(world: &TestFleet, prompt: &[u32], pages: u32) {
    wait_for_prediction(world, prompt, pages, |tokens| tokens < u64::from(pages * BLOCK_TOKENS)).await;
}

/// Waits until the prediction is `pages` pages, and was never smaller. Returns the elapsed time.
pub(crate) async fn wait_for_drop_to(world: &TestFleet, prompt: &[u32], pages: u32) -> Duration {
    wait_for_prediction(world, prompt, pages, |tokens| tokens > u64::from(pages * BLOCK_TOKENS)).await
}

/// Waits until `right` holds for a metric.
pub(crate) async fn wait_for_metric(world: &TestFleet, name: &str, right: impl Fn(u64) -> bool) {
    let begun = Instant::now();
    let mut last = metric(world, name).await;
    while !right(last) {
        assert!(begun.elapsed() < LIMIT, "{name} stays at {last}");
        tokio::time::sleep(Duration::from_millis(20)).await;
        last = metric(world, name).await;
    }
}
