//! HTTP endpoints for probes and metrics.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use moongate_runtime::net::TcpListener;
use moongate_runtime::{ListenerLimits, Supervisor, serve};

use crate::OperatorMetrics;

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Enough for probes and a few scrapers.
const MAX_CONNECTIONS: usize = 64;

/// Serves `/healthz`, `/readyz` and `/metrics` until the supervisor stops.
pub fn start(listener: TcpListener, metrics: Arc<OperatorMetrics>, supervisor: &Supervisor) {
    let routes = Router::new()
        .route("/healthz", get(async || "ok"))
        .route("/readyz", get(ready))
        .route("/metrics", get(text))
        .with_state(metrics);
    let limits = ListenerLimits { connections: MAX_CONNECTIONS, ..ListenerLimits::default() };
    serve(listener, routes, limits, supervisor.token(), supervisor);
}

async fn ready(State(metrics): State<Arc<OperatorMetrics>>) -> Response {
    match metrics.unready_reason() {
        None => "ok".into_response(),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason).into_response(),
    }
}

async fn text(State(metrics): State<Arc<OperatorMetrics>>) -> Response {
    ([(CONTENT_TYPE, OPENMETRICS)], metrics.text()).into_response()
}
