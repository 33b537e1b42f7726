//! Decodes that compute prompts themselves.

use moongate_loadtest::engine::VllmConnector;
use serde_json::Value;

use crate::harness::fleet::{TestFleet, TestFleetBuilder};

const BODY: &str = r#"{"model":"sim","prompt":"a few words","max_tokens":2}"#;

/// Sends a completion and returns its decision.
async fn complete(world: &TestFleet) -> Value {
    let url = world.gateway.url("/v1/completions");
    let request = world.client.post(url).header("content-type", "application/json");
    let response = request.header("x-request-id", "one").body(BODY).send().await.unwrap();
    assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
    assert!(!response.bytes().await.unwrap().is_empty());
    let admin = world.gateway.admin_url("/debug/decisions/one");
    let answer: Value = world.client.get(admin).send().await.unwrap().json().await.unwrap();
    answer["decisions"][0].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_vllm_decode_serves_a_request_alone_with_a_target() {
    for connector in [VllmConnector::Nixl, VllmConnector::Mooncake, VllmConnector::Store] {
        let builder = TestFleetBuilder::vllm(connector).pairs(1).flag("--engine=vllm");
        let world = builder.flag("--tpot-target=500ms").start().await;
        let decision = complete(&world).await;
        let reason = decision["reason"].as_str().unwrap();
        assert!(reason.ends_with("with the prompt computed by the decode"), "{connector:?}: {decision}");
        assert_eq!(TestFleet::last_request(&world.engines.decodes[0]).body, BODY, "{connector:?}");
        assert!(world.engines.prefills[0].recent_requests(1).is_empty(), "{connector:?}");
        assert_eq!(decision["candidates"].as_array().unwrap().len(), 2, "{decision}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_requests_get_a_pair() {
    let vllm = || TestFleetBuilder::vllm(VllmConnector::Nixl).flag("--engine=vllm");
    // Only the target bounds what prompts cost the sequences of a decode, and SGLang's decodes compute none.
    let without_target = vllm();
    let sglang = TestFleetBuilder::sglang().flag("--tpot-target=500ms");
    for builder in [without_target, sglang] {
        let world = builder.pairs(1).start().await;
        let decision = complete(&world).await;
        assert_eq!(world.engines.prefills[0].recent_requests(2).len(), 1, "{decision}");
        assert_eq!(world.engines.decodes[0].recent_requests(2).len(), 1, "{decision}");
    }
}
