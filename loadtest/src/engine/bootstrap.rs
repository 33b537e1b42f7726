//! The prefill engine's second port: SGLang's and Mooncake's bootstrap servers, NIXL's side channel, and the
//! simulator's hand-over of key-value caches.

use std::sync::Arc;

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use serde_json::{Map, Value, json};

use super::rendezvous::{KvAsk, KvOffer, Missed};
use super::reply::{self, Reply};
use super::server::read_body;
use super::{Connector, Engine, Face};

/// Largest body at this port.
const MAX_BODY_BYTES: usize = 1024 * 1024;
/// Most rooms whose rank is remembered.
const MAX_ROOM_RANKS: usize = 65_536;

pub(crate) async fn handle(engine: &Arc<Engine>, request: Request<Incoming>) -> Reply {
    let (parts, body) = request.into_parts();
    let Some(body) = read_body(body, MAX_BODY_BYTES).await else {
        return reply::text(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large or incomplete");
    };
    let path = parts.uri.path();
    if parts.method == Method::POST && path == "/_sim/kv" {
        return match serde_json::from_slice::<KvAsk>(&body) {
            Ok(ask) => hand_over(engine, ask).await,
            Err(error) => reply::text(StatusCode::BAD_REQUEST, error.to_string()),
        };
    }
    match engine.config.face {
        Face::Sglang => sglang(engine, &parts.method, path, &body),
        Face::Vllm if engine.config.connector == Connector::Mooncake && path == "/query" => {
            reply::json_ok(&mooncake_workers(engine))
        }
        Face::Vllm => reply::not_found(engine.config.face),
    }
}

async fn hand_over(engine: &Engine, mut ask: KvAsk) -> Reply {
    if !engine.is_ready() {
        return reply::text(StatusCode::SERVICE_UNAVAILABLE, "not ready");
    }
    if ask.engine_id.as_ref().is_some_and(|id| !id.starts_with(&engine.engine_id)) {
        return reply::text(StatusCode::CONFLICT, "another engine of this name answers");
    }
    if ask.rank.is_none() && engine.config.dp_size > 1 {
        ask.rank = room_rank(engine, &ask.key);
    }
    match engine.places.take(&ask, |offer| engine.timing.transfer(left_to_hand_over(engine, offer))).await {
        Ok(offer) => reply::json_ok(&serde_json::to_value(offer).unwrap_or_default()),
        Err(Missed::Unknown) => reply::text(StatusCode::NOT_FOUND, "no such request"),
        Err(Missed::Conflict) => reply::text(StatusCode::CONFLICT, "follow_bootstrap_room conflict"),
        Err(Missed::TimedOut | Missed::Full) => {
            reply::text(StatusCode::SERVICE_UNAVAILABLE, "too many requests")
        }
    }
}

/// SGLang hands chunks over as they are computed, vLLM all at the end.
fn left_to_hand_over(engine: &Engine, offer: &KvOffer) -> usize {
    let tokens = offer.prompt_tokens;
    match engine.config.face {
        Face::Sglang => {
            engine.config.service.last_handed_over(tokens, tokens - offer.cached.total().min(tokens))
        }
        Face::Vllm => tokens,
    }
}

/// Where a decode engine looks for a room that the request gives no rank for.
fn room_rank(engine: &Engine, key: &str) -> Option<u32> {
    let room: u64 = key.strip_prefix("room:")?.split(':').next()?.parse().ok()?;
    let registered = engine.room_ranks.lock().get(&room).copied();
    registered.or_else(|| u32::try_from(room % u64::from(engine.config.dp_size)).ok())
}

fn mooncake_workers(engine: &Engine) -> Value {
    let address = engine.bootstrap.map(|address| format!("tcp://{address}")).unwrap_or_default();
    let ranks: Map<String, Value> = (0..engine.config.dp_size)
        .map(|rank| {
            let id = if engine.config.dp_size == 1 {
                engine.engine_id.clone()
            } else {
                format!("{}_dp{rank}", engine.engine_id)
            };
            (rank.to_string(), json!({"engine_id": id, "worker_addr": {"0": {"0": address}}}))
        })
        .collect();
    Value::Object(ranks)
}

fn sglang(engine: &Engine, method: &Method, path: &str, body: &[u8]) -> Reply {
    match (method, path) {
        (&Method::GET, "/health") => reply::text(StatusCode::OK, "OK"),
        (&Method::PUT, "/route") => reply::text(StatusCode::OK, "OK"),
        (&Method::GET, "/route") if !engine.is_ready() => {
            reply::text(StatusCode::SERVICE_UNAVAILABLE, "Prefill server not fully registered yet")
        }
        (&Method::GET, "/route") => reply::json_ok(&json!({
            "attn_tp_size": 1, "attn_cp_size": 1, "dp_size": engine.config.dp_size, "pp_size": 1,
            "page_size": engine.config.page_size, "kv_cache_dtype": "auto", "follow_bootstrap_room": true,
            "enable_dsa_cache_layer_split": false, "enable_kv_cache_sharding": false,
            "prefill_http_port": engine.main.port(), "decode_allocation_policy": null,
        })),
        (&Method::POST, "/register_dp_rank") => register_rank(engine, body),
        (&Method::POST, "/query_dp_ranks") => query_ranks(engine, body),
        _ => reply::text(StatusCode::NOT_FOUND, "404: Not Found"),
    }
}

fn register_rank(engine: &Engine, body: &[u8]) -> Reply {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let number = |name: &str| body.get(name).and_then(Value::as_u64);
    let (Some(room), Some(rank)) = (number("bootstrap_room"), number("dp_rank")) else {
        return reply::text(StatusCode::BAD_REQUEST, "bootstrap_room and dp_rank are needed");
    };
    let mut ranks = engine.room_ranks.lock();
    if ranks.len() >= MAX_ROOM_RANKS {
        // Rooms are used once; an old one is not asked for again.
        ranks.clear();
    }
    ranks.insert(room, u32::try_from(rank).unwrap_or(u32::MAX));
    reply::text(StatusCode::OK, "OK")
}

fn query_ranks(engine: &Engine, body: &[u8]) -> Reply {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let rooms = body.get("bootstrap_rooms").and_then(Value::as_array).cloned().unwrap_or_default();
    let ranks = engine.room_ranks.lock();
    let found: Map<String, Value> = rooms
        .iter()
        .filter_map(Value::as_u64)
        .filter_map(|room| ranks.get(&room).map(|rank| (room.to_string(), json!(rank))))
        .collect();
    reply::json_ok(&Value::Object(found))
}
