//! SGLang's HTTP API, except generation.

use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::generation::{KvPull, SimKvTransfer};
use super::request::GenerationRequest;
use super::response::{self, SimRejection, SimResponse};
use super::serve::DisaggregationPlan;
use super::stats::unix_s;
use super::{SimEngineState, SimRole, events, metrics, tokenize};

const VERSION: &str = "0.5.23";
/// Default bootstrap port when a request names none.
const DEFAULT_BOOTSTRAP_PORT: u16 = 8_998;
/// Bootstrap host for "no transfer", which engines use in self-tests.
const FAKE_BOOTSTRAP_HOST: &str = "2.2.2.2";

/// Transfers and ranks of a request under the pair protocol.
pub(crate) fn disaggregation_plan(
    engine: &SimEngineState,
    request: &GenerationRequest,
    parts: &Parts,
) -> Result<DisaggregationPlan, SimRejection> {
    let count = request.choice_count();
    let routed = routed_rank(engine, request, parts)?;
    let rooms = parse_bootstrap_rooms(request, count)?;
    let mut handovers = Vec::with_capacity(count);
    let mut ranks = Vec::with_capacity(count);
    let hosts = ScalarOrList::new(request, "bootstrap_host");
    let ports = ScalarOrList::new(request, "bootstrap_port");
    let fake = hosts
        .value_for(0, request.n)
        .and_then(Value::as_str)
        .is_some_and(|host| host == FAKE_BOOTSTRAP_HOST || host == "FAKE_BOOTSTRAP_HOST");
    for index in 0..count {
        let Some(rooms) = rooms.as_ref().filter(|_| engine.options.role != SimRole::Plain && !fake) else {
            if engine.options.role != SimRole::Plain && !fake {
                return Err(SimRejection::missing_bootstrap_room());
            }
            handovers.push(SimKvTransfer::Local);
            ranks.push(routed.unwrap_or_else(|| engine.next_rank()));
            continue;
        };
        let (room, key) = &rooms[index];
        let by_room = u32::try_from(room % u64::from(engine.options.dp_size)).unwrap_or_default();
        ranks.push(routed.unwrap_or(by_room));
        handovers.push(if engine.options.role == SimRole::Prefill {
            SimKvTransfer::Send { key: key.clone() }
        } else {
            let host = hosts.value_for(index, request.n).and_then(Value::as_str).ok_or_else(|| {
                SimRejection::bad_request(
                    "bootstrap_host must be a text, or a list with one for each prompt or answer",
                )
            })?;
            let port = ports
                .value_for(index, request.n)
                .and_then(Value::as_u64)
                .unwrap_or(u64::from(DEFAULT_BOOTSTRAP_PORT));
            SimKvTransfer::Pull(KvPull {
                server: server_url(host, port),
                key: key.clone(),
                rank: request.u32("disagg_prefill_dp_rank"),
                engine_id: None,
                wait: true,
                retries_connect: true,
                counts_as_cached: false,
            })
        });
    }
    let prefill_leg = handovers.iter().any(|handover| matches!(handover, SimKvTransfer::Send { .. }));
    Ok(DisaggregationPlan { transfers: handovers, ranks, kv_transfer_params: Value::Null, prefill_leg })
}

pub(crate) fn server_url(host: &str, port: u64) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("http://[{host}]:{port}")
    } else {
        format!("http://{host}:{port}")
    }
}

/// A member that is one value for all choices, or a list.
struct ScalarOrList<'a> {
    value: Option<&'a Value>,
}

impl<'a> ScalarOrList<'a> {
    fn new(request: &'a GenerationRequest, name: &str) -> Self {
        Self { value: request.body.get(name).filter(|value| !value.is_null()) }
    }

    fn value_for(&self, index: usize, n: u32) -> Option<&'a Value> {
        match self.value? {
            Value::Array(list) => list.get(index).or_else(|| list.get(index / n.max(1) as usize)),
            one => Some(one),
        }
        .filter(|value| !value.is_null())
    }
}

type BootstrapRooms = Vec<(u64, String)>;

