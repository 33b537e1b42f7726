//! Simulated engines over real sockets; the tests take the gateway's role.

#![expect(clippy::expect_used, clippy::panic, reason = "helpers of tests fail the test")]

mod aborts;
mod agents;
mod canned;
mod events;
mod faults;
mod generator;
mod pairs;
mod surface;

use std::time::Duration;

use moongate_loadtest::engine::{
    SharedL3Store, SimEngine, SimEngineOptions, SimProtocol, SimRole, VllmConnector,
};
use serde_json::{Value, json};

/// Longer than any operation here takes, even on a busy machine.
const LONG: Duration = Duration::from_secs(30);

fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().expect("a client")
}

async fn start(role: SimRole, protocol: SimProtocol) -> SimEngine {
    SimEngine::start(SimEngineOptions::new(role, protocol).fast()).await.expect("an engine")
}

async fn start_vllm(role: SimRole, connector: VllmConnector, fleet: &SharedL3Store) -> SimEngine {
    let mut config = SimEngineOptions::new(role, SimProtocol::Vllm).fast();
    config.connector = connector;
    SimEngine::start_with_store(config, fleet).await.expect("an engine")
}

async fn post(engine: &SimEngine, path: &str, body: &Value) -> (u16, Value) {
    let response =
        client().post(format!("{}{path}", engine.url())).json(body).send().await.expect("a response");
    (response.status().as_u16(), response.json().await.expect("JSON"))
}

async fn get(engine: &SimEngine, path: &str) -> Value {
    client()
        .get(format!("{}{path}", engine.url()))
        .send()
        .await
        .expect("a response")
        .json()
        .await
        .expect("JSON")
}

/// All events of a stream, without `[DONE]`.
async fn events(engine: &SimEngine, path: &str, body: &Value) -> Vec<Value> {
    let response =
        client().post(format!("{}{path}", engine.url())).json(body).send().await.expect("a response");
    assert_eq!(response.status(), 200);
    let text = response.text().await.expect("a whole stream");
    let events: Vec<&str> = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    let (done, events) = events.split_last().expect("events");
    assert_eq!(*done, "[DONE]");
    events.iter().map(|event| serde_json::from_str(event).expect("JSON")).collect()
}

fn chat(text: &str, max_tokens: u32) -> Value {
    json!({"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens})
}

/// A copy with additional members.
fn with(body: &Value, more: Value) -> Value {
    let mut body = body.clone();
    let members = body.as_object_mut().expect("an object");
    members.extend(more.as_object().expect("an object").clone());
    body
}

/// Exchanges of a real engine.
fn recording(name: &str) -> Vec<Value> {
    let path = format!("{}/tests/data/wire-{name}.jsonl", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).expect("a recording");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn content(response: &Value) -> &str {
    response["choices"][0]["message"]["content"].as_str().expect("content")
}

fn bootstrap(prefill: &SimEngine, room: &Value) -> Value {
    let address = prefill.bootstrap_addr().expect("a prefill engine");
    json!({"bootstrap_host": address.ip().to_string(), "bootstrap_port": address.port(), "bootstrap_room": room})
}
