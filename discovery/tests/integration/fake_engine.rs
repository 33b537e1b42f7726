//! HTTP servers with scripted responses per path, as in the engines' protocols.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use moongate_runtime::Supervisor;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// The query that a bootstrap server accepts once all ranks are registered.
const ALL_RANKS: [&str; 4] =
    ["prefill_dp_rank=-1", "prefill_cp_rank=-1", "target_tp_rank=-1", "target_pp_rank=-1"];

#[derive(Default)]
struct ServerScript {
    replies: BTreeMap<String, ScriptedReply>,
    request_counts: BTreeMap<String, usize>,
    authorizations: Vec<String>,
}

#[derive(Clone)]
enum ScriptedReply {
    Body(u16, String),
    Hang,
}

/// One listening server with scripted answers; unknown paths are 404.
#[derive(Clone)]
pub(crate) struct ScriptedServer {
    pub(crate) port: u16,
    script: Arc<Mutex<ServerScript>>,
}

impl ScriptedServer {
    pub(crate) async fn start(supervisor: &Supervisor) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let script = Arc::<Mutex<ServerScript>>::default();
        let app = Router::new().fallback(respond).with_state(script.clone());
        supervisor.spawn("fake-engine", async move { axum::serve(listener, app).await.unwrap() });
        Self { port, script }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub(crate) fn on(&self, path: &str, status: u16, body: impl ToString) -> &Self {
        self.script.lock().replies.insert(path.to_owned(), ScriptedReply::Body(status, body.to_string()));
        self
    }

    pub(crate) fn hang(&self, path: &str) {
        self.script.lock().replies.insert(path.to_owned(), ScriptedReply::Hang);
    }

    pub(crate) fn request_count(&self, path: &str) -> usize {
        self.script.lock().request_counts.get(path).copied().unwrap_or(0)
    }

    pub(crate) fn authorizations(&self) -> Vec<String> {
        self.script.lock().authorizations.clone()
    }
}

async fn respond(State(script): State<Arc<Mutex<ServerScript>>>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let query = request.uri().query().unwrap_or_default();
    let answer = {
        let mut script = script.lock();
        *script.request_counts.entry(path.clone()).or_default() += 1;
        if let Some(value) = request.headers().get("authorization") {
            script.authorizations.push(value.to_str().unwrap().to_owned());
        }
        script.replies.get(&path).cloned()
    };
    match answer {
        Some(ScriptedReply::Body(..))
            if path == "/route" && ALL_RANKS.iter().any(|part| !query.contains(part)) =>
        {
            (StatusCode::BAD_REQUEST, "missing inputs").into_response()
        }
        Some(ScriptedReply::Body(status, body)) => {
            (StatusCode::from_u16(status).unwrap(), body).into_response()
        }
        Some(ScriptedReply::Hang) => std::future::pending().await,
        None => (StatusCode::NOT_FOUND, r#"{"detail":"Not Found"}"#).into_response(),
    }
}

pub(crate) fn models(names: &[&str]) -> Value {
    let cards: Vec<Value> =
        names.iter().map(|name| json!({"id": name, "object": "model", "max_model_len": 4096})).collect();
    json!({"object": "list", "data": cards})
}

/// SGLang's HTTP API, with `mode` as its `disaggregation_mode`.
pub(crate) fn sglang(server: &ScriptedServer, mode: &str, bootstrap_port: u16) {
    let info = json!({
        "model_path": "/models/tiny", "served_model_name": "tiny", "disaggregation_mode": mode,
        "disaggregation_bootstrap_port": bootstrap_port, "version": "0.5.23", "dp_size": 2, "page_size": 64,
        "context_length": 8192, "internal_states": [{}],
    });
    server.on("/server_info", 200, info).on("/v1/models", 200, models(&["tiny", "tiny"]));
}

/// SGLang's bootstrap server, before or after all ranks are registered.
pub(crate) fn sglang_bootstrap(server: &ScriptedServer, complete: bool) {
    if complete {
        let info = json!({"attn_tp_size": 1, "dp_size": 2, "pp_size": 1, "page_size": 64, "follow_bootstrap_room": true});
        server.on("/route", 200, info);
    } else {
        server.on("/route", 503, "prefill info is not ready");
    }
}

/// vLLM's HTTP API with the given `/metrics`.
pub(crate) fn vllm(server: &ScriptedServer, metrics: &str) {
    server
        .on("/version", 200, json!({"version": "0.33.0"}))
        .on("/server_info", 200, json!({"vllm_config": "…"}))
        .on("/v1/models", 200, models(&["tiny"]))
        .on("/metrics", 200, metrics);
}

/// The bootstrap server of vLLM's MooncakeConnector.
pub(crate) fn mooncake_query(server: &ScriptedServer, engine_id: &str) {
    server.on(
        "/query",
        200,
        json!({"0": {"engine_id": engine_id, "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}}),
    );
}
