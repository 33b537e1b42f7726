//! The public paths.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::routing::{MethodRouter, any, get, post};
use http::header::{CONNECTION, CONTENT_TYPE};
use http::{HeaderValue, Response, StatusCode, Version};

use super::authenticate;
use super::handler::{Gateway, handle};
use crate::error::{ApiError, Code};
use crate::prompt::Api;

/// Routes of the public listener.
pub(crate) fn public_router(gateway: Arc<Gateway>) -> Router {
    Router::new()
        .route("/v1/chat/completions", generation(Api::Chat))
        .route("/v1/completions", generation(Api::Completions))
        .route("/generate", generation(Api::Generate))
        .route("/v1/models", get(models))
        .route("/v1/models/{*model}", get(model))
        .route("/v1/{*path}", any(other))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(gateway.clone(), authenticate::client))
        .layer(from_fn_with_state(gateway.clone(), part))
        .with_state(gateway)
}

fn generation(api: Api) -> MethodRouter<Arc<Gateway>> {
    post(move |State(gateway): State<Arc<Gateway>>, request: Request| async move {
        handle(&gateway, api, request).await
    })
}

async fn other(gateway: State<Arc<Gateway>>, request: Request) -> Response<Body> {
    handle(&gateway, Api::Other, request).await
}

/// Answers of a gateway that is about to end close their connections, so that the clients' next requests go to another one. Closed only
/// when idle, they could be closed just when a client sends its next request.
async fn part(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response<Body> {
    let is_http1 = request.version() <= Version::HTTP_11;
    let mut response = next.run(request).await;
    if is_http1 && gateway.draining.is_cancelled() {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// The process lives.
pub(super) async fn health() -> Response<Body> {
    json(StatusCode::OK, &serde_json::json!({"status": "ok"}))
}

/// Requests can be served: some pair or plain worker is usable, and no shutdown is under way.
pub(super) async fn ready(State(gateway): State<Arc<Gateway>>) -> Response<Body> {
    let fleet = gateway.dispatcher.fleet.current();
    let waiting: Vec<_> = fleet
        .waiting
        .iter()
        .map(|w| serde_json::json!({"instance": w.id.to_string(), "reason": w.reason}))
        .collect();
    let (status, text) = if gateway.draining.is_cancelled() {
        (StatusCode::SERVICE_UNAVAILABLE, "shutting down")
    } else if fleet.can_serve() {
        (StatusCode::OK, "ready")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "no plain worker and no prefill/decode pair is usable")
    };
    json(status, &serde_json::json!({"status": text, "engines": fleet.members.len(), "waiting": waiting}))
}

async fn models(State(gateway): State<Arc<Gateway>>) -> Response<Body> {
    let fleet = gateway.dispatcher.fleet.current();
    let data: Vec<_> = fleet.model_names().iter().map(|name| model_object(name)).collect();
    json(StatusCode::OK, &serde_json::json!({"object": "list", "data": data}))
}

async fn model(
    State(gateway): State<Arc<Gateway>>,
    axum::extract::Path(name): axum::extract::Path<String>,
) -> Response<Body> {
    let fleet = gateway.dispatcher.fleet.current();
    if fleet.model(&name).is_some() {
        return json(StatusCode::OK, &model_object(&name));
    }
    ApiError::new(Code::ModelNotFound, format!("no engine serves {name:?}")).param("model").response()
}

fn model_object(name: &str) -> serde_json::Value {
    serde_json::json!({"id": name, "object": "model", "created": 0, "owned_by": "moongate"})
}

async fn not_found(request: Request) -> Response<Body> {
    let path = request.uri().path();
    let text = format!("there is nothing at {path}; the API is under /v1, such as POST /v1/chat/completions");
    ApiError::new(Code::NotFound, text).response()
}

pub(super) async fn method_not_allowed(request: Request) -> Response<Body> {
    let text = format!("{} does not take {}", request.uri().path(), request.method());
    ApiError::new(Code::MethodNotAllowed, text).response()
}

pub(super) fn json(status: StatusCode, value: &serde_json::Value) -> Response<Body> {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
