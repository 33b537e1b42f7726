//! `moongate explain` for past decisions.

use serde_json::{Value, json};

use crate::harness::fleet::TestFleetBuilder;
use crate::harness::process::MoongateProcess;

#[tokio::test(flavor = "multi_thread")]
async fn a_decision_is_explained_and_replayed() {
    let world = TestFleetBuilder::sglang().pairs(2).start().await;
    let url = world.gateway.url("/v1/completions");
    let body = json!({"model": world.model(), "prompt": "why there?", "max_tokens": 1});
    let sent = world.client.post(url).header("x-request-id", "mine").json(&body).send().await.unwrap();
    assert_eq!(sent.status(), 200);

    let admin = world.gateway.admin_url("/debug/decisions/mine");
    let answer: Value = world.client.get(admin).send().await.unwrap().json().await.unwrap();
    let decision = &answer["decisions"][0];
    assert_eq!(
        (decision["policy"].as_str(), decision["candidates"].as_array().unwrap().len()),
        (Some("predictive"), 2)
    );
    let entry = decision["prefill"].as_str().unwrap().to_owned();

    let admin = format!("--admin={}", world.gateway.admin_url("").trim_start_matches("http://"));
    let output = MoongateProcess::run(&["explain", "mine", &admin, "--policy=round_robin"]).await;
    assert!(output.stdout.contains(&format!("replayed with predictive: {entry} + ")), "{}", output.stdout);
    assert!(output.stdout.contains("replayed with round_robin: "), "{}", output.stdout);
    let listed = MoongateProcess::run(&["explain", &admin]).await;
    assert!(listed.stdout.starts_with("mine  "), "{}", listed.stdout);

    let saved = MoongateProcess::run(&["explain", "mine", &admin, "--json"]).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), saved.stdout).unwrap();
    let again = MoongateProcess::run(&["explain", &format!("--file={}", file.path().display())]).await;
    assert!(again.stdout.contains(&format!("replayed with predictive: {entry} + ")), "{}", again.stdout);

    let unknown = MoongateProcess::run(&["explain", "nobody", &admin]).await;
    assert_eq!(unknown.status.code(), Some(1));
    assert!(unknown.stderr.contains("no decision recorded for \"nobody\""), "{}", unknown.stderr);
}

/// The length of responses is learned from `usage`, or from the events of a stream without it.
#[tokio::test(flavor = "multi_thread")]
async fn expected_length_of_a_response_follows_the_responses() {
    let world = TestFleetBuilder::sglang().pairs(1).start().await;
    let url = world.gateway.url("/v1/completions");
    for stream in [false, true] {
        let body = json!({"model": world.model(), "prompt": "how long?", "max_tokens": 32, "stream": stream});
        for _ in 0..40 {
            let response = world.client.post(&url).json(&body).send().await.unwrap();
            assert!(response.bytes().await.unwrap().len() > 100);
        }
        let id = format!("after-{stream}");
        let body = json!({"model": world.model(), "prompt": "how long?"});
        world.client.post(&url).header("x-request-id", &id).json(&body).send().await.unwrap();
        let admin = world.gateway.admin_url(&format!("/debug/decisions/{id}"));
        let answer: Value = world.client.get(admin).send().await.unwrap().json().await.unwrap();
        let expected = answer["decisions"][0]["snapshot"]["expected_output_tokens"].as_u64().unwrap();
        // Each response closes a hundredth of the distance to its 32 tokens, from 512.
        let range = if stream { 240..265 } else { 345..370 };
        assert!(range.contains(&expected), "{expected} tokens with stream={stream}");
    }
}
