//! `/workers`: the engines as this gateway uses them, and their registration. Paths and members are compatible with other gateways.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use http::{Response, StatusCode};
use moongate_discovery::{
    EngineInstance, EngineRegistration, EngineRegistry, EngineRole, InstanceId, InstanceReadiness,
};
use serde_json::{Value, json};

use super::body::BodyLimits;
use super::handler::GatewayContext;
use super::media_type::{MediaType, check_encoding};
use super::router;
use crate::error::{ApiError, ApiErrorCode, ErrorFormat};
use crate::predict::{observed_gaps, rank_status};

/// A registration is a few hundred bytes; many model names make it longer.
const LIMITS: BodyLimits =
    BodyLimits { max_bytes: 64 << 10, idle: Duration::from_secs(5), total: Duration::from_secs(10) };

/// Handles `GET /workers`: every engine of the topology.
pub(super) async fn list(State(gateway): State<Arc<GatewayContext>>) -> Response<Body> {
    let topology = gateway.dispatcher.topology.current();
    let workers: Vec<Value> =
        topology.instances.iter().map(|instance| describe(&gateway, instance)).collect();
    respond(Ok(json!({"workers": workers, "total": workers.len()})))
}

/// Handles `GET /workers/{id}`: one engine.
pub(super) async fn one(
    State(gateway): State<Arc<GatewayContext>>,
    Path(id): Path<String>,
) -> Response<Body> {
    let topology = gateway.dispatcher.topology.current();
    let instance = topology.get(&InstanceId::from(id.as_str()));
    respond(instance.map(|instance| describe(&gateway, instance)).ok_or_else(|| worker_not_found(&id)))
}

/// Handles `POST /workers`: registers an engine or renews its lease, and returns its current state; a new engine is listed a moment
/// later.
pub(super) async fn register(State(gateway): State<Arc<GatewayContext>>, request: Request) -> Response<Body> {
    respond(register_worker(&gateway, request).await)
}

/// Handles `DELETE /workers/{id}`: removes a registered engine.
pub(super) async fn remove(
    State(gateway): State<Arc<GatewayContext>>,
    Path(id): Path<String>,
) -> Response<Body> {
    respond(open_registry(&gateway).and_then(|registry| {
        let removed = registry.remove(&InstanceId::from(id.as_str()));
        removed.then(|| json!({"id": id})).ok_or_else(|| worker_not_found(&id))
    }))
}

async fn register_worker(gateway: &GatewayContext, request: Request) -> Result<Value, ApiError> {
    let (mut parts, body) = request.into_parts();
    let registry = open_registry(gateway)?;
    check_encoding(&parts.headers)?;
    let is_open = gateway.registration_token.is_none() && !gateway.access.admin_requires_authentication();
    if is_open && MediaType::of(&parts.headers)? != MediaType::Json {
        // A page of any site can make a browser send form types, but not this one.
        let text = "send the registration as `content-type: application/json`; with --registration-token any type is accepted";
        return Err(ApiError::new(ApiErrorCode::UnsupportedMediaType, text));
    }
    let body =
        gateway.bodies.collect_within(LIMITS, &mut parts, body).await.map_err(|error| match error.code {
            ApiErrorCode::BodyTooLarge => ApiError::new(error.code, "a registration must not exceed 64 KiB"),
            _ => error,
        })?;
    let invalid = |error: &dyn std::fmt::Display| {
        ApiError::new(ApiErrorCode::InvalidRequest, format!("registration: {error}"))
    };
    let registration: EngineRegistration = serde_json::from_slice(&body).map_err(|error| invalid(&error))?;
    let registered = registry.register(&registration).map_err(|error| invalid(&error))?;
    let topology = &gateway.dispatcher.topology;
    if registered.revised {
        topology.request_probe(&registered.id);
    }
    Ok(match topology.current().get(&registered.id) {
        Some(instance) => describe(gateway, instance),
        None => {
            json!({"id": registered.id.0, "usable": false, "reason": "registered, not yet listed", "load": 0})
        }
    })
}

fn open_registry(gateway: &GatewayContext) -> Result<&EngineRegistry, ApiError> {
    let disabled = || {
        ApiError::new(
            ApiErrorCode::NotFound,
            "engine registration is disabled; start the gateway with --registration",
        )
    };
    gateway.registry.as_ref().ok_or_else(disabled)
}

fn worker_not_found(id: &str) -> ApiError {
    ApiError::new(ApiErrorCode::NotFound, format!("no engine {id:?}; GET /workers lists them"))
}

fn describe(gateway: &GatewayContext, instance: &EngineInstance) -> Value {
    let fleet = gateway.dispatcher.fleet.current();
    let endpoint = fleet.endpoint(&instance.id);
    let usable = fleet.is_usable(&instance.id);
    let models = instance.facts.as_ref().map_or(&[][..], |facts| &facts.models);
    let worker_type = match instance.role {
        EngineRole::Plain => "regular".to_owned(),
        role => role.to_string(),
    };
    let reason = match &instance.readiness {
        InstanceReadiness::Ready => None,
        InstanceReadiness::NotReady { reason } => Some(reason),
    };
    let slots = endpoint.map(|endpoint| endpoint.index_slots.ranks());
    let slots = slots.as_deref().unwrap_or_default();
    let facts = instance.facts.as_ref();
    json!({
        "id": instance.id.0,
        "url": instance.url,
        "worker_type": worker_type,
        "source": instance.source.to_string(),
        "model_id": models.first(),
        "models": models,
        "usable": usable,
        "is_healthy": usable && endpoint.is_some_and(|endpoint| endpoint.is_available()),
        "reason": reason,
        "block_hashes": endpoint.map(|endpoint| endpoint.index_slots.hash_rule_status().to_string()),
        "ranks": facts.map(|facts| rank_status(facts, slots)),
        "not_predicted": facts.map(|facts| observed_gaps(facts, slots)),
        "load": endpoint.map_or(0, |endpoint| endpoint.in_flight.count()),
    })
}

fn respond(outcome: Result<Value, ApiError>) -> Response<Body> {
    match outcome {
        Ok(value) => router::json(StatusCode::OK, &value),
        Err(error) => error.response(ErrorFormat::OpenAi),
    }
}
