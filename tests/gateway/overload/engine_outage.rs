//! A model whose engines are out is unavailable, not unknown.

use std::time::Duration;

use crate::harness::fleet::TestFleetBuilder;
use crate::harness::gateway::TestGateway;
use crate::harness::{TEST_TIMEOUT, client, openai_error};

const EMBEDDINGS: &str = "/v1/embeddings";

/// Status, `Retry-After` and code of the response to a request for `model`; no code if it succeeds.
async fn send(gateway: &TestGateway, path: &str, model: &str) -> (u16, Option<String>, String) {
    let body = format!(r#"{{"model":"{model}","prompt":"a","input":"a","max_tokens":1}}"#);
    let request = client().post(gateway.url(path)).header("content-type", "application/json").body(body);
    shown(request.send().await.unwrap()).await
}

async fn shown(response: reqwest::Response) -> (u16, Option<String>, String) {
    let status = response.status().as_u16();
    let after = response.headers().get("retry-after").map(|value| value.to_str().unwrap().to_owned());
    let body = response.bytes().await.unwrap();
    let code =
        if status == 200 { String::new() } else { openai_error(&body)["code"].as_str().unwrap().to_owned() };
    (status, after, code)
}

fn unavailable() -> (u16, Option<String>, String) {
    (503, Some("1".to_owned()), "no_engine_available".to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_whose_engines_are_out_is_not_unknown() {
    let mut lost = TestFleetBuilder::sglang().plain(1).engines().await;
    let tuned = TestFleetBuilder::sglang().plain(1).tune(|mut config| {
        config.model = "other".to_owned();
        config.fast()
    });
    let world = tuned.flag(&format!("--worker={}", lost.workers[0].url())).start().await;
    let gateway = &world.gateway;
    assert_eq!(send(gateway, "/v1/completions", "sim").await.0, 200);
    lost.workers.remove(0).stop().await;
    // The first requests find the engine dead, which has it probed; from then on it is not usable.
    let mut topology = gateway.running.topology.clone();
    let noticed = async {
        loop {
            send(gateway, "/v1/completions", "sim").await;
            let unusable =
                topology.wait_for(|topology| topology.instances.iter().any(|i| i.usable_facts().is_none()));
            if tokio::time::timeout(Duration::from_millis(200), unusable).await.is_ok() {
                return;
            }
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, noticed).await.unwrap();
    // The fleet follows the topology a moment later.
    while !client()
        .get(gateway.admin_url("/ready"))
        .send()
        .await
        .unwrap()
        .text()
        .await
        .unwrap()
        .contains("reason")
    {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for path in ["/v1/completions", EMBEDDINGS] {
        assert_eq!(send(gateway, path, "sim").await, unavailable(), "{path}");
        assert_eq!(send(gateway, path, "nope").await.2, "model_not_found", "{path}");
    }
    let one = client().get(gateway.url("/v1/models/sim")).send().await.unwrap();
    assert_eq!(shown(one).await, unavailable());
    assert_eq!(send(gateway, "/v1/completions", "other").await.0, 200);
    // A request without a model is rejected, and not sent to the other model.
    let unnamed =
        client().post(gateway.url("/v1/completions")).body(r#"{"prompt":"a"}"#).send().await.unwrap();
    assert_eq!(shown(unnamed).await.2, "invalid_request");
}

/// An engine that has never answered may serve any model.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_has_not_answered_yet_may_serve_it() {
    let engines = TestFleetBuilder::sglang().plain(1).engines().await;
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let flags = [format!("--worker={}", engines.workers[0].url()), format!("--worker=http://{closed}")];
    let gateway = TestGateway::start(&flags).await;
    while send(&gateway, "/v1/completions", "sim").await.0 != 200 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for path in ["/v1/completions", EMBEDDINGS] {
        assert_eq!(send(&gateway, path, "nope").await, unavailable(), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_any_engine_every_path_is_unavailable() {
    let gateway = TestGateway::start(&["--registration".to_owned()]).await;
    for path in ["/v1/completions", EMBEDDINGS] {
        assert_eq!(send(&gateway, path, "sim").await, unavailable(), "{path}");
    }
}
