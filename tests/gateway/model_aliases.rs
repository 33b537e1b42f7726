//! Model aliases of the binary: weights, fallbacks, tenants, reload, and what clients and operators see of them.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use axum::http::StatusCode;
use moongate_loadtest::engine::{EngineFault, SimEngine, SimEngineOptions, SimProtocol, SimRole};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::{sleep, timeout};

use crate::harness::gateway::TestGateway;
use crate::harness::process::{GatewayAddresses, MoongateProcess};
use crate::harness::scripted::{EngineScript, ScriptedEngine, ScriptedEngineResponse};
use crate::harness::{TEST_TIMEOUT, client, openai_error};

const COMPLETIONS: &str = "/v1/completions";

/// A gateway process, and an engine for each of the models `m0`, `m1` and `m2`.
struct AliasedGateway {
    binary: MoongateProcess,
    at: GatewayAddresses,
    engines: Vec<ScriptedEngine>,
    folder: TempDir,
}

/// An engine that answers with its model's name.
async fn engine(model: &'static str, status: StatusCode) -> ScriptedEngine {
    let script =
        EngineScript { model, dp_size: 1, sglang_role: None, mooncake_query: None, server_info: Vec::new() };
    let body = json!({"model": model, "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]});
    let response = ScriptedEngineResponse { status, ..ScriptedEngineResponse::json(body.to_string()) };
    ScriptedEngine::start(script, response).await
}

impl AliasedGateway {
    /// Starts all; `m1` answers with `status`. In `flags`, `{}` is the folder of the alias file.
    async fn start(aliases: &str, status: StatusCode, flags: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        std::fs::write(folder.path().join("aliases.toml"), aliases).unwrap();
        let engines = vec![
            engine("m0", StatusCode::OK).await,
            engine("m1", status).await,
            engine("m2", StatusCode::OK).await,
        ];
        let place = folder.path().to_str().unwrap();
        let mut all = vec![
            format!("--model-alias-file={place}/aliases.toml"),
            "--health-interval=0s".to_owned(),
            "--attempts=1".to_owned(),
        ];
        all.extend(engines.iter().map(|engine| format!("--worker=http://{}", engine.address)));
        all.extend(flags.iter().map(|flag| flag.replace("{}", place)));
        let (binary, at) = MoongateProcess::gateway(&all).await;
        let world = Self { binary, at, engines, folder };
        let ready = format!("http://{}/ready", world.at.public);
        wait_until("all engines are usable", async || {
            let response: Value = client().get(&ready).send().await.unwrap().json().await.unwrap();
            response["engines"] == 3
        })
        .await;
        world
    }

    fn write(&self, aliases: &str) {
        std::fs::write(self.folder.path().join("aliases.toml"), aliases).unwrap();
    }

    async fn post(&self, body: &Value, headers: &[(&str, &str)]) -> reqwest::Response {
        let mut request = client().post(format!("http://{}{COMPLETIONS}", self.at.public)).json(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send().await.unwrap()
    }

    /// The model that answers a request for `name`, or the error's code.
    async fn answer(&self, name: &str, headers: &[(&str, &str)]) -> String {
        let response = self.post(&json!({"model": name, "prompt": "a"}), headers).await;
        let (status, body) = (response.status(), response.bytes().await.unwrap());
        let answer = match status {
            StatusCode::OK => serde_json::from_slice::<Value>(&body).unwrap()["model"].clone(),
            _ => openai_error(&body)["code"].clone(),
        };
        answer.as_str().unwrap().to_owned()
    }

    async fn models(&self, key: Option<&str>) -> Vec<Value> {
        let mut request = client().get(format!("http://{}/v1/models", self.at.public));
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        let mut list: Value = request.send().await.unwrap().json().await.unwrap();
        let mut models: Vec<Value> = serde_json::from_value(list["data"].take()).unwrap();
        models.sort_by_key(|model| model["id"].to_string());
        models
    }

    async fn admin_text(&self, path: &str) -> String {
        let url = format!("http://{}{path}", self.at.admin);
        client().get(url).send().await.unwrap().text().await.unwrap()
    }
}

/// Waits until `condition` holds.
async fn wait_until(what: &str, condition: impl AsyncFn() -> bool) {
    let waited = timeout(TEST_TIMEOUT, async {
        while !condition().await {
            sleep(Duration::from_millis(20)).await;
        }
    });
    assert!(waited.await.is_ok(), "not within {TEST_TIMEOUT:?}: {what}");
}

fn alias(name: &str, models: &[(&str, u32)], more: &str) -> String {
    let mut text = format!("[[alias]]\nname = \"{name}\"\nmodels = [");
    for (model, weight) in models {
        write!(text, "{{ model = \"{model}\", weight = {weight} }}, ").unwrap();
    }
    format!("{text}]\n{more}\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_get_the_models_name_in_place_of_the_alias() {
    let world = AliasedGateway::start(&alias("chat", &[("m0", 1)], ""), StatusCode::OK, &[]).await;
    let bodies = [
        (COMPLETIONS, "application/json", r#"{ "x": 1.50, "model" : "NAME", "prompt":"model NAME" }"#),
        ("/v1/embeddings", "application/json", r#"{"input":["chat"],"model":"NAME"}"#),
        (
            "/v1/audio/transcriptions",
            "multipart/form-data; boundary=b",
            "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nNAME\r\n\
             --b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\nchat\r\n--b--\r\n",
        ),
    ];
    for (index, (path, content_type, body)) in bodies.into_iter().enumerate() {
        let sent = body.replacen("NAME", "chat", 1);
        let request = client().post(format!("http://{}{path}", world.at.public));
        let response = request.header("content-type", content_type).body(sent).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        assert_eq!(response.json::<Value>().await.unwrap()["model"], "m0", "the response is the engine's");
        let received = world.engines[0].received(index + 1).await.pop().unwrap();
        assert_eq!(received.body, body.replacen("NAME", "m0", 1), "{path}");
    }
    let models = world.models(None).await;
    let listed: Vec<(&str, Option<&str>)> =
        models.iter().map(|model| (model["id"].as_str().unwrap(), model["root"].as_str())).collect();
    assert_eq!(listed, [("chat", Some("m0")), ("m0", None), ("m1", None), ("m2", None)]);
    let one = client().get(format!("http://{}/v1/models/chat", world.at.public)).send().await.unwrap();
    assert_eq!(one.json::<Value>().await.unwrap()["root"], "m0");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_divided_but_a_conversation_is_not() {
    let aliases = alias("chat", &[("m0", 1), ("m2", 1)], "");
    let world = AliasedGateway::start(&aliases, StatusCode::OK, &[]).await;
    let mut random = BTreeSet::new();
    for _ in 0..40 {
        random.insert(world.answer("chat", &[]).await);
    }
    assert_eq!(random.len(), 2, "40 requests without a session reach both models");
    let mut by_session = BTreeSet::new();
    for session in 0..20 {
        let session = session.to_string();
        let first = world.answer("chat", &[("x-session-id", &session)]).await;
        let again = world.answer("chat", &[("x-session-id", &session)]).await;
        assert_eq!(first, again, "session {session}");
        let body = json!({"model": "chat", "prompt": "a", "user": session});
        let same: Value = world.post(&body, &[]).await.json().await.unwrap();
        assert_eq!(same["model"], first, "the same name in the body");
        by_session.insert(first);
    }
    assert_eq!(by_session.len(), 2, "20 sessions are divided");
}

#[tokio::test(flavor = "multi_thread")]
async fn fallbacks_are_tried_in_order_and_counted() {
    let aliases = [
        alias("chat", &[("m1", 1)], "fallback = [\"gone\", \"m2\", \"m0\"]"),
        alias("alone", &[("m1", 1)], ""),
        alias("lost", &[("gone", 1)], "fallback = [\"gone too\"]"),
        alias("saved", &[("gone", 1)], "fallback = [\"m0\"]"),
    ];
    let world = AliasedGateway::start(&aliases.concat(), StatusCode::SERVICE_UNAVAILABLE, &[]).await;
    assert_eq!(world.answer("chat", &[("x-request-id", "mine")]).await, "m2");
    let received = world.engines[2].only_request().await;
    assert_eq!(serde_json::from_slice::<Value>(&received.body).unwrap()["model"], "m2");
    assert_eq!(world.answer("saved", &[]).await, "m0");
    assert_eq!(world.answer("alone", &[]).await, "engine_unavailable");

    let lost = world.post(&json!({"model": "lost", "prompt": "a"}), &[]).await;
    assert_eq!(lost.status(), 404);
    let error = openai_error(&lost.bytes().await.unwrap());
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("\"lost\" is an alias") && message.contains("\"gone\""), "{message}");
    let models = world.models(None).await;
    assert!(!models.iter().any(|model| model["id"] == "lost"), "{models:?}");

    let metrics = world.admin_text("/metrics").await;
    for (alias, model, outcome) in [
        ("chat", "m1", "failed"),
        ("chat", "gone", "unavailable"),
        ("chat", "m2", "started"),
        ("saved", "gone", "unavailable"),
        ("saved", "m0", "started"),
        ("alone", "m1", "failed"),
        ("lost", "gone", "unavailable"),
        ("lost", "gone too", "unavailable"),
    ] {
        let labels = format!("alias=\"{alias}\",model=\"{model}\",outcome=\"{outcome}\"");
        let line = format!("moongate_model_alias_requests_total{{{labels}}} 1\n");
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
    let decisions: Value = serde_json::from_str(&world.admin_text("/debug/decisions/mine").await).unwrap();
    let tried: Vec<(&str, &str)> = decisions["decisions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|decision| (decision["alias"].as_str().unwrap(), decision["model"].as_str().unwrap()))
        .collect();
    assert_eq!(tried, [("chat", "m1"), ("chat", "m2")]);
    let explained = MoongateProcess::run(&["explain", "mine", &format!("--admin={}", world.at.admin)]).await;
    assert!(explained.stdout.contains("model m2, for the alias chat"), "{}", explained.stdout);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_falls_back_after_a_timeout() {
    let start = async |model: &str| {
        let mut options = SimEngineOptions::new(SimRole::Plain, SimProtocol::Vllm).fast();
        options.model = model.to_owned();
        SimEngine::start(options).await.unwrap()
    };
    let (hanging, substitute) = (start("m0").await, start("m1").await);
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("aliases.toml");
    std::fs::write(&file, alias("chat", &[("m0", 1)], "fallback = [\"m1\"]")).unwrap();
    let gateway = TestGateway::start_ready(&[
        format!("--worker={}", hanging.url()),
        format!("--worker={}", substitute.url()),
        format!("--model-alias-file={}", file.display()),
        "--first-byte-timeout=2s".to_owned(),
    ])
    .await;
    hanging.set_fault(EngineFault::Hang);
    let body = json!({"model": "chat", "prompt": "a", "max_tokens": 2, "stream": true});
    let response = client().post(gateway.url(COMPLETIONS)).json(&body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let events = response.text().await.unwrap();
    assert!(events.contains("\"model\":\"m1\"") && events.ends_with("data: [DONE]\n\n"), "{events}");
    assert_eq!(substitute.stats().started, 1);
    let metrics = client().get(gateway.admin_url("/metrics")).send().await.unwrap().text().await.unwrap();
    for (model, outcome) in [("m0", "failed"), ("m1", "started")] {
        let labels = format!("{{alias=\"chat\",model=\"{model}\",outcome=\"{outcome}\"}} 1\n");
        assert!(metrics.contains(&labels), "{labels} in {metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejection_by_an_engine_has_no_fallback() {
    let aliases = alias("chat", &[("m1", 1)], "fallback = [\"m0\"]");
    let world = AliasedGateway::start(&aliases, StatusCode::BAD_REQUEST, &[]).await;
    let response = world.post(&json!({"model": "chat", "prompt": "a"}), &[]).await;
    assert_eq!(response.status(), 400);
    assert!(world.engines[0].received(0).await.is_empty());
    let metrics = world.admin_text("/metrics").await;
    assert!(metrics.contains("{alias=\"chat\",model=\"m1\",outcome=\"rejected\"} 1\n"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn aliases_of_tenants_are_hidden_from_others() {
    const KEYS: [&str; 2] = ["sk-of-team-a-0123456789", "sk-of-team-b-0123456789"];
    let aliases = alias("chat", &[("m0", 1)], "tenants = [\"team-a\"]");
    let folder = TempDir::new().unwrap();
    let access = folder.path().join("access.toml");
    let keys = format!(
        "[[key]]\nkey = \"{}\"\ntenant = \"team-a\"\n[[key]]\nkey = \"{}\"\ntenant = \"team-b\"\n",
        KEYS[0], KEYS[1]
    );
    std::fs::write(&access, keys).unwrap();
    let flag = format!("--access-file={}", access.display());
    let world = AliasedGateway::start(&aliases, StatusCode::OK, &[&flag]).await;
    for (key, expected, listed) in [(KEYS[0], "m0", 4), (KEYS[1], "model_not_found", 3)] {
        assert_eq!(world.answer("chat", &[("x-api-key", key)]).await, expected);
        assert_eq!(world.models(Some(key)).await.len(), listed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn aliases_reload_without_restart_and_a_bad_file_is_ignored() {
    let mut world = AliasedGateway::start(&alias("chat", &[("m0", 1)], ""), StatusCode::OK, &[]).await;
    world.write(&[alias("a", &[("b", 1)], ""), alias("b", &[("a", 1)], "")].concat());
    let line = world.binary.wait_for_line("keeping the previous content").await;
    assert!(line.contains("a → b → a"), "{line}");
    assert_eq!(world.answer("chat", &[]).await, "m0");
    let metrics = world.admin_text("/metrics").await;
    assert!(!metrics.contains("moongate_model_alias_reloads_total{result=\"invalid\"} 0\n"), "{metrics}");
    world.write(&alias("chat", &[("m2", 1)], ""));
    wait_until("the new model is used", async || world.answer("chat", &[]).await == "m2").await;
}
