//! vLLM's HTTP API, except generation.

use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, StatusCode};
use serde_json::{Map, Value, json};

use super::api_sglang::{models, server_url};
use super::generation::{KvPull, SimKvTransfer};
use super::request::{GenerationEndpoint, GenerationRequest};
use super::response::{self, SimRejection, SimResponse};
use super::serve::DisaggregationPlan;
use super::{SimEngineState, SimRole, VllmConnector, events, metrics, tokenize};

const VERSION: &str = "0.32.0";

/// Transfers and ranks that the connector derives from a request's `kv_transfer_params`.
pub(crate) fn disaggregation_plan(
    engine: &SimEngineState,
    request: &GenerationRequest,
    parts: &Parts,
    ids: &[String],
) -> Result<DisaggregationPlan, SimRejection> {
    check_model(engine, request.model.as_deref())?;
    let count = request.choice_count();
    let rank = rank(engine, parts);
    let mut plan = DisaggregationPlan {
        transfers: vec![SimKvTransfer::Local; count],
        ranks: vec![rank; count],
        kv_transfer_params: Value::Null,
        prefill_leg: false,
    };
    let params = request.body.get("kv_transfer_params").and_then(Value::as_object);
    let flag =
        |name: &str| params.and_then(|params| params.get(name)).and_then(Value::as_bool).unwrap_or(false);
    // Only the first choice of a request is transferred; the others are computed on the decode engine.
    let first = match engine.options.connector {
        VllmConnector::Store => None,
        _ if flag("do_remote_decode") && engine.options.role != SimRole::Decode => {
            plan_prefill_leg(engine, request, params, ids, &mut plan)
        }
        _ if flag("do_remote_prefill") && engine.options.role != SimRole::Prefill => {
            plan_decode_leg(engine, params)
        }
        _ => None,
    };
    match first {
        Some(handover) => plan.transfers[0] = handover,
        None if engine.options.role == SimRole::Decode
            && engine.options.connector != VllmConnector::Store =>
        {
            engine.stats.update(|stats| stats.recomputed += 1);
        }
        None => {}
    }
    Ok(plan)
}

/// Rejects a model that is not served. Without a model, a request is for the engine's own.
pub(crate) fn check_model(engine: &SimEngineState, model: Option<&str>) -> Result<(), SimRejection> {
    let served = &engine.options.model;
    match model.filter(|model| !model.is_empty() && *model != served && !engine.adapters.has(model)) {
        Some(model) => Err(SimRejection::unknown_model(model, served)),
        None => Ok(()),
    }
}

fn rank(engine: &SimEngineState, parts: &Parts) -> u32 {
    // vLLM silently ignores a header that is not a rank.
    let header = parts.headers.get("x-data-parallel-rank").and_then(|rank| rank.to_str().ok());
    header
        .and_then(|rank| rank.trim().parse().ok())
        .filter(|rank| *rank < engine.options.dp_size)
        .unwrap_or_else(|| engine.next_rank())
}

type TransferParamsRef<'a> = Option<&'a Map<String, Value>>;

fn text(params: TransferParamsRef<'_>, name: &str) -> Option<String> {
    params?.get(name)?.as_str().map(str::to_owned)
}

