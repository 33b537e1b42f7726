//! Engines with scripted responses that record all requests byte for byte.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use moongate_runtime::Supervisor;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;

/// How long a request may take to arrive.
const LIMIT: Duration = Duration::from_secs(10);

/// The properties that a scripted engine reports.
#[derive(Debug, Clone)]
pub(crate) struct EngineScript {
    pub(crate) model: &'static str,
    pub(crate) dp_size: u32,
    /// `prefill` or `decode` for SGLang; `None` for vLLM, which does not report it.
    pub(crate) sglang_role: Option<&'static str>,
    /// The Mooncake bootstrap server's response to `/query`.
    pub(crate) mooncake_query: Option<String>,
    /// More members of SGLang's `/server_info`.
    pub(crate) server_info: Vec<(&'static str, Value)>,
}

/// A request as it came.
#[derive(Debug, Clone)]
pub(crate) struct ReceivedRequest {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl ReceivedRequest {
    /// A header's text; empty if there is none.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

/// What every generation request is answered.
#[derive(Debug, Clone, Default)]
pub(crate) struct ScriptedEngineResponse {
    pub(crate) status: StatusCode,
    pub(crate) content_type: &'static str,
    pub(crate) headers: Vec<(&'static str, &'static str)>,
    pub(crate) body: Bytes,
}

impl ScriptedEngineResponse {
    /// A response with this JSON text, byte for byte.
    pub(crate) fn json(text: impl Into<Bytes>) -> Self {
        Self {
            status: StatusCode::OK,
            content_type: "application/json",
            headers: Vec::new(),
            body: text.into(),
        }
    }

    /// Server-sent events, byte for byte.
    pub(crate) fn events(text: impl Into<Bytes>) -> Self {
        Self {
            status: StatusCode::OK,
            content_type: "text/event-stream; charset=utf-8",
            headers: Vec::new(),
            body: text.into(),
        }
    }
}

struct ScriptedEngineState {
    script: EngineScript,
    response: ScriptedEngineResponse,
    received: watch::Sender<Vec<ReceivedRequest>>,
}

/// A running scripted engine. Its bootstrap server is at the same port.
pub(crate) struct ScriptedEngine {
    pub(crate) address: SocketAddr,
    shared: Arc<ScriptedEngineState>,
    supervisor: Supervisor,
}

impl ScriptedEngine {
    pub(crate) async fn start(script: EngineScript, answer: ScriptedEngineResponse) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared =
            Arc::new(ScriptedEngineState { script, response: answer, received: watch::Sender::default() });
        let router = Router::new().fallback(serve_scripted).with_state(shared.clone());
        let supervisor = Supervisor::new();
        let stop = supervisor.token();
        supervisor.spawn("scripted engine", async move {
            tokio::select! {
                served = axum::serve(listener, router) => served.unwrap(),
                () = stop.cancelled() => {}
            }
        });
        Self { address, shared, supervisor }
    }

    /// Waits for `count` generation requests, and returns all: a client may receive its response before both legs have arrived.
    pub(crate) async fn received(&self, count: usize) -> Vec<ReceivedRequest> {
        let mut received = self.shared.received.subscribe();
        let arrived = received.wait_for(|received| received.len() >= count);
        timeout(LIMIT, arrived).await.expect("the engine gets its requests").unwrap().clone()
    }

    /// Waits for a generation request, which must be the only one.
    pub(crate) async fn only_request(&self) -> ReceivedRequest {
        let [only] = self.received(1).await.try_into().expect("one request");
        only
    }
}

impl Drop for ScriptedEngine {
    fn drop(&mut self) {
        self.supervisor.token().cancel();
    }
}

async fn serve_scripted(State(shared): State<Arc<ScriptedEngineState>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
    if parts.method == Method::GET {
        return probe(&shared.script, parts.uri.path());
    }
    let body = to_bytes(body, usize::MAX).await.unwrap();
    if parts.uri.path() == "/abort_request" {
        return Response::new(Body::empty());
    }
    shared
        .received
        .send_modify(|received| received.push(ReceivedRequest { path, headers: parts.headers, body }));
    let ScriptedEngineResponse { status, content_type, headers, body } = shared.response.clone();
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    for (name, value) in headers {
        response.headers_mut().append(name, HeaderValue::from_static(value));
    }
    response
}

/// The responses to the requests of discovery.
fn probe(script: &EngineScript, path: &str) -> Response {
    let EngineScript { model, dp_size, .. } = script;
    let answer = match (path, script.sglang_role, &script.mooncake_query) {
        ("/v1/models", ..) => {
            json!({"object": "list", "data": [{"id": model, "object": "model"}]}).to_string()
        }
        ("/server_info", Some(role), _) => {
            let mut info = json!({
                "model_path": model, "served_model_name": model, "disaggregation_mode": role, "version": "0.5.23",
                "dp_size": dp_size, "page_size": 32,
            });
            for (key, value) in &script.server_info {
                info[key] = value.clone();
            }
            info.to_string()
        }
        ("/route", Some("prefill"), _) => json!({"dp_size": dp_size, "page_size": 32}).to_string(),
        ("/version", None, _) => json!({"version": "0.32.0"}).to_string(),
        ("/metrics", None, _) => (0..*dp_size)
            .map(|rank| {
                format!("vllm:num_requests_running{{engine=\"{rank}\",model_name=\"{model}\"}} 0.0\n")
            })
            .collect(),
        ("/query", None, Some(query)) => query.clone(),
        _ => {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::NOT_FOUND;
            return response;
        }
    };
    Response::new(Body::from(answer))
}
