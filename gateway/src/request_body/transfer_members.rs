//! Body members that steer KV transfer and that only the gateway may set: hosts to fetch KV caches from, ranks, and sockets inside
//! an engine.
//!
//! The names are those that the request classes of vLLM 0.32 (`kv_transfer_params`, `ec_transfer_params`, also inside `vllm_xargs`)
//! and SGLang 0.5.23 (`GenerateReqInput` and the OpenAI requests) accept. Families are matched by prefix, so that new members of a
//! family in the next release are covered too.

/// Prefixes of member families.
const PREFIXES: [&str; 5] = ["bootstrap_", "disagg", "kv_transfer", "ec_transfer", "data_parallel_rank"];
/// Members that belong to no family.
const NAMES: [&str; 4] = ["routed_dp_rank", "decode_tp_size", "kv_hints", "http_worker_ipc"];

/// Top-level members whose value is user data for the model. No engine parses its own parameters from them, and a tool may well
/// have an argument called `bootstrap_host`.
const USER_DATA: [&str; 18] = [
    "chat_template_kwargs",
    "documents",
    "functions",
    "guided_json",
    "input",
    "inputs",
    "instructions",
    "json_schema",
    "messages",
    "metadata",
    "prompt",
    "queries",
    "query",
    "response_format",
    "structured_outputs",
    "system",
    "text",
    "tools",
];

/// Whether an engine would read KV-transfer parameters from a member of this name.
#[must_use]
pub fn is_transfer_member(key: &str) -> bool {
    // Few other members begin with one of these letters, so the check is nearly free.
    matches!(key.as_bytes().first(), Some(b'b' | b'd' | b'e' | b'h' | b'k' | b'r'))
        && (PREFIXES.iter().any(|prefix| key.starts_with(prefix)) || NAMES.contains(&key))
}

/// Whether the contents of this top-level member are left unchanged.
#[must_use]
pub fn is_user_data(key: &str) -> bool {
    USER_DATA.contains(&key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_both_engines_are_recognized() {
        for name in [
            "kv_transfer_params",
            "ec_transfer_params",
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "bootstrap_pair_key",
            "decode_tp_size",
            "routed_dp_rank",
            "data_parallel_rank",
            "disagg_prefill_dp_rank",
            "disaggregated_params",
            "kv_hints",
            "http_worker_ipc",
        ] {
            assert!(is_transfer_member(name), "{name}");
        }
        for name in
            ["", "model", "best_of", "echo", "response_format", "rid", "repetition_penalty", "Bootstrap_host"]
        {
            assert!(!is_transfer_member(name), "{name}");
        }
    }
}
