//! The prefill engine's second port: SGLang's and Mooncake's bootstrap servers, NIXL's side channel, and the
//! simulator's KV cache transfer.

use std::sync::Arc;

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use serde_json::{Map, Value, json};

use super::rendezvous::{KvOffer, KvPullRequest, RendezvousError};
use super::response::{self, SimResponse};
use super::server::read_body;
use super::{SimEngineState, SimProtocol, VllmConnector};

/// Maximum request body in bytes at this port.
const MAX_BODY_BYTES: usize = 1024 * 1024;
/// Maximum number of rooms with a registered rank.
const MAX_ROOM_RANKS: usize = 65_536;

pub(crate) async fn handle(engine: &Arc<SimEngineState>, request: Request<Incoming>) -> SimResponse {
    let (parts, body) = request.into_parts();
    let Some(body) = read_body(body, MAX_BODY_BYTES).await else {
        return response::text(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large or incomplete");
    };
    let path = parts.uri.path();
    if parts.method == Method::POST && path == "/_sim/kv" {
        return match serde_json::from_slice::<KvPullRequest>(&body) {
            Ok(pull_request) => serve_kv_pull(engine, pull_request).await,
            Err(error) => response::text(StatusCode::BAD_REQUEST, error.to_string()),
        };
    }
    match engine.options.protocol {
        SimProtocol::Sglang => sglang(engine, &parts.method, path, &body),
        SimProtocol::Vllm if engine.options.connector == VllmConnector::Mooncake && path == "/query" => {
            response::json_ok(&mooncake_workers(engine))
        }
        SimProtocol::Vllm => response::not_found(engine.options.protocol),
    }
}

async fn serve_kv_pull(engine: &SimEngineState, mut pull_request: KvPullRequest) -> SimResponse {
    if !engine.is_ready() {
        return response::text(StatusCode::SERVICE_UNAVAILABLE, "not ready");
    }
    if pull_request.engine_id.as_ref().is_some_and(|id| !id.starts_with(&engine.engine_id)) {
        return response::text(StatusCode::CONFLICT, "engine id mismatch: the engine has restarted");
    }
    if pull_request.rank.is_none() && engine.options.dp_size > 1 {
        pull_request.rank = room_rank(engine, &pull_request.key);
    }
    match engine
        .rendezvous
        .pull(&pull_request, |offer| engine.timing.transfer(remaining_transfer_tokens(engine, offer)))
        .await
    {
        Ok(offer) => response::json_ok(&serde_json::to_value(offer).unwrap_or_default()),
        Err(RendezvousError::Unknown) => response::text(StatusCode::NOT_FOUND, "no such request"),
        Err(RendezvousError::Conflict) => {
            response::text(StatusCode::CONFLICT, "follow_bootstrap_room conflict")
        }
        Err(RendezvousError::TimedOut | RendezvousError::Full) => {
            response::text(StatusCode::SERVICE_UNAVAILABLE, "too many requests")
        }
    }
}

/// SGLang transfers chunks as they are computed, vLLM everything at the end.
fn remaining_transfer_tokens(engine: &SimEngineState, offer: &KvOffer) -> usize {
    let tokens = offer.prompt_tokens;
    match engine.options.protocol {
        SimProtocol::Sglang => {
            engine.options.service.last_transfer_tokens(tokens, tokens - offer.cached.total().min(tokens))
        }
        SimProtocol::Vllm => tokens,
    }
}

/// Rank registered for a room, for requests that name none.
fn room_rank(engine: &SimEngineState, key: &str) -> Option<u32> {
    let room: u64 = key.strip_prefix("room:")?.split(':').next()?.parse().ok()?;
    let registered = engine.room_ranks.lock().get(&room).copied();
    registered.or_else(|| u32::try_from(room % u64::from(engine.options.dp_size)).ok())
}

fn mooncake_workers(engine: &SimEngineState) -> Value {
    let address = engine.bootstrap_addr.map(|address| format!("tcp://{address}")).unwrap_or_default();
    let ranks: Map<String, Value> = (0..engine.options.dp_size)
        .map(|rank| {
            let id = if engine.options.dp_size == 1 {
                engine.engine_id.clone()
            } else {
                format!("{}_dp{rank}", engine.engine_id)
            };
            (rank.to_string(), json!({"engine_id": id, "worker_addr": {"0": {"0": address}}}))
        })
        .collect();
    Value::Object(ranks)
}

fn sglang(engine: &SimEngineState, method: &Method, path: &str, body: &[u8]) -> SimResponse {
    match (method, path) {
        (&Method::GET, "/health") => response::text(StatusCode::OK, "OK"),
        (&Method::PUT, "/route") => response::text(StatusCode::OK, "OK"),
        (&Method::GET, "/route") if !engine.is_ready() => {
            response::text(StatusCode::SERVICE_UNAVAILABLE, "Prefill server not fully registered yet")
        }
        (&Method::GET, "/route") => response::json_ok(&json!({
            "attn_tp_size": 1, "attn_cp_size": 1, "dp_size": engine.options.dp_size, "pp_size": 1,
            "page_size": engine.options.page_size, "kv_cache_dtype": "auto", "follow_bootstrap_room": true,
            "enable_dsa_cache_layer_split": false, "enable_kv_cache_sharding": false,
            "prefill_http_port": engine.main_addr.port(), "decode_allocation_policy": null,
        })),
        (&Method::POST, "/register_dp_rank") => register_rank(engine, body),
        (&Method::POST, "/query_dp_ranks") => query_ranks(engine, body),
        _ => response::text(StatusCode::NOT_FOUND, "404: Not Found"),
    }
}

fn register_rank(engine: &SimEngineState, body: &[u8]) -> SimResponse {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let number = |name: &str| body.get(name).and_then(Value::as_u64);
    let (Some(room), Some(rank)) = (number("bootstrap_room"), number("dp_rank")) else {
        return response::text(StatusCode::BAD_REQUEST, "bootstrap_room and dp_rank are needed");
    };
    let mut ranks = engine.room_ranks.lock();
    if ranks.len() >= MAX_ROOM_RANKS {
        // Rooms are used once; old ones are not looked up again.
        ranks.clear();
    }
    ranks.insert(room, u32::try_from(rank).unwrap_or(u32::MAX));
    response::text(StatusCode::OK, "OK")
}

fn query_ranks(engine: &SimEngineState, body: &[u8]) -> SimResponse {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let rooms = body.get("bootstrap_rooms").and_then(Value::as_array).cloned().unwrap_or_default();
    let ranks = engine.room_ranks.lock();
    let found: Map<String, Value> = rooms
        .iter()
        .filter_map(Value::as_u64)
        .filter_map(|room| ranks.get(&room).map(|rank| (room.to_string(), json!(rank))))
        .collect();
    response::json_ok(&Value::Object(found))
}
