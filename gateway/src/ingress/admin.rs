//! The admin listener: probes, metrics, the console and registrations, separate from clients.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::middleware::from_fn_with_state;
use axum::routing::{any, get, post};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response, StatusCode};
use serde_json::json;

use super::authenticate;
use super::body::BodyReader;
use super::console;
use super::cross_origin;
use super::engine_administration;
use super::fleet;
use super::handler::GatewayContext;
use super::predict;
use super::request_checks::RequestChecks;
use super::router;
use super::router::{health, ready};
use super::shared_queue;
use super::workers;
use crate::error::{ApiError, ApiErrorCode, ErrorFormat};

/// Content type of the OpenMetrics exposition format.
const OPENMETRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// Most decisions in the list.
const LISTED_DECISIONS: usize = 50;

/// Routes of the admin listener.
pub(crate) fn admin_router(gateway: Arc<GatewayContext>) -> RequestChecks<Router> {
    let gateway_metrics = gateway.metrics.clone();
    let router = predict::routes()
        .route("/metrics", get(metrics))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/debug/decisions", get(decisions))
        .route("/debug/decisions/{id}", get(decision))
        .route("/debug/fleet", get(fleet::fleet))
        .route("/workers", get(workers::list).post(workers::register))
        .route("/workers/{*id}", get(workers::one).delete(workers::remove))
        .route("/queue/identity", get(shared_queue::identity))
        .route("/queue/tickets", post(shared_queue::tickets))
        .route("/engines/{id}/{*path}", any(engine_administration::forward))
        .fallback(not_found)
        .method_not_allowed_fallback(router::method_not_allowed)
        .layer(from_fn_with_state(gateway.clone(), authenticate::administrator))
        .layer(from_fn_with_state(gateway.clone(), cross_origin::reject_cross_origin))
        .with_state(gateway)
        .merge(console::pages());
    RequestChecks::new(router, gateway_metrics)
}

async fn not_found(request: Request) -> Response<Body> {
    let path = request.uri().path();
    let text = format!("no such path: {path}; docs/api.md lists the paths of the admin listener");
    ApiError::new(ApiErrorCode::NotFound, text).response(ErrorFormat::OpenAi)
}

/// Handles the list of recent decisions, without their candidates.
async fn decisions(State(gateway): State<Arc<GatewayContext>>) -> Response<Body> {
    router::json(StatusCode::OK, &json!({"decisions": gateway.decisions.list(LISTED_DECISIONS)}))
}

/// Handles the decisions for one request, with their candidates and snapshot.
async fn decision(State(gateway): State<Arc<GatewayContext>>, Path(id): Path<String>) -> Response<Body> {
    match gateway.decisions.get(&id) {
        Some(decisions) => router::json(StatusCode::OK, &json!({"decisions": decisions})),
        None => {
            let text = format!(
                "no decision recorded for {id:?}: --decision-history sets how many are kept; of more than 1,000 a second, or with more \
                 than 64 engines, only a part is"
            );
            ApiError::new(ApiErrorCode::NotFound, text).response(ErrorFormat::OpenAi)
        }
    }
}

async fn metrics(State(gateway): State<Arc<GatewayContext>>) -> Response<Body> {
    let BodyReader { memory, unfinished, .. } = &gateway.bodies;
    gateway.metrics.overload.update([memory, unfinished], &gateway.prompt_memory);
    if let Some(batches) = &gateway.batches {
        gateway.metrics.batches.update(&batches.stats());
    }
    let queue = &gateway.dispatcher.admission;
    let (fleet, loads) = queue.loads();
    let text = gateway.metrics.scrape((&fleet, &loads), queue.queued(), &gateway.index);
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(CONTENT_TYPE, OPENMETRICS);
    response
}
