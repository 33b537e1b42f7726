//! Canned completions: like generated ones, without the work.

use moongate_loadtest::engine::{
    CannedCompletions, SimEngine, SimEngineOptions, SimProtocol, SimRole, canned_event_ns, monotonic_ns,
};
use serde_json::{Value, json};

use super::{chat, content, events, post, start, with};

const PATH: &str = "/v1/chat/completions";

async fn start_canned(role: SimRole) -> SimEngine {
    let canned = Some(CannedCompletions::default());
    let options = SimEngineOptions { canned, ..SimEngineOptions::new(role, SimProtocol::Sglang) };
    SimEngine::start(options).await.expect("an engine")
}

fn member_names(value: &Value) -> Vec<&String> {
    value.as_object().expect("an object").keys().collect()
}

#[tokio::test]
async fn a_canned_response_has_the_members_of_a_generated_one() {
    let (canned, generating) =
        (start_canned(SimRole::Plain).await, start(SimRole::Plain, SimProtocol::Sglang).await);
    let request = chat("hi", 3);
    let (first, second) = (post(&canned, PATH, &request).await, post(&generating, PATH, &request).await);
    assert_eq!((first.0, content(&first.1)), (200, "Hello there."));
    for (left, right) in [
        (&first.1, &second.1),
        (&first.1["choices"][0], &second.1["choices"][0]),
        (&first.1["usage"], &second.1["usage"]),
    ] {
        assert_eq!(member_names(left), member_names(right));
    }
    let stats = canned.stats();
    assert_eq!((stats.started, stats.prompt_tokens), (0, 0));
    assert_eq!(post(&canned, "/tokenize", &json!({"prompt": "hi"})).await.0, 404);
}

#[tokio::test]
async fn a_canned_stream_has_the_time_of_each_token() {
    let engine = start_canned(SimRole::Plain).await;
    let before = monotonic_ns();
    let request = with(&chat("hi", 3), json!({"stream": true, "user": "itl-ms-20"}));
    let events = events(&engine, PATH, &request).await;
    let times: Vec<u64> =
        events.iter().filter_map(|event| canned_event_ns(event.to_string().as_bytes())).collect();
    assert_eq!((events.len(), times.len()), (4, 3));
    assert!(before <= times[0] && before + 40_000_000 <= times[2] && times[2] <= monotonic_ns());
    assert_eq!(events[3]["usage"]["completion_tokens"], 3);
}

#[tokio::test]
async fn canned_pairs_need_a_bootstrap_room() {
    for role in [SimRole::Prefill, SimRole::Decode] {
        let (canned, generating) = (start_canned(role).await, start(role, SimProtocol::Sglang).await);
        let request = chat("hi", 3);
        let rejected = post(&canned, PATH, &request).await;
        assert_eq!((rejected.0, &rejected), (400, &post(&generating, PATH, &request).await));
        let in_room = with(&request, json!({"bootstrap_room": 7}));
        assert_eq!(post(&canned, PATH, &in_room).await.0, 200);
    }
}

#[tokio::test]
async fn canned_completions_are_not_in_vllms_format() {
    let canned = Some(CannedCompletions::default());
    let options = SimEngineOptions { canned, ..SimEngineOptions::new(SimRole::Plain, SimProtocol::Vllm) };
    let error = SimEngine::start(options).await.expect_err("an error");
    assert!(error.to_string().contains("SGLang"), "{error}");
}
