//! The sidecar's own HTTP: hooks for whoever restarts the engine, probes, and metrics.

use std::sync::Arc;
use std::sync::atomic::Ordering;
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

use crate::hooks::{drain_blocker, settle_blocker};
use crate::http_client::read_bounded_body;
use crate::metrics;
use crate::sidecar::SidecarContext;

/// The operator, kubelets and a few scrapers.
const MAX_CONNECTIONS: usize = 64;
/// For the engine's metrics.
const METRICS_TIMEOUT: Duration = Duration::from_secs(3);
/// Prometheus' text format.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

type SidecarExtractor = Shared<Arc<SidecarContext>>;

pub(crate) fn serve(listener: TcpListener, sidecar: Arc<SidecarContext>) {
    let supervisor = sidecar.supervisor.clone();
    let routes = Router::new()
        .route("/drain", post(drain).delete(undrain))
        .route("/settled", get(settled))
        .route("/healthz", get(async || "ok"))
        .route("/readyz", get(ready))
        .route("/status", get(status))
        .route("/metrics", get(scrape))
        .with_state(sidecar);
    let limits = ListenerLimits { connections: MAX_CONNECTIONS, ..ListenerLimits::default() };
    moongate_runtime::serve(listener, routes, limits, supervisor.token(), &supervisor);
}

/// Begins to drain the engine, or tells how far it is.
async fn drain(Shared(sidecar): SidecarExtractor) -> Response {
    let now = Instant::now();
    sidecar.state.send_modify(|state| {
        if state.drain.is_none() {
            tracing::info!("the engine is being drained");
        }
        state.drain(now);
    });
    sidecar.drain_requested.notify_one();
    let waits = {
        let state = sidecar.state.borrow();
        let links = sidecar.links.lock();
        let links: Vec<_> = links.iter().map(|(gateway, link)| (*gateway, link)).collect();
        drain_blocker(&state, &links, sidecar.options.lease, now)
    };
    match waits {
        None => Json(json!({"drained": true})).into_response(),
        Some(waits) => accepted(json!({"waiting_for": waits})),
    }
}

/// Has the engine work on as if nothing had been asked.
async fn undrain(Shared(sidecar): SidecarExtractor) -> Response {
    sidecar.state.send_modify(|state| {
        if state.drain.take().is_some() {
            tracing::info!("the drain was called off");
        }
    });
    Json(json!({"drained": false})).into_response()
}

/// Whether the engine is back at work after a restart.
async fn settled(Shared(sidecar): SidecarExtractor) -> Response {
    let state = sidecar.state.borrow().clone();
    let waits = {
        let links = sidecar.links.lock();
        let links: Vec<_> = links.iter().map(|(gateway, link)| (*gateway, link)).collect();
        settle_blocker(&state, &links, sidecar.options.has_gateways())
    };
    match waits {
        None => Json(json!({"settled": true})).into_response(),
        Some(waits) => accepted(json!({"waiting_for": waits, "drained": state.drain.is_some()})),
    }
}

fn accepted(body: Value) -> Response {
    (StatusCode::ACCEPTED, Json(body)).into_response()
}

/// Whether the engine serves and is not being drained. Gateways are left out: where they start after the engines, they would be waited
/// for in vain.
async fn ready(Shared(sidecar): SidecarExtractor) -> Response {
    let state = sidecar.state.borrow();
    let reason = match (&state.drain, &state.error) {
        _ if state.is_ready() => return "ok".into_response(),
        (Some(_), _) => "draining",
        (None, Some(trouble)) => trouble,
        (None, None) => "the engine has not answered yet",
    };
    (StatusCode::SERVICE_UNAVAILABLE, reason.to_owned()).into_response()
}

/// Everything, for a person to read.
async fn status(Shared(sidecar): SidecarExtractor) -> Response {
    let state = sidecar.state.borrow().clone();
    let links = sidecar.links.lock();
    let gateways: Vec<Value> = links
        .iter()
        .map(|(gateway, link)| {
            let answer = link.last_registration.as_ref().map(|(_, answer)| answer);
            json!({"gateway": gateway, "answer": answer, "trouble": link.error})
        })
        .collect();
    let load = state.observation.as_ref().and_then(|look| look.load.as_ref());
    let failed: Vec<Value> =
        state.adapters.failed.iter().map(|(name, reason)| json!({"name": name, "reason": reason})).collect();
    let engine = state.local_engine.as_ref().map(|found| {
        json!({"url": found.advertised, "engine": found.engine, "role": found.role, "trouble": state.error,
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

/// The sidecar's metrics, and behind them the engine's own as they are.
async fn scrape(Shared(sidecar): SidecarExtractor) -> Response {
    let mut text = {
        let state = sidecar.state.borrow().clone();
        let links = sidecar.links.lock();
        let registrations = [&sidecar.registrations_accepted, &sidecar.registrations_rejected]
            .map(|count| count.load(Ordering::Relaxed));
        metrics::text(&state, &links, registrations)
    };
    let url = sidecar.state.borrow().local_engine.as_ref().map(|found| format!("{}/metrics", found.url));
    if let Some(url) = url {
        text.push_str(&fetch_engine_metrics(&sidecar, url).await);
    }
    ([(CONTENT_TYPE, TEXT)], text).into_response()
}

/// Nothing if the engine does not tell them: the sidecar's own must not be lost with them.
async fn fetch_engine_metrics(sidecar: &SidecarContext, url: String) -> String {
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
