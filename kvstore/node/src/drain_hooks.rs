//! Hooks for the program that replaces the node's process: `/drain` before the restart and `/settled` after it.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::middleware;
use axum::routing::{get, post};
use axum::{Json, Router};
use moongate_transfer::AllowedPeers;
use serde_json::{Value, json};

use crate::access::only_peers;
use crate::heartbeat::HeartbeatState;
use crate::membership::NodeMembership;

type DrainHookResponse = (StatusCode, Json<Value>);

/// What the hooks operate on.
#[derive(Clone)]
pub(crate) struct DrainHooks {
    pub(crate) membership: NodeMembership,
    pub(crate) heartbeat: Arc<HeartbeatState>,
}

/// Only allowed peers may drain a node: the master places no new objects on it.
pub(crate) fn router(hooks: DrainHooks, peers: AllowedPeers) -> Router {
    Router::new()
        .route("/drain", post(drain).delete(cancel_drain))
        .layer(middleware::from_fn_with_state(Arc::new(peers), only_peers))
        .route("/settled", get(settled))
        .with_state(hooks)
}

/// The ledger of persistent memory is consistent whenever the process exits, so draining only has to notify the master.
async fn drain(State(hooks): State<DrainHooks>) -> DrainHookResponse {
    let membership = &hooks.membership;
    membership.drain.set(true);
    if membership.pool.segments().iter().any(|segment| !segment.is_persistent) {
        let warning = "process memory is lost on restart; --memory=holder:SOCKET preserves it";
        return (StatusCode::OK, Json(json!({ "warning": warning })));
    }
    match notify_master(membership).await {
        Ok(()) => (StatusCode::OK, Json(json!({}))),
        Err(response) => response,
    }
}

async fn cancel_drain(State(hooks): State<DrainHooks>) -> DrainHookResponse {
    hooks.membership.drain.set(false);
    match notify_master(&hooks.membership).await {
        Ok(()) => (StatusCode::OK, Json(json!({}))),
        Err(response) => response,
    }
}

/// Sends a heartbeat with the new drain state now instead of at the next period.
async fn notify_master(membership: &NodeMembership) -> Result<(), DrainHookResponse> {
    let sent = membership.ping().await;
    sent.map(drop)
        .map_err(|error| pending_response(json!({ "waiting_for": "the master", "error": error.to_string() })))
}

fn pending_response(body: Value) -> DrainHookResponse {
    (StatusCode::ACCEPTED, Json(body))
}

/// Segments are mounted, and their keys restored, before this server starts. Only the master may be missing.
async fn settled(State(hooks): State<DrainHooks>) -> DrainHookResponse {
    if hooks.membership.drain.is_set() {
        return pending_response(json!({ "waiting_for": "its replacement", "drained": true }));
    }
    if !hooks.heartbeat.is_healthy() {
        return pending_response(json!({ "waiting_for": "the master" }));
    }
    let segments = hooks.membership.pool.segments();
    let bytes = hooks.membership.pool.bytes();
    (StatusCode::OK, Json(json!({ "segments": segments.len(), "segment_bytes": bytes })))
}
