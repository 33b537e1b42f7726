//! Predicted cache hits equal those that simulated engines report.

use std::time::Duration;

use moongate_loadtest::engine::{
    EngineFault, EngineFaultPlan, KvEventOptions, SharedL3Store, SimEngine, SimEngineOptions, SimMasterAdmin,
    SimProtocol, SimRole, VllmConnector,
};
use serde_json::{Value, json};

use crate::harness;
use crate::harness::TEST_TIMEOUT;
use crate::harness::fleet::{TestEngines, TestFleet, TestFleetBuilder};

/// Tokens of a conversation with this number and length.
fn tokens(conversation: u32, length: u32) -> Vec<u32> {
    (0..length).map(|at| conversation * 1_000 + at % 997).collect()
}

fn with_events(config: SimEngineOptions) -> SimEngineOptions {
    SimEngineOptions { kv_events: Some(KvEventOptions::default()), ..config.fast() }
}

/// The API path for a body.
fn path(body: &Value) -> &'static str {
    if body["messages"].is_array() { "/v1/chat/completions" } else { "/v1/completions" }
}

/// The gateway's response to a debug request with a body.
async fn debug(world: &TestFleet, question: &str, body: &Value) -> Value {
    let url = world.gateway.admin_url(&format!("/debug/{question}{}", path(body)));
    world.client.post(url).json(body).send().await.unwrap().json().await.unwrap()
}

/// The gateway's prediction for the only prefill engine.
async fn predict(world: &TestFleet, body: &Value) -> Value {
    let answer = debug(world, "predict", body).await;
    let engines = answer["engines"].as_array().unwrap_or_else(|| panic!("no prediction: {answer}"));
    engines.iter().find(|engine| engine["role"] != "decode").unwrap().clone()
}

fn cached(prediction: &Value) -> u64 {
    ["l1_tokens", "l2_tokens", "l3_tokens"].iter().map(|tier| prediction[tier].as_u64().unwrap()).sum()
}

