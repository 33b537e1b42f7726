//! Routes and probes of the public listener.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::routing::{MethodRouter, get, post};
use axum::{Extension, Router};
use http::header::{CONNECTION, CONTENT_TYPE};
use http::{HeaderValue, Response, StatusCode, Version};

use super::aliased_model::served_aliases;
use super::authenticate;
use super::batches;
use super::content::model_error;
use super::cross_origin;
use super::handler::{GatewayContext, handle};
use super::inference_paths::INFERENCE_PATHS;
use super::request_checks::RequestChecks;
use super::stored_responses;
use crate::access::AuthenticatedCaller;
use crate::error::{ApiError, ApiErrorCode, ErrorFormat};
use crate::request_body::InferenceApi;

/// Routes of the public listener.
pub(crate) fn public_router(gateway: Arc<GatewayContext>) -> RequestChecks<Router> {
    let metrics = gateway.metrics.clone();
    let mut router = Router::new();
    for path in INFERENCE_PATHS {
        router = router.route(path, post(passthrough));
    }
    let mut router = router
        .route("/v1/chat/completions", generation(InferenceApi::Chat))
        .route("/v1/completions", generation(InferenceApi::Completions))
        .route("/v1/responses", generation(InferenceApi::Responses))
        .route("/v1/messages", generation(InferenceApi::Messages))
        .route("/generate", generation(InferenceApi::Generate))
        .route("/v1/responses/{id}", get(stored_responses::response).delete(stored_responses::response))
        .route("/v1/responses/{id}/cancel", post(stored_responses::cancel))
        .route("/v1/responses/{id}/input_items", get(stored_responses::input_items))
        .merge(batches::routes())
        .route("/v1/models", get(models))
        .route("/v1/models/{*model}", get(model))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .fallback(configured_path)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(gateway.clone(), authenticate::client));
    // Each layer costs every request two allocations.
    if !gateway.cors_origins.is_empty() {
        router = router.layer(from_fn_with_state(gateway.clone(), cross_origin::apply_cors));
    }
    let router = router.layer(from_fn_with_state(gateway.clone(), public_route)).with_state(gateway);
    RequestChecks::with_canonical_paths(router, metrics)
}

fn generation(api: InferenceApi) -> MethodRouter<Arc<GatewayContext>> {
    post(move |State(gateway): State<Arc<GatewayContext>>, request: Request| async move {
        handle(&gateway, api, request).await
    })
}

async fn passthrough(gateway: State<Arc<GatewayContext>>, request: Request) -> Response<Body> {
    handle(&gateway, InferenceApi::Other, request).await
}

/// While draining, responses close their connections, so that the clients' next requests go to another gateway. If only idle
/// connections were closed, one could be closed just as its client sends the next request.
async fn public_route(
    State(gateway): State<Arc<GatewayContext>>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let is_http1 = request.version() <= Version::HTTP_11;
    let mut response = next.run(request).await;
    if is_http1 && gateway.draining.is_cancelled() {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Liveness: the process runs.
pub(super) async fn health() -> Response<Body> {
    json(StatusCode::OK, &serde_json::json!({"status": "ok"}))
}

/// Readiness: some pair or plain worker is usable, and the gateway is not draining.
pub(super) async fn ready(State(gateway): State<Arc<GatewayContext>>) -> Response<Body> {
    let fleet = gateway.dispatcher.fleet.current();
    let waiting: Vec<_> = fleet
        .unusable
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
    json(status, &serde_json::json!({"status": text, "engines": fleet.engines().count(), "waiting": waiting}))
}

async fn models(
    State(gateway): State<Arc<GatewayContext>>,
    caller: Option<Extension<AuthenticatedCaller>>,
) -> Response<Body> {
    let fleet = gateway.dispatcher.fleet.current();
    let aliases = served_aliases(&gateway, &fleet, tenant(caller.as_ref()));
    let is_alias = |model: &str| aliases.iter().any(|(alias, _)| **alias == *model);
    let models = fleet.served_models().iter().filter(|model| !is_alias(model));
    let models = models.map(|name| model_object(name, None));
    let data: Vec<_> =
        models.chain(aliases.iter().map(|(alias, root)| model_object(alias, Some(root)))).collect();
    json(StatusCode::OK, &serde_json::json!({"object": "list", "data": data}))
}

async fn model(
    State(gateway): State<Arc<GatewayContext>>,
    axum::extract::Path(name): axum::extract::Path<String>,
    caller: Option<Extension<AuthenticatedCaller>>,
) -> Response<Body> {
    let fleet = gateway.dispatcher.fleet.current();
    let aliases = served_aliases(&gateway, &fleet, tenant(caller.as_ref()));
    if let Some((alias, root)) = aliases.iter().find(|(alias, _)| **alias == *name) {
        return json(StatusCode::OK, &model_object(alias, Some(root)));
    }
    match fleet.model(&name) {
        Ok(_) => json(StatusCode::OK, &model_object(&name, None)),
        Err(reason) => model_error(&fleet, &name, reason).response(ErrorFormat::OpenAi),
    }
}

/// `root` is the model of an alias.
fn model_object(name: &str, root: Option<&str>) -> serde_json::Value {
    let mut model = serde_json::json!({"id": name, "object": "model", "created": 0, "owned_by": "moongate"});
    if let Some(root) = root {
        model["root"] = root.into();
    }
    model
}

fn tenant(caller: Option<&Extension<AuthenticatedCaller>>) -> Option<&str> {
    caller.map(|Extension(caller)| &*caller.tenant)
}

/// Handles paths of `--inference-path`; all others are not found.
async fn configured_path(gateway: State<Arc<GatewayContext>>, request: Request) -> Response<Body> {
    let path = request.uri().path();
    if gateway.inference_paths.iter().any(|allowed| allowed.matches(path)) {
        return passthrough(gateway, request).await;
    }
    let text = format!(
        "no such path: {path}; the API is under /v1, such as POST /v1/chat/completions. Additional inference paths of engines are \
         opened by --inference-path; administrators reach all of them on the admin listener"
    );
    ApiError::new(ApiErrorCode::NotFound, text).response(ErrorFormat::of_path(path))
}

pub(super) async fn method_not_allowed(request: Request) -> Response<Body> {
    let text = format!("{} does not support {}", request.uri().path(), request.method());
    ApiError::new(ApiErrorCode::MethodNotAllowed, text).response(ErrorFormat::of_path(request.uri().path()))
}

pub(super) fn json(status: StatusCode, value: &serde_json::Value) -> Response<Body> {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