/// The room of every choice, and its index: a single room counts up over a batch, a list has one room per choice, or
/// one per prompt shared by its choices.
fn parse_bootstrap_rooms(
    request: &GenerationRequest,
    count: usize,
) -> Result<Option<BootstrapRooms>, SimRejection> {
    let invalid = |what: String| SimRejection::bad_request(format!("bootstrap_room: {what}"));
    let number = |value: &Value| {
        value
            .as_u64()
            .filter(|room| *room <= i64::MAX as u64)
            .ok_or_else(|| invalid(format!("must be a whole number between 0 and 2^63-1, got {value}")))
    };
    match request.body.get("bootstrap_room") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(list)) if list.len() == count => list
            .iter()
            .map(|room| number(room).map(|room| (room, rendezvous_key(room, 0))))
            .collect::<Result<_, _>>()
            .map(Some),
        Some(Value::Array(list)) if list.len() == request.prompts.len() => (0..count)
            .map(|index| {
                let (prompt, choice) = request.prompt_and_choice(index);
                number(&list[prompt]).map(|room| (room, rendezvous_key(room, choice)))
            })
            .collect::<Result<_, _>>()
            .map(Some),
        Some(Value::Array(list)) => Err(invalid(format!(
            "{} rooms for {} prompts and {count} answers",
            list.len(),
            request.prompts.len()
        ))),
        Some(room) => {
            let first = number(room)?;
            Ok(Some(
                (0..count as u64)
                    .map(|index| first.saturating_add(index))
                    .map(|room| (room, rendezvous_key(room, 0)))
                    .collect(),
            ))
        }
    }
}

fn rendezvous_key(room: u64, choice: u32) -> String {
    if choice == 0 { format!("room:{room}") } else { format!("room:{room}:{choice}") }
}

/// The data-parallel rank that the request selects; the header takes precedence.
fn routed_rank(
    engine: &SimEngineState,
    request: &GenerationRequest,
    parts: &Parts,
) -> Result<Option<u32>, SimRejection> {
    let rank =
        match parts.headers.get("x-data-parallel-rank") {
            Some(header) => {
                Some(header.to_str().ok().and_then(|text| text.trim().parse().ok()).ok_or_else(|| {
                    SimRejection::bad_request("X-Data-Parallel-Rank must be a whole number")
                })?)
            }
            None => request.u32("routed_dp_rank").or_else(|| request.u32("data_parallel_rank")),
        };
    match rank {
        Some(rank) if rank >= engine.options.dp_size => Err(SimRejection::bad_request(format!(
            "routed_dp_rank={rank} is out of range [0, {})",
            engine.options.dp_size
        ))),
        rank => Ok(rank),
    }
}

/// Dispatches all endpoints that do not generate.
pub(crate) fn dispatch(engine: &Arc<SimEngineState>, parts: &Parts, body: &Bytes) -> SimResponse {
    let get = parts.method == Method::GET;
    let query = parts.uri.query().unwrap_or_default();
    match parts.uri.path() {
        "/health" | "/health_generate" if get => {
            if engine.is_ready() {
                response::empty()
            } else {
                response::text(StatusCode::SERVICE_UNAVAILABLE, "")
            }
        }
        "/ready" if get => response::json_ok(&json!({"ready": engine.is_ready()})),
        "/v1/models" if get => response::json_ok(&models(engine, "sglang")),
        "/server_info" | "/get_server_info" if get => response::json_ok(&server_info(engine)),
        "/model_info" | "/get_model_info" if get => response::json_ok(&model_info(engine)),
        "/get_hicache_l3_cache_layout" if get => response::json_ok(&layout(engine)),
        "/v1/loads" if get => response::json_ok(&loads(engine, query)),
        "/metrics" if get => response::text(StatusCode::OK, metrics::sglang(engine)),
        "/abort_request" if parts.method == Method::POST => {
            let body: Value = serde_json::from_slice(body).unwrap_or_default();
            let all = body.get("abort_all").and_then(Value::as_bool).unwrap_or(false);
            engine.abort_by_rid(body.get("rid").and_then(Value::as_str).unwrap_or_default(), all);
            response::empty()
        }
        "/flush_cache" if get || parts.method == Method::POST => {
            engine.flush_caches();
            response::text(
                StatusCode::OK,
                "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be performed.)\n",
            )
        }
        "/tokenize" | "/v1/tokenize" if parts.method == Method::POST => tokenize::tokenize(engine, body),
        "/detokenize" | "/v1/detokenize" if parts.method == Method::POST => {
            tokenize::detokenize(engine, body)
        }
        _ => response::not_found(engine.options.protocol),
    }
}