/// Waits until the gateway has indexed all cacheable pages of this prompt.
async fn wait_for_prediction(world: &TestFleet, body: &Value, expected: u64) {
    let wait = async {
        while cached(&predict(world, body).await) != expected {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let waited = tokio::time::timeout(TEST_TIMEOUT, wait).await;
    assert!(waited.is_ok(), "{expected} cached tokens are not predicted");
}

/// Tokens of a prompt that can come from a cache: full pages, and never the whole prompt.
fn usable(world: &TestFleet, length: u32) -> u64 {
    let page = world.engines.all().next().unwrap().options().page_size as u64;
    (u64::from(length) - 1) / page * page
}

fn body(world: &TestFleet, ids: &[u32]) -> Value {
    json!({"model": world.model(), "prompt": ids, "max_tokens": 3})
}

/// Sends a prompt and compares predicted with reported cache hits.
async fn send(world: &TestFleet, body: &Value) -> u64 {
    let predicted = cached(&predict(world, body).await);
    let answer: Value = world.post(path(body), body.to_string()).await.json().await.unwrap();
    let found = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert_eq!(Some(predicted), found, "{answer}");
    predicted
}

/// Sends turns of three growing conversations. Returns the total of predicted tokens.
async fn converse(world: &TestFleet) -> u64 {
    let mut predicted = 0;
    for turn in 1..8_u32 {
        for conversation in 1..4_u32 {
            let length = turn * 331 * conversation;
            let body = body(world, &tokens(conversation, length));
            predicted += send(world, &body).await;
            wait_for_prediction(world, &body, usable(world, length)).await;
        }
    }
    predicted
}

async fn metric(world: &TestFleet, name: &str) -> u64 {
    let text =
        world.client.get(world.gateway.admin_url("/metrics")).send().await.unwrap().text().await.unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn hits_are_predicted_exactly() {
    for fleet in [
        TestFleetBuilder::sglang().plain(1),
        TestFleetBuilder::sglang().pairs(1),
        TestFleetBuilder::vllm(VllmConnector::Nixl).plain(1),
        TestFleetBuilder::vllm(VllmConnector::Nixl).pairs(1),
    ] {
        let world = fleet.tune(with_events).start().await;
        assert!(converse(&world).await > 10_000, "most of each prompt is the turn before");
        assert_eq!(metric(&world, "moongate_prediction_false_positive_tokens_total").await, 0);
        assert_eq!(metric(&world, "moongate_prediction_false_negative_tokens_total").await, 0);
        assert!(metric(&world, "moongate_prediction_cached_tokens_total{tier=\"l1\"}").await > 10_000);
    }
}

/// Two engines share a store: pages that one has computed are predicted for the other, which loads them.
#[tokio::test(flavor = "multi_thread")]
async fn hits_in_a_simulated_store_are_predicted() {
    // An engine fetches at most the host cache's capacity beyond that of the device cache.
    let tune = |config: SimEngineOptions| SimEngineOptions {
        device_tokens: 10_000,
        host_tokens: 100_000,
        use_storage: true,
        ..with_events(config)
    };
    let store = SharedL3Store::new(1_000_000);
    let admin = SimMasterAdmin::start(&store, "sim").await.unwrap();
    let start = || {
        SimEngine::start_with_store(tune(SimEngineOptions::new(SimRole::Plain, SimProtocol::Sglang)), &store)
    };
    let (first, second) = (start().await.unwrap(), start().await.unwrap());
    let prompt = tokens(1, 2_000);
    let body = json!({"model": "sim", "prompt": prompt, "max_tokens": 3});
    let direct = harness::client().post(format!("{}/v1/completions", first.url())).json(&body);
    assert_eq!(direct.send().await.unwrap().status(), 200);
    let flags = vec![format!("--worker={}", second.url()), format!("--mooncake-admin={}", admin.addr())];
    let gateway = harness::gateway::TestGateway::start_ready(&flags).await;
    let engines = TestEngines { prefills: vec![], decodes: vec![], workers: vec![second] };
    let world = TestFleet { engines, gateway, client: harness::client() };
    wait_for_prediction(&world, &body, usable(&world, 2_000)).await;
    assert_eq!(predict(&world, &body).await["l3_tokens"], usable(&world, 2_000));
    assert!(send(&world, &body).await > 1_900);
    assert_eq!(world.engines.workers[0].stats().cached_storage_tokens, usable(&world, 2_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_salted_prompt_shares_nothing_with_others() {
    for fleet in [TestFleetBuilder::sglang().plain(1), TestFleetBuilder::vllm(VllmConnector::Nixl).plain(1)] {
        let world = fleet.tune(with_events).start().await;
        let plain = body(&world, &tokens(1, 2_000));
        assert_eq!(send(&world, &plain).await, 0);
        let mut salted = plain.clone();
        salted["cache_salt"] = json!("tenant-a");
        assert_eq!(send(&world, &salted).await, 0);
        wait_for_prediction(&world, &salted, usable(&world, 2_000)).await;
        assert!(send(&world, &salted).await > 1_900);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_messages_are_replayed() {
    let world = TestFleetBuilder::sglang().plain(1).tune(with_events).start().await;
    world.engines.workers[0].drop_kv_events(3);
    for turn in 1..12 {
        let prompt = body(&world, &tokens(1, turn * 331)).to_string();
        assert_eq!(world.post("/v1/completions", prompt).await.status(), 200);
    }
    // A loss is detected with the next message.
    let last = body(&world, &tokens(1, 11 * 331));
    let healed = async {
        for other in 2.. {
            if cached(&predict(&world, &last).await) == usable(&world, 11 * 331) {
                return;
            }
            world.post("/v1/completions", body(&world, &tokens(other, 100)).to_string()).await;
        }
    };
    assert!(tokio::time::timeout(TEST_TIMEOUT, healed).await.is_ok(), "lost messages stay lost");
    world.engines.workers[0].drop_kv_events(0);
    send(&world, &last).await;
    assert!(metric(&world, "moongate_kv_events_replays_total").await > 1);
    assert_eq!(metric(&world, "moongate_kv_events_messages_lost_total").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_hits_are_predicted_after_an_engine_restart() {
    for fleet in [TestFleetBuilder::sglang().plain(1), TestFleetBuilder::vllm(VllmConnector::Nixl).plain(1)] {
        let world = fleet.tune(with_events).start().await;
        converse(&world).await;
        world.engines.workers[0].restart_caches();
        let body = body(&world, &tokens(3, 2_000));
        wait_for_prediction(&world, &body, 0).await;
        assert_eq!(send(&world, &body).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_starts_later_predicts_the_same() {
    let first = TestFleetBuilder::sglang().plain(1).tune(with_events).start().await;
    converse(&first).await;
    let flags = first.engines.flags();
    let gateway = harness::gateway::TestGateway::start_ready(&flags).await;
    let TestFleet { engines, .. } = first;
    let second = TestFleet { engines, gateway, client: harness::client() };
    for conversation in 1..4 {
        let length = 7 * 331 * conversation;
        let body = body(&second, &tokens(conversation, length));
        wait_for_prediction(&second, &body, usable(&second, length)).await;
    }
}

/// Number of tokenize requests that engines have received.
fn tokenize_calls(world: &TestFleet) -> u64 {
    world.engines.all().map(|engine| engine.stats().tokenize_requests).sum()
}

fn text(world: &TestFleet, text: &str) -> Value {
    json!({"model": world.model(), "prompt": format!("{text} {}", "a long way ".repeat(40)), "max_tokens": 3})
}

fn scale_out(config: SimEngineOptions) -> SimEngineOptions {
    SimEngineOptions { scale_out: true, ..with_events(config) }
}

#[tokio::test(flavor = "multi_thread")]
async fn hits_of_texts_are_predicted_with_the_engines_tokenizer() {
    for fleet in [
        TestFleetBuilder::sglang().plain(1).tune(with_events),
        TestFleetBuilder::sglang().pairs(1).tune(with_events),
        TestFleetBuilder::vllm(VllmConnector::Nixl).plain(1).tune(with_events),
        TestFleetBuilder::vllm(VllmConnector::Nixl).pairs(1).tune(scale_out),
    ] {
        let world = fleet.flag("--tokenize-timeout=20s").start().await;
        let mut messages = Vec::new();
        let mut predicted = 0;
        for turn in 0..6 {
            let user_text = format!("turn {turn}: {}", "tell me more of it ".repeat(60));
            messages.push(json!({"role": "user", "content": user_text}));
            let chat = json!({"model": world.model(), "messages": messages, "max_tokens": 3});
            let text = text(&world, &user_text);
            for body in [chat, text] {
                predicted += send(&world, &body).await;
                let length = debug(&world, "predict", &body).await["input_tokens"].as_u64().unwrap();
                wait_for_prediction(&world, &body, usable(&world, u32::try_from(length).unwrap())).await;
            }
        }
        assert!(predicted > 1_000, "{predicted}");
        assert_eq!(metric(&world, "moongate_prediction_false_positive_tokens_total").await, 0);
        assert_eq!(metric(&world, "moongate_prediction_false_negative_tokens_total").await, 0);
        // The prediction before each request was for the same prompt.
        assert_eq!(metric(&world, "moongate_tokenized_prompts_total{by=\"engine_cache\"}").await, 12);
        assert_eq!(metric(&world, "moongate_tokenize_engine_seconds_count").await, 12);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_tokenizes_a_prompt_once_by_a_supported_endpoint() {
    let world =
        TestFleetBuilder::vllm(VllmConnector::Nixl).plain(1).tune(with_events).flag("--tokenize-timeout=20s");
    let world = world.start().await;
    for (prompt, asked) in [("one", 2), ("one", 2), ("two", 3), ("three", 4)] {
        let body = text(&world, prompt).to_string();
        assert_eq!(world.post("/v1/completions", body).await.status(), 200);
        assert_eq!(tokenize_calls(&world), asked, "{prompt}: what is not offered is asked for once");
    }
    assert_eq!(metric(&world, "moongate_tokenized_prompts_total{by=\"engine\"}").await, 3);
    assert_eq!(metric(&world, "moongate_tokenized_prompts_total{by=\"engine_cache\"}").await, 1);
    world.engines.workers[0]
        .set_fault(EngineFaultPlan { tokenize_only: true, ..EngineFault::NotFound.into() });
    for prompt in ["four", "five", "six"] {
        let body = text(&world, prompt).to_string();
        assert_eq!(world.post("/v1/completions", body).await.status(), 200);
    }
    assert_eq!(tokenize_calls(&world), 5, "a 404 is cached");
    assert_eq!(
        metric(&world, "moongate_unpredicted_requests_total{reason=\"tokenize_not_offered\"}").await,
        3
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_tokenize_delays_few_requests_and_fails_none() {
    let world =
        TestFleetBuilder::sglang().pairs(1).tune(with_events).flag("--tokenize-timeout=50ms").start().await;
    world.engines.all().for_each(|engine| {
        engine.set_fault(EngineFaultPlan { tokenize_only: true, ..EngineFault::Hang.into() });
    });
    for number in 0..9 {
        let body = text(&world, &format!("prompt {number}")).to_string();
        assert_eq!(world.post("/v1/completions", body).await.status(), 200);
    }
    assert_eq!(tokenize_calls(&world), 6, "each of the two engines three times");
    assert_eq!(metric(&world, "moongate_unpredicted_requests_total{reason=\"tokenize_timeout\"}").await, 6);
    assert_eq!(
        metric(&world, "moongate_unpredicted_requests_total{reason=\"tokenize_not_offered\"}").await,
        3
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn another_engine_tokenizes_when_one_fails() {
    let world =
        TestFleetBuilder::sglang().pairs(1).tune(with_events).flag("--tokenize-timeout=20s").start().await;
    world.engines.prefills[0]
        .set_fault(EngineFaultPlan { tokenize_only: true, ..EngineFault::CloseBeforeFirstByte.into() });
    for number in 0..9 {
        let body = text(&world, &format!("prompt {number}")).to_string();
        assert_eq!(world.post("/v1/completions", body).await.status(), 200);
    }
    assert!(
        world.engines.prefills[0].stats().tokenize_requests > 0,
        "the failing engine got no tokenize request"
    );
    assert_eq!(metric(&world, "moongate_tokenized_prompts_total{by=\"engine\"}").await, 9);
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_get_no_useless_tokenize_requests() {
    let silent = TestFleetBuilder::sglang().plain(1).start().await;
    let off =
        TestFleetBuilder::sglang().plain(1).tune(with_events).flag("--tokenize-timeout=0s").start().await;
    for (world, reason) in [(&silent, "no_cache_info"), (&off, "no_tokenizer")] {
        assert_eq!(world.post("/v1/completions", text(world, "one").to_string()).await.status(), 200);
        assert_eq!(tokenize_calls(world), 0, "{reason}");
        let counted = format!("moongate_unpredicted_requests_total{{reason=\"{reason}\"}}");
        assert_eq!(metric(world, &counted).await, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engines_own_tokenizer_files_are_used_if_local() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/gateway/tokenize/tests/data/small");
    for fleet in [TestFleetBuilder::sglang(), TestFleetBuilder::vllm(VllmConnector::Nixl)] {
        let tune =
            move |config| SimEngineOptions { model_path: Some(folder.to_owned()), ..with_events(config) };
        let world = fleet.plain(1).tune(tune).flag("--tokenize-timeout=0s").start().await;
        let body = text(&world, "one");
        let loaded = async {
            while debug(&world, "tokens", &body).await["reason"] == "no_tokenizer" {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        assert!(tokio::time::timeout(TEST_TIMEOUT, loaded).await.is_ok(), "the folder is not used");
        assert_eq!(world.post("/v1/completions", body.to_string()).await.status(), 200);
        assert_eq!(metric(&world, "moongate_tokenized_prompts_total{by=\"gateway\"}").await, 1);
        assert_eq!(tokenize_calls(&world), 0);
    }
}
