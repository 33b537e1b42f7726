//! The API server and the gateways, as far as the planner uses them, on threads of their own.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::{Request, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};

/// Engines of each role of each deployment.
const ENGINES: usize = 8;
/// Requests per second of each deployment.
const REQUESTS_PER_S: f64 = 10.0;
/// Histograms and counters by label that decisions do not need.
const OTHER_SERIES: usize = 250;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListQuery {
    label_selector: Option<String>,
    watch: Option<String>,
}

struct Servers {
    started: Instant,
    /// Replicas of the scale subresources that have been written.
    replicas: Mutex<HashMap<String, u64>>,
}

/// Starts them, and returns their port.
pub(crate) fn start() -> u16 {
    let (sender, receiver) = std::sync::mpsc::channel();
    let serve = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            sender.send(listener.local_addr().unwrap().port()).unwrap();
            let routes = Router::new()
                .route("/gateways/{index}/metrics", get(gateway))
                .route(
                    "/apis/apps/v1/namespaces/models/deployments/{name}/scale",
                    get(scale).patch(set_scale),
                )
                .route("/api/v1/namespaces/models/pods", get(pods))
                .route("/api/v1/namespaces/planner/configmaps/{name}", get(no_state).patch(stored_state))
                .with_state(Arc::new(Servers { started: Instant::now(), replicas: Mutex::default() }));
            axum::serve(listener, routes).await.unwrap();
        });
    };
    std::thread::Builder::new().name("servers".to_owned()).spawn(serve).unwrap();
    receiver.recv().unwrap()
}

async fn scale(servers: State<Arc<Servers>>, Path(name): Path<String>) -> Json<Value> {
    let replicas = servers.replicas.lock().get(&name).copied().unwrap_or(ENGINES as u64);
    Json(json!({
        "apiVersion": "autoscaling/v1",
        "kind": "Scale",
        "metadata": { "name": name, "namespace": "models", "resourceVersion": "1" },
        "spec": { "replicas": replicas },
        "status": { "replicas": replicas, "selector": format!("engine={name}") },
    }))
}

async fn set_scale(
    servers: State<Arc<Servers>>,
    path: Path<String>,
    Json(patch): Json<Value>,
) -> Json<Value> {
    let replicas = patch["spec"]["replicas"].as_u64().unwrap();
    servers.replicas.lock().insert(path.0.clone(), replicas);
    scale(servers, path).await
}

async fn pods(Query(query): Query<ListQuery>) -> Response {
    if query.watch.is_some() {
        // No pod changes.
        let never = futures_util::stream::pending::<Result<Bytes, Infallible>>();
        return Body::from_stream(never).into_response();
    }
    let engine = query.label_selector.unwrap_or_default();
    let pods: Vec<Value> = (0..ENGINES)
        .map(|index| {
            json!({
                "metadata": {
                    "name": format!("{engine}-{index}"),
                    "uid": format!("{engine}-{index}"),
                    "creationTimestamp": "2026-01-01T00:00:00Z",
                },
                "status": {
                    "phase": "Running",
                    "conditions": [{ "type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:01:00Z" }],
                },
            })
        })
        .collect();
    let list = json!({ "apiVersion": "v1", "kind": "PodList", "metadata": { "resourceVersion": "1" }, "items": pods });
    Json(list).into_response()
}

async fn no_state() -> Response {
    let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404, "message": "not found" });
    (StatusCode::NOT_FOUND, Json(status)).into_response()
}

async fn stored_state(Path(name): Path<String>, request: Request<Body>) -> Json<Value> {
    drop(request);
    Json(
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name, "namespace": "planner" } }),
    )
}

/// Metrics of a gateway with as many engines as the deployment has. About 40 kB.
async fn gateway(servers: State<Arc<Servers>>) -> String {
    let requests = (servers.started.elapsed().as_secs_f64() * REQUESTS_PER_S).floor();
    let mut text = format!(
        "moongate_prompt_tokens_total {}\nmoongate_cached_tokens_total {}\nmoongate_completion_tokens_total {}\n\
         moongate_requests_total{{api=\"chat\",code=\"ok\"}} {requests}\nmoongate_requests_in_flight 40\n\
         moongate_requests_queued 0\n",
        requests * 2000.0,
        requests * 500.0,
        requests * 200.0
    );
    for series in 0..OTHER_SERIES {
        let _infallible = writeln!(
            text,
            "moongate_request_duration_seconds_bucket{{le=\"{series}\",api=\"chat\"}} {requests} # {{trace_id=\"4bf92f3577b34da6a3ce929d0e0e4736\"}} 0.67"
        );
    }
    for (name, bounds) in
        [("ttft", [0.05, 0.25, 0.5, 1.0, 2.0, 8.0]), ("itl", [0.005, 0.01, 0.02, 0.03, 0.05, 0.1])]
    {
        let labels = if name == "ttft" { ",api=\"chat\"" } else { "" };
        for bound in bounds.iter().map(ToString::to_string).chain(["+Inf".to_owned()]) {
            let _infallible =
                writeln!(text, "moongate_{name}_seconds_bucket{{le=\"{bound}\"{labels}}} {requests}");
        }
    }
    let families = [
        "up",
        "breaker_open",
        "suspect",
        "requests_in_flight",
        "pending_prefill_tokens",
        "active_decode_tokens",
        "connections",
        "idle_connections",
    ];
    for family in families {
        for role in ["prefill", "decode"] {
            for index in 0..ENGINES {
                let value = u32::from(index % 2 == 0 || family == "up");
                let _infallible = writeln!(
                    text,
                    "moongate_engine_{family}{{instance=\"models/model-{role}-{index}@0f1c9a52-7d1c-4a3e-9a59-3d8f3f6f1c2b\",role=\"{role}\"}} {value}"
                );
            }
        }
    }
    text + "# EOF\n"
}