pub(crate) fn models(engine: &SimEngineState, owner: &str) -> Value {
    let model = &engine.options.model;
    let mut cards = vec![json!({
        "id": model, "object": "model", "created": super::stats::unix_ms() / 1_000, "owned_by": owner,
        "root": engine.options.model_path(), "parent": null, "max_model_len": engine.options.context_tokens,
    })];
    cards.extend(engine.adapters.model_cards(model, owner));
    json!({"object": "list", "data": cards})
}

fn disaggregation_mode(engine: &SimEngineState) -> &'static str {
    match engine.options.role {
        SimRole::Prefill => "prefill",
        SimRole::Decode => "decode",
        SimRole::Plain => "null",
    }
}

fn layout(engine: &SimEngineState) -> Value {
    let storage = engine.l3_backend().is_some();
    let reason = if storage {
        "External L3 lookup requires rank-replicated/MLA pools"
    } else {
        "Hierarchical cache is disabled"
    };
    let mut inner = json!({"pools": []});
    if storage && let Some(inner) = inner.as_object_mut() {
        inner.insert("key_prefix".to_owned(), json!(engine.options.model.replace('/', "-")));
        inner.insert("is_mla_backend".to_owned(), json!(false));
        inner.insert("pp_rank".to_owned(), json!(0));
        inner.insert("pp_size".to_owned(), json!(1));
    }
    json!({"enabled": false, "backend": storage.then_some("mooncake"), "page_size": engine.options.page_size,
           "hicache_object_layout": inner, "reason": reason})
}

fn server_info(engine: &SimEngineState) -> Value {
    let config = &engine.options;
    let mut info = json!({
        "model_path": config.model_path(), "tokenizer_path": config.model_path(), "served_model_name": config.model,
        "host": engine.main_addr.ip().to_string(), "port": engine.main_addr.port(), "context_length": config.context_tokens,
        "disaggregation_mode": disaggregation_mode(engine),
        "disaggregation_transfer_backend": "mooncake",
        "disaggregation_bootstrap_port": engine.bootstrap_addr.map_or(DEFAULT_BOOTSTRAP_PORT, |addr| addr.port()),
        "page_size": config.page_size, "tp_size": 1, "dp_size": config.dp_size, "pp_size": 1, "nnodes": 1,
        "load_balance_method": if config.role == SimRole::Plain { "round_robin" } else { "follow_bootstrap_room" },
        "enable_dp_attention": config.dp_size > 1,
        "max_running_requests": config.max_running, "max_total_tokens": config.device_tokens,
        "max_total_num_tokens": config.device_tokens, "chunked_prefill_size": config.service.chunk_tokens,
        "schedule_policy": "fcfs", "enable_priority_scheduling": false, "disable_radix_cache": false,
        "enable_hierarchical_cache": config.host_tokens > 0 || engine.l3_backend().is_some(),
        "hicache_ratio": 2.0, "hicache_write_policy": "write_through",
        "hicache_storage_backend": engine.l3_backend().map(|_| "mooncake"),
        "hicache_storage_prefetch_policy": "wait_complete",
        "speculative_algorithm": null,
        "enable_cache_report": true, "enable_metrics": true,
        "version": config.reported_version.as_deref().unwrap_or(VERSION),
    });
    if let Some(object) = info.as_object_mut() {
        let state = json!({"page_size": config.page_size, "max_total_num_tokens": config.device_tokens,
                           "memory_usage": {"token_capacity": config.device_tokens}});
        object.insert("internal_states".to_owned(), Value::Array(vec![state; config.dp_size as usize]));
        object.insert("hicache_object_layout".to_owned(), layout(engine));
        object.insert("kv_events".to_owned(), events::describe::sglang(engine));
        object.insert("attn_dp_size".to_owned(), json!(config.dp_size));
        object.insert("hicache_size".to_owned(), json!(0));
        object.insert("hicache_mem_layout".to_owned(), json!("page_first"));
        object.insert("hicache_io_backend".to_owned(), json!("kernel"));
        object.insert("hicache_storage_backend_extra_config".to_owned(), Value::Null);
        object.insert("startup_time".to_owned(), json!({"scheduler_e2e": config.ready_after.as_secs_f64()}));
    }
    info
}

