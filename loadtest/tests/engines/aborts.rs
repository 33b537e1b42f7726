//! Engines detect disconnected clients and obey `/abort_request`.

use moongate_loadtest::engine::{AbortKind, SimEngine, SimEngineOptions, SimProtocol, SimRole};
use serde_json::json;

use super::{LONG, bootstrap, chat, client, events, post, start, with};

/// An engine slow enough to be interrupted: 20 ms per token.
async fn slow(role: SimRole) -> SimEngine {
    let mut config = SimEngineOptions::new(role, SimProtocol::Sglang);
    config.service.prefill_base_s = 0.0;
    SimEngine::start(config).await.expect("an engine")
}

#[tokio::test]
async fn mid_stream_disconnect_is_detected() {
    let engine = slow(SimRole::Plain).await;
    let body = with(&chat("long", 100_000), json!({"stream": true, "rid": "left"}));
    let mut response = client()
        .post(format!("{}/v1/chat/completions", engine.url()))
        .json(&body)
        .send()
        .await
        .expect("a response");
    response.chunk().await.expect("a chunk");
    assert_eq!(engine.stats().active, 1);
    drop(response);
    assert!(engine.wait_for(LONG, |stats| stats.aborted_by_disconnect == 1 && stats.running == 0).await);
    let stats = engine.stats();
    assert_eq!((stats.active, stats.finished, stats.open_connections), (0, 0, 0));
    assert_eq!((stats.aborts[0].kind, stats.aborts[0].rid.as_str()), (AbortKind::Disconnect, "left"));
}

#[tokio::test]
async fn early_disconnect_is_detected_on_both_legs() {
    let prefill = slow(SimRole::Prefill).await;
    let decode = slow(SimRole::Decode).await;
    for engine in [&prefill, &decode] {
        // The other leg never arrives.
        let body = with(&chat("wait", 5), bootstrap(&prefill, &json!(5)));
        let url = format!("{}/v1/chat/completions", engine.url());
        let request = client().post(url).json(&body).send();
        tokio::select! {
            response = request => panic!("{response:?}"),
            reached = engine.wait_for(LONG, |stats| stats.bootstrapping + stats.transferring == 1) => assert!(reached),
        }
        assert!(engine.wait_for(LONG, |stats| stats.aborted_by_disconnect == 1 && stats.active == 0).await);
        assert_eq!(engine.stats().bootstrapping + engine.stats().transferring, 0);
    }
    // The decode's slot is free again: a pair with the same room succeeds.
    let body = with(&chat("again", 2), bootstrap(&prefill, &json!(5)));
    let (first, second) = tokio::join!(
        post(&prefill, "/v1/chat/completions", &body),
        post(&decode, "/v1/chat/completions", &body)
    );
    assert_eq!((first.0, second.0), (200, 200));
}

#[tokio::test]
async fn an_abort_names_its_requests_by_prefix() {
    let engine = slow(SimRole::Plain).await;
    let long = chat("long", 100_000);
    let abort = async {
        assert!(engine.wait_for(LONG, |stats| stats.completion_tokens >= 4 && stats.active == 3).await);
        let url = format!("{}/abort_request", engine.url());
        let response = client().post(url).json(&json!({"rid": "req-1"})).send().await.expect("a response");
        assert_eq!(response.status(), 200);
    };
    let path = "/v1/chat/completions";
    let streamed = with(&long, json!({"rid": "req-1a", "stream": true}));
    let whole = with(&long, json!({"rid": "req-1b"}));
    let other = with(&chat("short", 30), json!({"rid": "req-2"}));
    let (streamed, whole, other, ()) = tokio::join!(
        events(&engine, path, &streamed),
        post(&engine, path, &whole),
        post(&engine, path, &other),
        abort
    );
    assert_eq!(streamed.last().expect("events")["choices"][0]["finish_reason"], "abort");
    assert_eq!((whole.0, &whole.1["choices"][0]["finish_reason"]), (200, &json!("abort")));
    assert_eq!((other.0, &other.1["choices"][0]["finish_reason"]), (200, &json!("length")));
    assert_eq!(whole.1["id"], "req-1b");
    let stats = engine.stats();
    assert_eq!((stats.aborted_by_rid, stats.finished, stats.aborted_by_disconnect), (2, 1, 0));
}

#[tokio::test]
async fn requests_are_recorded_unchanged() {
    let engine = start(SimRole::Plain, SimProtocol::Sglang).await;
    let body = "{ \"messages\":[{\"role\":\"user\",\"content\":\"é\"}] ,\"temperature\":1.0000000000000002,\"unknown\":[1] }";
    let sent =
        client().post(format!("{}/v1/chat/completions?a=b", engine.url())).header("X-Foo", "bar").body(body);
    assert_eq!(sent.send().await.expect("a response").status(), 200);
    let last = engine.recent_requests(1);
    assert_eq!(last[0].body, body.as_bytes());
    assert_eq!((last[0].method.as_str(), last[0].target.as_str()), ("POST", "/v1/chat/completions?a=b"));
    assert!(last[0].headers.contains(&("x-foo".to_owned(), "bar".to_owned())));
    let over_http = super::get(&engine, "/_sim/requests").await;
    assert_eq!(over_http[0]["body"], body);
}
