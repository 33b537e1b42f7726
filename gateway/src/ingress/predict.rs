//! `POST /debug/predict/…` returns the cached part of a prompt, `POST /debug/tokens/…` its tokens. No request is sent to an engine
//! for generation.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::routing::post;
use http::{HeaderValue, Response, StatusCode};
use moongate_scheduler::InstanceIndex;
use serde_json::{Map, Value, json};

use super::handler::{GatewayContext, predict_hits, read};
use super::router;
use crate::error::{ApiError, ApiErrorCode, ErrorFormat};
use crate::predict::{PredictionError, PromptLength, PromptPrediction, RequestPrompt};
use crate::request_body::InferenceApi;

/// The paths of all APIs.
pub(super) fn routes() -> Router<Arc<GatewayContext>> {
    let predict = |api| {
        post(move |gateway: State<Arc<GatewayContext>>, request: Request| async move {
            predict(&gateway, api, request).await
        })
    };
    let tokens = |api| {
        post(move |gateway: State<Arc<GatewayContext>>, request: Request| async move {
            tokens(&gateway, api, request).await
        })
    };
    Router::new()
        .route("/debug/predict/v1/chat/completions", predict(InferenceApi::Chat))
        .route("/debug/predict/v1/completions", predict(InferenceApi::Completions))
        .route("/debug/predict/v1/responses", predict(InferenceApi::Responses))
        .route("/debug/predict/v1/messages", predict(InferenceApi::Messages))
        .route("/debug/predict/generate", predict(InferenceApi::Generate))
        .route("/debug/tokens/v1/chat/completions", tokens(InferenceApi::Chat))
        .route("/debug/tokens/v1/completions", tokens(InferenceApi::Completions))
        .route("/debug/tokens/v1/responses", tokens(InferenceApi::Responses))
        .route("/debug/tokens/v1/messages", tokens(InferenceApi::Messages))
        .route("/debug/tokens/generate", tokens(InferenceApi::Generate))
}

async fn predict(gateway: &GatewayContext, api: InferenceApi, request: Request) -> Response<Body> {
    let length = match prompt_length(request.uri().query()) {
        Ok(length) => length,
        Err(error) => return error.response(ErrorFormat::OpenAi),
    };
    let routed = match read(gateway, api, HeaderValue::from_static(""), request).await {
        Ok(routed) => routed,
        Err(error) => return error.response(ErrorFormat::OpenAi),
    };
    let start = Instant::now();
    let prediction = predict_hits(gateway, &routed, length).await;
    let duration = start.elapsed();
    let response = match prediction {
        Ok(predicted) => describe(gateway, &predicted, duration),
        Err(error) => error_json(&error),
    };
    router::json(StatusCode::OK, &response)
}

/// `length=estimated` predicts as for a request that is routed; otherwise the length is exact.
fn prompt_length(query: Option<&str>) -> Result<PromptLength, ApiError> {
    match query {
        None | Some("" | "length=exact") => Ok(PromptLength::Exact),
        Some("length=estimated") => Ok(PromptLength::Estimated),
        Some(query) => Err(ApiError::new(
            ApiErrorCode::InvalidRequest,
            format!("unknown query `{query}`; use `length=exact`, the default, or `length=estimated`"),
        )),
    }
}

async fn tokens(gateway: &GatewayContext, api: InferenceApi, request: Request) -> Response<Body> {
    let routed = match read(gateway, api, HeaderValue::from_static(""), request).await {
        Ok(routed) => routed,
        Err(error) => return error.response(ErrorFormat::OpenAi),
    };
    let fleet = gateway.dispatcher.fleet.current();
    let tokens = match &routed.request {
        Some(request) => {
            let prompt =
                RequestPrompt { api, model: request.model, fields: &routed.routing, body: &routed.body };
            gateway.predictor.tokens(&fleet, prompt).await
        }
        None => Err(PredictionError::InsufficientCacheInfo),
    };
    let response = match tokens {
        Ok(tokens) => {
            let by_engine: Map<_, _> =
                tokens.into_iter().map(|(engine, ids)| (engine.to_owned(), ids.into())).collect();
            Value::Object(by_engine)
        }
        Err(error) => error_json(&error),
    };
    router::json(StatusCode::OK, &response)
}

fn error_json(error: &PredictionError) -> Value {
    json!({"reason": error.name(), "message": error.to_string()})
}

fn describe(gateway: &GatewayContext, predicted: &PromptPrediction, duration: Duration) -> Value {
    let fleet = gateway.dispatcher.fleet.current();
    let prediction = predicted.for_fleet(&fleet);
    let engines: Vec<Value> = InstanceIndex::all()
        .zip(&fleet.members)
        .map(|(ix, member)| {
            let hits = predicted.hits(member);
            json!({
                "instance": member.name,
                "role": member.instance.role.to_string(),
                "l1_tokens": hits.l1_tokens,
                "l2_tokens": hits.l2_tokens,
                "l3_tokens": hits.l3_tokens,
                "l3_network_distance": prediction.network_distance(ix),
            })
        })
        .collect();
    let took_ms = duration.as_secs_f64() * 1e3;
    json!({"input_tokens": predicted.input_tokens, "took_ms": took_ms, "engines": engines})
}