fn model_info(engine: &SimEngineState) -> Value {
    json!({
        "model_path": engine.options.model_path(), "served_model_name": engine.options.model,
        "tokenizer_path": engine.options.model_path(), "is_generation": true, "preferred_sampling_params": null,
        "weight_version": "default", "disaggregation_mode": disaggregation_mode(engine), "reasoning_parser": null,
        "tool_call_parser": null, "has_image_understanding": false, "has_audio_understanding": false,
        "model_type": "sim", "architectures": ["SimForCausalLM"],
    })
}

/// `/v1/loads`: one entry per rank. The engine counts as a whole, so each rank shows its share.
fn loads(engine: &SimEngineState, query: &str) -> Value {
    let requested: Option<u32> =
        query.split('&').find_map(|pair| pair.strip_prefix("dp_rank=")).and_then(|rank| rank.parse().ok());
    let included = query.split('&').find_map(|pair| pair.strip_prefix("include="));
    let includes = |section: &str| {
        included.is_none_or(|list| {
            list.split([',']).flat_map(|part| part.split("%2C")).any(|part| part == section || part == "all")
        })
    };
    let ranks = u64::from(engine.options.dp_size);
    let loads: Vec<Value> =
        (0..engine.options.dp_size)
            .filter(|rank| requested.is_none_or(|requested| requested == *rank))
            .map(|rank| {
                let (_, capacity) = engine.rank(rank).cache.lock().device_usage();
                engine.stats.read(|stats| {
                    let share = |count: u64| count / ranks + u64::from(count % ranks > u64::from(rank));
                    let prompt_tokens = stats.prompt_tokens.max(1);
                    // Evictable tokens are not counted as used.
                    let used = share(stats.used_tokens);
                    let hit =
                        stats.cached_device_tokens + stats.cached_host_tokens + stats.cached_storage_tokens;
                    let mut load = json!({
                        "timestamp": unix_s(), "dp_rank": rank,
                        "num_running_reqs": share(stats.running), "num_waiting_reqs": share(stats.waiting),
                        "num_waiting_uncached_tokens": share(stats.waiting_uncached_tokens),
                        "num_used_tokens": used, "num_total_tokens": used, "num_active_tokens": used,
                        "num_prealloc_ready_tokens": 0,
                        "max_total_num_tokens": capacity, "max_running_requests": engine.options.max_running,
                        "token_usage": fraction(used, capacity), "gen_throughput": 0.0,
                        "cache_hit_rate": fraction(hit, prompt_tokens),
                        "utilization": fraction(share(stats.running), engine.options.max_running as u64),
                        "total_prefill_uncached_tokens": stats.prompt_tokens - hit.min(stats.prompt_tokens),
                        "total_prefill_busy_us": stats.prefill_busy_us, "decode_moments": null,
                    });
                    if let Some(object) = load.as_object_mut() {
                        if includes("disagg") {
                            let prefill = engine.options.role == SimRole::Prefill;
                            let transferring = share(stats.transferring);
                            object.insert("disaggregation".to_owned(), json!({
                            "mode": disaggregation_mode(engine),
                            "prefill_bootstrap_queue_reqs": share(stats.bootstrapping),
                            "prefill_inflight_queue_reqs": if prefill { transferring } else { 0 },
                            "decode_prealloc_queue_reqs": 0,
                            "decode_transfer_queue_reqs": if prefill { 0 } else { transferring },
                            "decode_retracted_queue_reqs": 0,
                            "kv_transfer_speed_gb_s": engine.options.service.transfer_bytes_per_s / 1e9,
                            "kv_transfer_latency_ms": engine.options.service.transfer_latency_s * 1e3,
                        }));
                        }
                        if includes("queues") {
                            object.insert("queues".to_owned(), json!({
                            "waiting": share(stats.waiting), "grammar": 0, "paused": 0, "retracted": 0,
                            "prealloc_ready": 0,
                        }));
                        }
                    }
                    load
                })
            })
            .collect();
    json!({"timestamp": unix_s(), "version": VERSION, "accelerator": "sim", "num_accelerators": 1, "loads": loads})
}

#[expect(clippy::cast_precision_loss, reason = "shown to people and to load balancers")]
pub(crate) fn fraction(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
