//! LoRA adapters with both engines' own API. They only change the list of served model names.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::StatusCode;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::config::SimProtocol;
use super::response::{self, SimRejection, SimResponse};
use super::{SimEngine, SimEngineState};

#[derive(Debug, Default)]
pub(crate) struct LoraAdapters(Mutex<BTreeMap<String, String>>);

impl LoraAdapters {
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.lock().contains_key(name)
    }

    /// Entries of the adapters in `/v1/models`.
    pub(crate) fn model_cards(&self, base: &str, owner: &str) -> Vec<Value> {
        let created = super::stats::unix_ms() / 1_000;
        let card = |(name, path): (&String, &String)| {
            json!({"id": name, "object": "model", "created": created, "owned_by": owner, "root": path,
                   "parent": base, "max_model_len": null})
        };
        self.0.lock().iter().map(card).collect()
    }
}

impl SimEngine {
    /// Paths of the loaded LoRA adapters, by name.
    #[must_use]
    pub fn lora_adapters(&self) -> BTreeMap<String, String> {
        self.engine.adapters.0.lock().clone()
    }
}

/// Handles `load_lora_adapter` of both protocols.
pub(crate) fn load(engine: &SimEngineState, body: &Bytes) -> SimResponse {
    let (name, path) = (string_member(body, "lora_name"), string_member(body, "lora_path"));
    let mut adapters = engine.adapters.0.lock();
    let outcome = if name.is_empty() || path.is_empty() {
        Err((StatusCode::BAD_REQUEST, "Both 'lora_name' and 'lora_path' must be provided.".to_owned()))
    } else if adapters.contains_key(&name) {
        Err((StatusCode::BAD_REQUEST, format!("The lora adapter '{name}' has already been loaded.")))
    } else {
        adapters.insert(name.clone(), path);
        Ok(format!("Success: LoRA adapter '{name}' added successfully."))
    };
    adapter_response(engine.options.protocol, outcome, &adapters)
}

/// Handles `unload_lora_adapter` of both protocols.
pub(crate) fn unload(engine: &SimEngineState, body: &Bytes) -> SimResponse {
    let name = string_member(body, "lora_name");
    let mut adapters = engine.adapters.0.lock();
    let outcome = match adapters.remove(&name) {
        Some(_) => Ok(format!("Success: LoRA adapter '{name}' removed successfully.")),
        None => Err((StatusCode::NOT_FOUND, format!("The lora adapter '{name}' cannot be found."))),
    };
    adapter_response(engine.options.protocol, outcome, &adapters)
}

fn string_member(body: &Bytes, name: &str) -> String {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    body.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// vLLM answers with a sentence or an error, SGLang with an object and status 400 for every error.
fn adapter_response(
    protocol: SimProtocol,
    outcome: Result<String, (StatusCode, String)>,
    adapters: &BTreeMap<String, String>,
) -> SimResponse {
    match (protocol, outcome) {
        (SimProtocol::Vllm, Ok(message)) => response::text(StatusCode::OK, message),
        (SimProtocol::Vllm, Err((status, message))) => {
            let kind = if status == StatusCode::NOT_FOUND { "NotFoundError" } else { "InvalidUserInput" };
            response::rejection(protocol, &SimRejection { status, kind, param: None, message })
        }
        (SimProtocol::Sglang, outcome) => {
            let status = if outcome.is_ok() { StatusCode::OK } else { StatusCode::BAD_REQUEST };
            let error = outcome.err().map(|(_, message)| message);
            let success = error.is_none();
            response::json_with(
                status,
                &json!({"success": success, "error_message": error, "loaded_adapters": adapters}),
            )
        }
    }
}
