//! `POST /debug/predict/…`: what is cached of a prompt, and `POST /debug/tokens/…`: its tokens. Nothing is sent anywhere.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Request, State};
use http::{HeaderValue, Response, StatusCode};
use moongate_scheduler::InstanceIx;
use serde_json::{Map, Value, json};

use super::handler::{Gateway, find, read};
use super::router;
use crate::predict::{Predicted, Unknown};
use crate::prompt::Api;

/// The body is that of a chat completion.
pub(super) async fn chat(gateway: State<Arc<Gateway>>, request: Request) -> Response<Body> {
    predict(&gateway, Api::Chat, request).await
}

/// The body is that of a completion.
pub(super) async fn completions(gateway: State<Arc<Gateway>>, request: Request) -> Response<Body> {
    predict(&gateway, Api::Completions, request).await
}

/// The body is that of SGLang's own `/generate`.
pub(super) async fn generate(gateway: State<Arc<Gateway>>, request: Request) -> Response<Body> {
    predict(&gateway, Api::Generate, request).await
}

async fn predict(gateway: &Gateway, api: Api, request: Request) -> Response<Body> {
    let ask = match read(gateway, api, HeaderValue::from_static(""), request).await {
        Ok(ask) => ask,
        Err(error) => return error.response(),
    };
    let start = Instant::now();
    let found = find(gateway, &ask).await;
    let took = start.elapsed();
    let answer = match found {
        Ok(predicted) => describe(gateway, &predicted, took),
        Err(unknown) => unexplained(&unknown),
    };
    router::json(StatusCode::OK, &answer)
}

/// The body is that of a chat completion.
pub(super) async fn chat_tokens(gateway: State<Arc<Gateway>>, request: Request) -> Response<Body> {
    tokens(&gateway, Api::Chat, request).await
}

/// The body is that of a completion.
pub(super) async fn completions_tokens(gateway: State<Arc<Gateway>>, request: Request) -> Response<Body> {
    tokens(&gateway, Api::Completions, request).await
}

async fn tokens(gateway: &Gateway, api: Api, request: Request) -> Response<Body> {
    let ask = match read(gateway, api, HeaderValue::from_static(""), request).await {
        Ok(ask) => ask,
        Err(error) => return error.response(),
    };
    let fleet = gateway.dispatcher.fleet.current();
    let tokens = match &ask.request {
        Some(request) => gateway.predictor.tokens(&fleet, api, request.model, &ask.head, &ask.body).await,
        None => Err(Unknown::Engines),
    };
    let answer = match tokens {
        Ok(tokens) => {
            let by_engine: Map<_, _> =
                tokens.into_iter().map(|(engine, ids)| (engine.to_owned(), ids.into())).collect();
            Value::Object(by_engine)
        }
        Err(unknown) => unexplained(&unknown),
    };
    router::json(StatusCode::OK, &answer)
}

fn unexplained(unknown: &Unknown) -> Value {
    json!({"reason": unknown.name(), "why": unknown.to_string()})
}

fn describe(gateway: &Gateway, predicted: &Predicted, took: Duration) -> Value {
    let fleet = gateway.dispatcher.fleet.current();
    let prediction = predicted.for_fleet(&fleet);
    let engines: Vec<Value> = (0..)
        .map(InstanceIx)
        .zip(&fleet.members)
        .map(|(ix, member)| {
            let hits = predicted.expected_of(member).hits;
            json!({
                "instance": member.endpoint.id.to_string(),
                "role": member.instance.role.to_string(),
                "l1_tokens": hits.l1_tokens,
                "l2_tokens": hits.l2_tokens,
                "l3_tokens": hits.l3_tokens,
                "l3_farness": prediction.farness(ix),
            })
        })
        .collect();
    let took_ms = took.as_secs_f64() * 1e3;
    json!({"input_tokens": predicted.input_tokens, "took_ms": took_ms, "engines": engines})
}
