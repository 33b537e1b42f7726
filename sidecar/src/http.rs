//! The sidecar's HTTP endpoints: upgrade hooks, probes, status and metrics.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::extract::State as Shared;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use moongate_runtime::ListenerLimits;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::Instant;

use crate::context::SidecarContext;
use crate::hooks::{drain_blocker, settle_blocker};
use crate::http_client::read_bounded_body;
use crate::{metrics, removal_cost};

/// Maximum number of connections: enough for the operator, kubelets and a few scrapers.
const MAX_CONNECTIONS: usize = 64;
/// Time limit for fetching the engine's metrics.
const METRICS_TIMEOUT: Duration = Duration::from_secs(3);
/// Content type of Prometheus' text format.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

type SidecarExtractor = Shared<Arc<SidecarContext>>;

pub(crate) fn serve(listener: TcpListener, sidecar: Arc<SidecarContext>) {
    let supervisor = sidecar.supervisor.clone();
    let routes = Router::new()
        .route("/drain", post(drain).delete(undrain))
        .route("/settled", get(settled))
        .route("/removal-cost", get(report_removal_cost))
        .route("/healthz", get(async || "ok"))
        .route("/readyz", get(ready))
        .route("/status", get(status))
        .route("/metrics", get(scrape))
        .with_state(sidecar);
    let limits = ListenerLimits { connections: MAX_CONNECTIONS, ..ListenerLimits::default() };
    moongate_runtime::serve(listener, routes, limits, supervisor.token(), &supervisor);
}

/// Starts or renews a drain, and reports whether it is complete.
async fn drain(Shared(sidecar): SidecarExtractor) -> Response {
    let now = Instant::now();
    sidecar.state.send_modify(|state| {
        if state.drain.is_none() {
            tracing::info!("drain started");
        }
        state.drain(now);
    });
    sidecar.drain_requested.notify_one();
    let blocker = {
        let state = sidecar.state.borrow();
        let links = sidecar.registrations.links();
        let links: Vec<_> = links.iter().map(|(gateway, link)| (*gateway, link)).collect();
        drain_blocker(&state, &links, sidecar.options.lease, now)
    };
    match blocker {
        None => Json(json!({"drained": true})).into_response(),
        Some(blocker) => accepted(json!({"waiting_for": blocker})),
    }
}

/// Cancels a drain, so that the engine serves again.
async fn undrain(Shared(sidecar): SidecarExtractor) -> Response {
    sidecar.state.send_modify(|state| {
        if state.drain.take().is_some() {
            tracing::info!("drain cancelled");
        }
    });
    Json(json!({"drained": false})).into_response()
}

/// Reports whether the engine is back in service after a restart.
async fn settled(Shared(sidecar): SidecarExtractor) -> Response {
    let state = sidecar.state.borrow().clone();
    let blocker = {
        let links = sidecar.registrations.links();
        let links: Vec<_> = links.iter().map(|(gateway, link)| (*gateway, link)).collect();
        settle_blocker(&state, &links, sidecar.options.has_gateways())
    };
    match blocker {
        None => Json(json!({"settled": true})).into_response(),
        Some(blocker) => accepted(json!({"waiting_for": blocker, "drained": state.drain.is_some()})),
    }
}

/// Reports what is lost with the engine: recent prompt tokens from its cache, or `null` if it does not report them.
async fn report_removal_cost(Shared(sidecar): SidecarExtractor) -> Response {
    Json(json!({"cost": removal_cost::sample(&sidecar).await})).into_response()
}

fn accepted(body: Value) -> Response {
    (StatusCode::ACCEPTED, Json(body)).into_response()
}

/// Reports whether the engine serves and is not draining. Gateways do not count: if they start only after the engines are ready, waiting
/// for them would be a deadlock.
async fn ready(Shared(sidecar): SidecarExtractor) -> Response {
    let state = sidecar.state.borrow();
    let reason = match (&state.drain, &state.error) {
        _ if state.is_ready() => return "ok".into_response(),
        (Some(_), _) => "draining".to_owned(),
        (None, Some(error)) => error.to_string(),
        (None, None) => "the engine has not been found yet".to_owned(),
    };
    (StatusCode::SERVICE_UNAVAILABLE, reason).into_response()
}

/// Returns the full state as JSON, for diagnosis.
async fn status(Shared(sidecar): SidecarExtractor) -> Response {
    let state = sidecar.state.borrow().clone();
    let links = sidecar.registrations.links();
    let gateways: Vec<Value> = links
        .iter()
        .map(|(gateway, link)| {
            let registration = link.last_registration.as_ref().map(|(_, response)| response);
            let error = link.error.as_ref().map(ToString::to_string);
            json!({"gateway": gateway, "registration": registration, "error": error})
        })
        .collect();
    let load = state.observation.as_ref().and_then(|observation| observation.load.as_ref());
    let failed: Vec<Value> =
        state.adapters.failed.iter().map(|(name, reason)| json!({"name": name, "reason": reason})).collect();
    let error = state.error.as_ref().map(ToString::to_string);
    let engine = state.local_engine.as_ref().map(|engine| {
        json!({"url": engine.advertised, "engine": engine.engine, "role": engine.role, "error": error,
               "running": load.map(|load| load.running), "waiting": load.map(|load| load.waiting)})
    });
    Json(json!({
        "engine": engine,
        "draining": state.drain.is_some(),
        "place": state.location,
        "gateways": gateways,
        "lora": {"loaded": state.adapters.loaded, "pending": state.adapters.pending, "failed": failed},
    }))
    .into_response()
}

/// Returns the sidecar's metrics, followed by the engine's own, unchanged.
async fn scrape(Shared(sidecar): SidecarExtractor) -> Response {
    let mut text = {
        let state = sidecar.state.borrow().clone();
        let links = sidecar.registrations.links();
        metrics::text(state, &links, sidecar.registrations.counts())
    };
    let url = sidecar.state.borrow().local_engine.as_ref().map(|engine| format!("{}/metrics", engine.url));
    if let Some(url) = url {
        text.push_str(&fetch_engine_metrics(&sidecar, url).await);
    }
    ([(CONTENT_TYPE, TEXT)], text).into_response()
}

/// Fetches the engine's metrics; empty on an error, so that the sidecar's own metrics remain available.
pub(crate) async fn fetch_engine_metrics(sidecar: &SidecarContext, url: String) -> String {
    let mut request = sidecar.client.get(url).timeout(METRICS_TIMEOUT);
    if let Some(key) = &sidecar.options.engine_api_key {
        request = request.bearer_auth(key);
    }
    let Ok(response) = request.send().await.and_then(reqwest::Response::error_for_status) else {
        return String::new();
    };
    match read_bounded_body(response).await {
        Ok(body) => String::from_utf8_lossy(&body).replace("# EOF\n", ""),
        Err(_) => String::new(),
    }
}
