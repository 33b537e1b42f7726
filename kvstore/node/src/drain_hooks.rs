//! What whoever replaces the node's process asks before and after: `/drain` and `/settled`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::middleware;
use axum::routing::{get, post};
use axum::{Json, Router};
use moongate_transfer::AllowedPeers;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::node::NodeContext;
use crate::rest;

/// A node works on if it was not replaced for so long after it was asked last.
const DRAIN_EXPIRY: Duration = Duration::from_secs(600);

/// Whether the node is going to be replaced.
#[derive(Debug, Default)]
pub(crate) struct NodeDrainState(Mutex<Option<Instant>>);

impl NodeDrainState {
    pub(crate) fn is_set(&self) -> bool {
        self.0.lock().is_some_and(|until| Instant::now() < until)
    }

    fn set(&self, drained: bool) {
        *self.0.lock() = drained.then(|| Instant::now() + DRAIN_EXPIRY);
    }
}

type DrainHookResponse = (StatusCode, Json<Value>);

/// The routes. Only peers may drain a node: it is given nothing new then.
pub(crate) fn router(peers: AllowedPeers) -> Router<NodeContext> {
    Router::new()
        .route("/drain", post(drain).delete(cancel_drain))
        .layer(middleware::from_fn_with_state(Arc::new(peers), rest::only_peers))
        .route("/settled", get(settled))
}

/// The ledger of memory that is kept is right whenever the process ends. So it is enough that the master knows.
async fn drain(State(shared): State<NodeContext>) -> DrainHookResponse {
    let membership = &shared.membership;
    membership.drain.set(true);
    if membership.pool.segments().iter().any(|lent| !lent.is_persistent) {
        let warning = "memory of the process is lost with it; --memory=holder:SOCKET keeps it";
        return (StatusCode::OK, Json(json!({ "warning": warning })));
    }
    match notify_master(&shared).await {
        Ok(()) => (StatusCode::OK, Json(json!({}))),
        Err(answer) => answer,
    }
}

async fn cancel_drain(State(shared): State<NodeContext>) -> DrainHookResponse {
    shared.membership.drain.set(false);
    match notify_master(&shared).await {
        Ok(()) => (StatusCode::OK, Json(json!({}))),
        Err(answer) => answer,
    }
}

/// Tells the master at once. It is told with every heartbeat besides.
async fn notify_master(shared: &NodeContext) -> Result<(), DrainHookResponse> {
    let told = shared.membership.ping().await;
    told.map(drop)
        .map_err(|error| pending_response(json!({ "waiting_for": "the master", "error": error.to_string() })))
}

fn pending_response(body: Value) -> DrainHookResponse {
    (StatusCode::ACCEPTED, Json(body))
}

/// The memory is lent, and with it its keys are found, before anything is served here. What may be missing is the master.
async fn settled(State(shared): State<NodeContext>) -> DrainHookResponse {
    if shared.membership.drain.is_set() {
        return pending_response(json!({ "waiting_for": "its replacement", "drained": true }));
    }
    if !shared.heartbeat.is_healthy() {
        return pending_response(json!({ "waiting_for": "the master" }));
    }
    let lent = shared.membership.pool.segments();
    let bytes = shared.membership.pool.bytes();
    (StatusCode::OK, Json(json!({ "segments": lent.len(), "lent_bytes": bytes })))
}
