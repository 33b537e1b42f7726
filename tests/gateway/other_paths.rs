//! Paths besides generation: each request goes to an engine that serves its model.

use reqwest::Response;
use serde_json::{Value, json};

use crate::harness::client;
use crate::harness::gateway::TestGateway;
use crate::harness::openai_error;
use crate::harness::scripted::{EngineScript, ScriptedEngine, ScriptedEngineResponse};

const JSON_PATHS: [&str; 16] = [
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
    "/classify",
    "/pooling",
    "/v1/embeddings",
    "/v1/audio/speech",
    "/v1/images/generations",
    "/v1/moderations",
    // Clients and proxies add slashes.
    "/v1/embeddings/",
    "/v1//rerank",
];
const FORM_PATHS: [&str; 4] =
    ["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits", "/v1/images/variations"];

/// Two engines with a model each behind a gateway.
struct TwoModels {
    engines: [ScriptedEngine; 2],
    gateway: TestGateway,
}

impl TwoModels {
    async fn start() -> Self {
        let start = async |model| {
            let script = EngineScript {
                model,
                dp_size: 1,
                sglang_role: None,
                mooncake_query: None,
                server_info: Vec::new(),
            };
            ScriptedEngine::start(script, ScriptedEngineResponse::json("{}")).await
        };
        let engines = [start("first").await, start("second").await];
        let flags: Vec<String> =
            engines.iter().map(|engine| format!("--worker=http://{}", engine.address)).collect();
        let gateway = TestGateway::start_ready(&flags).await;
        Self { engines, gateway }
    }

    async fn post(&self, path: &str, content_type: &str, body: String) -> Response {
        let request = client().post(self.gateway.url(path)).header("content-type", content_type);
        request.body(body).send().await.unwrap()
    }

    /// Number of requests that each engine has got.
    async fn counts(&self) -> [usize; 2] {
        [self.engines[0].received(0).await.len(), self.engines[1].received(0).await.len()]
    }
}

/// A form with a recording or image, and this model.
fn form(model: Option<&str>) -> String {
    let model = model
        .map(|model| format!("--b0\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n"));
    format!(
        "--b0\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\nname=\"model\"\0\r\n{}--b0--\r\n",
        model.unwrap_or_default()
    )
}

/// The error is about `model`, in the format of the path's API: with this code in OpenAI's, and this type in Anthropic's.
fn assert_error(path: &str, body: &[u8], (code, anthropic_type): (&str, &str)) {
    if path.starts_with("/v1/messages") {
        let error: Value = serde_json::from_slice(body).unwrap();
        assert_eq!(
            (&error["type"], &error["error"]["type"]),
            (&json!("error"), &json!(anthropic_type)),
            "{path}"
        );
        assert!(error["error"]["message"].as_str().unwrap().contains("`model`"), "{path}: {error}");
        return;
    }
    let error = openai_error(body);
    assert_eq!((&error["code"], &error["param"]), (&json!(code), &json!("model")), "{path}");
}

const FORM: &str = "multipart/form-data; boundary=b0";
const JSON: &str = "application/json";

#[tokio::test(flavor = "multi_thread")]
async fn requests_reach_an_engine_of_their_model() {
    let world = TwoModels::start().await;
    let bodies = |model: &str| {
        let json = JSON_PATHS.map(|path| (path, JSON, json!({"model": model, "input": "a"}).to_string()));
        let forms = FORM_PATHS.map(|path| (path, FORM, form(Some(model))));
        json.into_iter().chain(forms).collect::<Vec<_>>()
    };
    for (index, model) in ["first", "second"].into_iter().enumerate() {
        for (path, content_type, body) in bodies(model) {
            let before = world.counts().await;
            let response = world.post(path, content_type, body.clone()).await;
            assert_eq!(response.status(), 200, "{path}");
            let after = world.counts().await;
            assert_eq!((after[index], after[1 - index]), (before[index] + 1, before[1 - index]), "{path}");
            let received = world.engines[index].received(0).await.pop().unwrap();
            assert_eq!(received.body, body, "{path}");
            assert_eq!(received.path, path.trim_end_matches('/').replace("//", "/"));
        }
    }
    let served = world.counts().await;
    for (path, content_type, body) in bodies("third") {
        let response = world.post(path, content_type, body).await;
        assert_eq!(response.status(), 404, "{path}");
        assert_error(path, &response.bytes().await.unwrap(), ("model_not_found", "not_found_error"));
    }
    assert_eq!(world.counts().await, served);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_must_be_named_once_if_there_are_several() {
    let world = TwoModels::start().await;
    let mut cases: Vec<(&str, &str, String)> = Vec::new();
    cases.extend(JSON_PATHS.map(|path| (path, JSON, r#"{"input":"a"}"#.to_owned())));
    cases.extend(FORM_PATHS.map(|path| (path, FORM, form(None))));
    let field = "--b0\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nfirst\r\n";
    cases.push((FORM_PATHS[0], FORM, format!("{field}{field}--b0--\r\n")));
    for (path, content_type, body) in cases {
        let response = world.post(path, content_type, body).await;
        assert_eq!(response.status(), 400, "{path}");
        assert_error(path, &response.bytes().await.unwrap(), ("invalid_request", "invalid_request_error"));
    }
    assert_eq!(world.counts().await, [0, 0]);
    let no_model = world.post("/separate_reasoning", JSON, r#"{"text":"a"}"#.to_owned()).await;
    assert_eq!(no_model.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn chat_with_a_trailing_slash_is_served() {
    let world = TwoModels::start().await;
    let body = json!({"model": "second", "messages": [{"role": "user", "content": "a"}]}).to_string();
    let response = world.post("/v1/chat/completions/", JSON, body).await;
    assert_eq!(response.status(), 200);
    let received = world.engines[1].only_request().await;
    assert_eq!(received.path, "/v1/chat/completions");
    assert_eq!(serde_json::from_slice::<Value>(&received.body).unwrap()["model"], "second");
}
