//! The admin listener: probes and metrics, away from clients.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::routing::{get, post};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response};

use super::handler::Gateway;
use super::predict;
use super::router::{health, ready};

/// The exposition format's own content type.
const OPENMETRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// Routes of the admin listener.
pub(crate) fn admin_router(gateway: Arc<Gateway>) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/debug/predict/v1/chat/completions", post(predict::chat))
        .route("/debug/predict/v1/completions", post(predict::completions))
        .route("/debug/predict/generate", post(predict::generate))
        .route("/debug/tokens/v1/chat/completions", post(predict::chat_tokens))
        .route("/debug/tokens/v1/completions", post(predict::completions_tokens))
        .with_state(gateway)
}

async fn metrics(State(gateway): State<Arc<Gateway>>) -> Response<Body> {
    let desk = &gateway.dispatcher.desk;
    let (fleet, loads) = desk.loads();
    let text = gateway.metrics.scrape((&fleet, &loads), desk.held(), &gateway.index);
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(CONTENT_TYPE, OPENMETRICS);
    response
}
