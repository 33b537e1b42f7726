//! Simulated engines over real sockets; the tests play the gateway.

#![expect(clippy::expect_used, clippy::panic, reason = "helpers of tests fail the test")]

mod aborts;
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

/// Longer than anything here takes, even on a busy machine.
const LONG: Duration = Duration::from_secs(30);

fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().expect("a client")
}

async fn start(role: SimRole, face: SimProtocol) -> SimEngine {
    SimEngine::start(SimEngineOptions::new(role, face).fast()).await.expect("an engine")
}

async fn start_vllm(role: SimRole, connector: VllmConnector, fleet: &SharedL3Store) -> SimEngine {
    let mut config = SimEngineOptions::new(role, SimProtocol::Vllm).fast();
    config.connector = connector;
    SimEngine::start_with_store(config, fleet).await.expect("an engine")
}

async fn post(engine: &SimEngine, path: &str, body: &Value) -> (u16, Value) {
    let answer = client().post(format!("{}{path}", engine.url())).json(body).send().await.expect("an answer");
    (answer.status().as_u16(), answer.json().await.expect("JSON"))
}

async fn get(engine: &SimEngine, path: &str) -> Value {
    client()
        .get(format!("{}{path}", engine.url()))
        .send()
        .await
        .expect("an answer")
        .json()
        .await
        .expect("JSON")
}

/// The events of a whole stream, without `[DONE]`.
async fn events(engine: &SimEngine, path: &str, body: &Value) -> Vec<Value> {
    let answer = client().post(format!("{}{path}", engine.url())).json(body).send().await.expect("an answer");
    assert_eq!(answer.status(), 200);
    let text = answer.text().await.expect("a whole stream");
    let events: Vec<&str> = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    let (done, events) = events.split_last().expect("events");
    assert_eq!(*done, "[DONE]");
    events.iter().map(|event| serde_json::from_str(event).expect("JSON")).collect()
}

fn chat(text: &str, max_tokens: u32) -> Value {
    json!({"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens})
}

/// A copy with more members.
fn with(body: &Value, more: Value) -> Value {
    let mut body = body.clone();
    let members = body.as_object_mut().expect("an object");
    members.extend(more.as_object().expect("an object").clone());
    body
}

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().expect("content")
}

fn bootstrap(prefill: &SimEngine, room: &Value) -> Value {
    let address = prefill.bootstrap_addr().expect("a prefill engine");
    json!({"bootstrap_host": address.ip().to_string(), "bootstrap_port": address.port(), "bootstrap_room": room})
}
