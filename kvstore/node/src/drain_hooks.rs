//! Hooks for the program that replaces or removes the node's process: `/drain` before it ends, `/settled` after its restart, and
//! `/removal-cost` before one of several nodes is chosen for removal.

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::middleware;
use axum::routing::{get, post};
use axum::{Json, Router};
use mooncake_wire::frame::RpcFault;
use moongate_master_client::rpc::RpcError;
use moongate_transfer::AllowedPeers;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::access::only_peers;
use crate::heartbeat::HeartbeatState;
use crate::membership::NodeMembership;
use crate::removal::NodeRemoval;

const MIB: u64 = 1 << 20;

type DrainHookResponse = (StatusCode, Json<Value>);

/// What the hooks operate on.
#[derive(Clone)]
pub(crate) struct DrainHooks {
    pub(crate) membership: NodeMembership,
    pub(crate) heartbeat: Arc<HeartbeatState>,
    pub(crate) removal: Arc<NodeRemoval>,
    /// Whether the node has objects on disk.
    pub(crate) has_disk: bool,
}

/// Parameters of `/drain`.
#[derive(Debug, Deserialize)]
struct DrainQuery {
    #[serde(default)]
    reason: DrainReason,
}

/// Why the process is about to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum DrainReason {
    /// Another process takes over the node's name and, if they persist, its memory and disk.
    #[default]
    Restart,
    /// The node does not return.
    Removal,
}

/// Only allowed peers may drain a node: the master places no new objects on it.
pub(crate) fn router(hooks: DrainHooks, peers: AllowedPeers) -> Router {
    Router::new()
        .route("/drain", post(drain).delete(cancel_drain))
        .layer(middleware::from_fn_with_state(Arc::new(peers), only_peers))
        .route("/settled", get(settled))
        .route("/removal-cost", get(removal_cost))
        .with_state(hooks)
}

async fn drain(State(hooks): State<DrainHooks>, Query(query): Query<DrainQuery>) -> DrainHookResponse {
    match query.reason {
        DrainReason::Restart => drain_for_restart(&hooks.membership).await,
        DrainReason::Removal => drain_for_removal(&hooks).await,
    }
}

/// The ledger of persistent memory is consistent whenever the process exits, so draining only has to notify the master.
async fn drain_for_restart(membership: &NodeMembership) -> DrainHookResponse {
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

/// The master moves all objects in memory to other nodes.
async fn drain_for_removal(hooks: &DrainHooks) -> DrainHookResponse {
    match hooks.removal.drain(&hooks.membership).await {
        Ok(0) if hooks.has_disk => {
            let warning = "objects that are on this node's disk only are lost with it";
            (StatusCode::OK, Json(json!({ "warning": warning })))
        }
        Ok(0) => (StatusCode::OK, Json(json!({}))),
        Ok(left) => pending_response(
            json!({ "waiting_for": "its objects to be moved to other nodes", "objects": left }),
        ),
        Err(RpcError::Fault(fault)) if fault.code == RpcFault::NOT_REGISTERED => {
            let warning = "the master cannot move this node's objects: they are lost with it";
            tracing::warn!("{warning}");
            (StatusCode::OK, Json(json!({ "warning": warning })))
        }
        Err(error) => pending_response(json!({ "waiting_for": "the master", "error": error.to_string() })),
    }
}

async fn cancel_drain(State(hooks): State<DrainHooks>) -> DrainHookResponse {
    hooks.membership.drain.set(false);
    if let Err(error) = hooks.removal.cancel(&hooks.membership).await {
        return pending_response(json!({ "waiting_for": "the master", "error": error.to_string() }));
    }
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

/// What has to be moved when the node is removed, in MiB; `null` for process memory and RDMA, where only the master can say.
async fn removal_cost(State(hooks): State<DrainHooks>) -> Json<Value> {
    let mib = hooks.membership.pool.object_bytes().map(|bytes| bytes / MIB);
    Json(json!({ "cost": mib.map(|mib| i32::try_from(mib).unwrap_or(i32::MAX)) }))
}

fn pending_response(body: Value) -> DrainHookResponse {
    (StatusCode::ACCEPTED, Json(body))
}

/// Segments are mounted, and their keys restored, before this server starts. Only the master may be missing.
async fn settled(State(hooks): State<DrainHooks>) -> DrainHookResponse {
    if hooks.removal.is_active() {
        return pending_response(json!({ "waiting_for": "its removal", "drained": true }));
    }
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
