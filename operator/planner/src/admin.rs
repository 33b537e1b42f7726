//! HTTP endpoints for probes, metrics and plans.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use moongate_runtime::net::TcpListener;
use moongate_runtime::{ListenerLimits, Supervisor, serve};

use crate::{PlanBoard, PlannerMetrics};

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Enough for probes and a few scrapers.
const MAX_CONNECTIONS: usize = 64;

type AdminState = (Arc<PlannerMetrics>, Arc<PlanBoard>);

/// Serves `/healthz`, `/readyz`, `/plan` and `/metrics` until the supervisor stops.
pub fn start(
    listener: TcpListener,
    metrics: Arc<PlannerMetrics>,
    plans: Arc<PlanBoard>,
    supervisor: &Supervisor,
) {
    let routes = Router::new()
        .route("/healthz", get(async || "ok"))
        .route("/readyz", get(ready))
        .route("/plan", get(plan))
        .route("/metrics", get(text))
        .with_state((metrics, plans));
    let limits = ListenerLimits { connections: MAX_CONNECTIONS, ..ListenerLimits::default() };
    serve(listener, routes, limits, supervisor.token(), supervisor);
}

/// Ready once every deployment has had a step. A failing one does not make the planner unready: a restart would not help.
async fn ready(State((metrics, plans)): State<AdminState>) -> Response {
    match metrics.has_started() && plans.has_all_reports() {
        true => "ok".into_response(),
        false => (StatusCode::SERVICE_UNAVAILABLE, "starting").into_response(),
    }
}

async fn plan(State((_, plans)): State<AdminState>) -> Response {
    ([(CONTENT_TYPE, "application/json")], plans.json()).into_response()
}

async fn text(State((metrics, _)): State<AdminState>) -> Response {
    ([(CONTENT_TYPE, OPENMETRICS)], metrics.text()).into_response()
}
