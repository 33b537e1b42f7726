//! Responses of each role, prepared once.

use serde_json::{Value, json};

use crate::wire::HttpFraming;

/// Name of the model, its path and its tokenizer.
pub(crate) const MODEL: &str = "mock";
const VERSION: &str = "0.5.23";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MockRole {
    Plain,
    Prefill { bootstrap_port: u16 },
    Decode,
    Bootstrap { prefill_port: u16 },
}

#[derive(Debug)]
pub(super) struct CannedResponses {
    pub(super) role: MockRole,
    paths: Vec<(&'static str, Vec<u8>)>,
    completion: Vec<u8>,
    missing_bootstrap_room: Vec<u8>,
    not_found: Vec<u8>,
}

impl CannedResponses {
    pub(super) fn new(role: MockRole) -> Self {
        let paths = match role {
            MockRole::Bootstrap { prefill_port } => bootstrap_paths(prefill_port),
            MockRole::Plain => engine_paths("null", Value::Null),
            MockRole::Prefill { bootstrap_port } => engine_paths("prefill", bootstrap_port.into()),
            MockRole::Decode => engine_paths("decode", Value::Null),
        };
        let error = |message: &str, code: u16| {
            json!({"object": "error", "message": message, "type": "BadRequest", "param": null, "code": code})
                .to_string()
        };
        Self {
            role,
            paths,
            completion: http_response(200, &completion().to_string()),
            missing_bootstrap_room: http_response(
                400,
                &error("Invalid request: Disaggregated request received without bootstrap room id", 400),
            ),
            not_found: http_response(404, &error("Not Found", 404)),
        }
    }

    /// The response to anything but a completion.
    pub(super) fn fixed_response(&self, path: &str) -> &[u8] {
        let known = self.paths.iter().find(|(known, _)| *known == path);
        known.map_or(self.not_found.as_slice(), |(_, answer)| answer)
    }

    pub(super) fn completion(&self) -> &[u8] {
        &self.completion
    }

    /// The response to a completion without `bootstrap_room` on a prefill or decode engine.
    pub(super) fn missing_bootstrap_room(&self) -> &[u8] {
        &self.missing_bootstrap_room
    }

    pub(super) fn requires_bootstrap_room(&self) -> bool {
        matches!(self.role, MockRole::Prefill { .. } | MockRole::Decode)
    }

    pub(super) fn is_engine(&self) -> bool {
        !matches!(self.role, MockRole::Bootstrap { .. })
    }
}

fn http_response(status: u16, body: &str) -> Vec<u8> {
    let reason = match status {
        200 => "OK",
        400 => "Bad Request",
        _ => "Not Found",
    };
    let head = format!(
        "HTTP/1.1 {status} {reason}\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\nserver: uvicorn\r\n\
         content-length: {}\r\ncontent-type: application/json\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body.as_bytes()].concat()
}

fn completion() -> Value {
    json!({
        "id": "0123456789abcdef0123456789abcdef", "object": "chat.completion", "created": 1_700_000_000, "model": MODEL,
        "choices": [{
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there.", "reasoning_content": null, "tool_calls": null},
            "logprobs": null, "finish_reason": "stop", "matched_stop": null,
        }],
        "usage": {"prompt_tokens": 64, "total_tokens": 68, "completion_tokens": 4, "prompt_tokens_details": null},
        "metadata": {"weight_version": "default"},
    })
}

fn engine_paths(mode: &str, bootstrap_port: Value) -> Vec<(&'static str, Vec<u8>)> {
    let model_info = json!({
        "model_path": MODEL, "tokenizer_path": MODEL, "served_model_name": MODEL, "is_generation": true,
        "weight_version": "default", "disaggregation_mode": mode, "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    });
    let server_info = json!({
        "model_path": MODEL, "tokenizer_path": MODEL, "served_model_name": MODEL, "version": VERSION,
        "disaggregation_mode": mode, "disaggregation_bootstrap_port": bootstrap_port, "dp_size": 1, "tp_size": 1,
        "pp_size": 1, "page_size": 64, "context_length": 1_048_576, "max_running_requests": 8192,
        "max_total_num_tokens": 100_000_000, "startup_time": 1_700_000_000, "kv_events": null,
        "internal_states": [{"max_total_num_tokens": 100_000_000, "last_gen_throughput": 0.0}],
    });
    let models = json!({
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "sglang", "root": MODEL,
                  "max_model_len": 1_048_576}],
    });
    let (model_info, server_info) =
        (http_response(200, &model_info.to_string()), http_response(200, &server_info.to_string()));
    vec![
        ("/health", http_response(200, "")),
        // Acts as a trace collector that accepts everything.
        ("/v1/traces", http_response(200, "")),
        ("/health_generate", http_response(200, "")),
        ("/abort_request", http_response(200, "")),
        ("/flush_cache", http_response(200, "")),
        ("/v1/models", http_response(200, &models.to_string())),
        ("/model_info", model_info.clone()),
        ("/get_model_info", model_info),
        ("/server_info", server_info.clone()),
        ("/get_server_info", server_info),
        ("/v1/loads", http_response(200, &loads(mode).to_string())),
    ]
}

fn loads(mode: &str) -> Value {
    json!({
        "timestamp": "2026-01-01T00:00:00", "version": VERSION, "accelerator": "mock", "num_accelerators": 1,
        "loads": [{
            "timestamp": 0.0, "dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0,
            "num_total_tokens": 0, "max_total_num_tokens": 100_000_000, "max_running_requests": 8192,
            "token_usage": 0.0, "gen_throughput": 0.0, "cache_hit_rate": 0.0, "utilization": 0.0,
            "disaggregation": {"mode": mode, "prefill_bootstrap_queue_reqs": 0, "prefill_inflight_queue_reqs": 0,
                               "decode_prealloc_queue_reqs": 0, "decode_transfer_queue_reqs": 0,
                               "decode_retracted_queue_reqs": 0},
            "queues": {"waiting": 0, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
        }],
    })
}

fn bootstrap_paths(prefill_port: u16) -> Vec<(&'static str, Vec<u8>)> {
    let route = json!({
        "attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 64, "kv_cache_dtype": "auto",
        "follow_bootstrap_room": true, "prefill_http_port": prefill_port,
    });
    vec![
        ("/health", http_response(200, "OK")),
        ("/route", http_response(200, &route.to_string())),
        ("/query_dp_ranks", http_response(200, "{}")),
    ]
}

/// Rejection of a request whose body has no announced length.
pub(super) fn length_required(head: &HttpFraming) -> Option<Vec<u8>> {
    head.chunked
        .then(|| b"HTTP/1.1 411 Length Required\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".to_vec())
}