/// Plans the prefill leg of a pair.
fn plan_prefill_leg(
    engine: &SimEngineState,
    request: &GenerationRequest,
    params: TransferParamsRef<'_>,
    ids: &[String],
    plan: &mut DisaggregationPlan,
) -> Option<SimKvTransfer> {
    if engine.options.connector == VllmConnector::Mooncake {
        return text(params, "transfer_id").map(|id| SimKvTransfer::Retain { key: format!("transfer:{id}") });
    }
    let id = ids.first().cloned().unwrap_or_default();
    // The engine numbers the generations of a Responses request, which tools of its own could follow.
    let generation = if request.endpoint == GenerationEndpoint::Responses { "_0" } else { "-0" };
    let request_id = format!("{id}{generation}-{:08x}", fastrand::u32(..));
    let tokens = request.prompts.first().map_or(0, |prompt| prompt.len());
    let blocks = tokens.div_ceil(engine.options.page_size);
    let first_block = fastrand::usize(1..100_000);
    let (host, port) = side_channel(engine);
    // `remote_prefill_cached_tokens` is filled in when the prefill is done.
    plan.kv_transfer_params = json!({
        "do_remote_prefill": true, "do_remote_decode": false,
        "remote_block_ids": [(first_block..first_block + blocks).collect::<Vec<_>>()],
        "remote_engine_id": engine.engine_id, "remote_request_id": request_id,
        "remote_host": host, "remote_port": port, "tp_size": 1, "dcp_size": 1, "pp_size": 1,
        "remote_num_tokens": tokens, "remote_blocks_expiry_time": null, "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    });
    Some(SimKvTransfer::Retain { key: format!("nixl:{request_id}") })
}

fn side_channel(engine: &SimEngineState) -> (String, u16) {
    let address = engine.bootstrap_addr;
    let host = engine
        .options
        .advertise_host
        .clone()
        .or_else(|| address.map(|address| address.ip().to_string()))
        .unwrap_or_default();
    (host, address.map_or(0, |address| address.port()))
}

/// Plans the decode leg. `None` when a member is missing: vLLM then computes the prompt itself.
fn plan_decode_leg(engine: &SimEngineState, params: TransferParamsRef<'_>) -> Option<SimKvTransfer> {
    let engine_id = Some(text(params, "remote_engine_id")?);
    Some(SimKvTransfer::Pull(if engine.options.connector == VllmConnector::Mooncake {
        KvPull {
            server: text(params, "remote_bootstrap_addr")?.trim_end_matches('/').to_owned(),
            key: format!("transfer:{}", text(params, "transfer_id")?),
            rank: None,
            engine_id,
            wait: true,
            retries_connect: false,
            counts_as_cached: true,
        }
    } else {
        let port = params?.get("remote_port")?.as_u64()?;
        KvPull {
            server: server_url(&text(params, "remote_host")?, port),
            key: format!("nixl:{}", text(params, "remote_request_id")?),
            rank: None,
            engine_id,
            wait: false,
            retries_connect: false,
            counts_as_cached: false,
        }
    }))
}

/// Dispatches all endpoints that do not generate.
pub(crate) fn dispatch(engine: &Arc<SimEngineState>, parts: &Parts, body: &Bytes) -> SimResponse {
    let get = parts.method == Method::GET;
    match parts.uri.path() {
        "/health" | "/ping" if get => {
            if engine.is_ready() {
                response::empty()
            } else {
                response::text(StatusCode::SERVICE_UNAVAILABLE, "")
            }
        }
        "/version" if get => response::json_ok(
            &json!({"version": engine.options.reported_version.as_deref().unwrap_or(VERSION)}),
        ),
        "/v1/models" if get => response::json_ok(&models(engine, "vllm")),
        "/load" if get => response::json_ok(&json!({"server_load": engine.stats.read(|stats| stats.active)})),
        "/metrics" if get => response::text(StatusCode::OK, metrics::vllm(engine)),
        "/kv_event_sources" if get => response::json_ok(&events::describe::vllm(engine)),
        "/tokenize" if parts.method == Method::POST => tokenize::tokenize(engine, body),
        "/detokenize" if parts.method == Method::POST => tokenize::detokenize(engine, body),
        "/v1/chat/completions/render" if parts.method == Method::POST => {
            tokenize::render(engine, GenerationEndpoint::Chat, body)
        }
        "/v1/completions/render" if parts.method == Method::POST => {
            tokenize::render(engine, GenerationEndpoint::Completion, body)
        }
        "/v1/messages/render" if parts.method == Method::POST => {
            tokenize::render(engine, GenerationEndpoint::Messages, body)
        }
        "/v1/responses/render" if parts.method == Method::POST => {
            tokenize::render(engine, GenerationEndpoint::Responses, body)
        }
        "/reset_prefix_cache" if parts.method == Method::POST => {
            engine.flush_caches();
            response::empty()
        }
        _ => response::not_found(engine.options.protocol),
    }
}
