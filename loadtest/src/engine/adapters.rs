//! LoRA adapters with both engines' own API. They change the list of served model names, but not what is generated.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, StatusCode};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::config::SimProtocol;
use super::response::{self, SimRejection, SimResponse};
use super::{SimEngine, SimEngineState};

/// The loaded adapters by name.
#[derive(Debug, Default)]
pub(crate) struct LoraAdapters(Mutex<LoadedAdapters>);

#[derive(Debug, Default)]
struct LoadedAdapters {
    by_name: BTreeMap<String, LoadedAdapter>,
    /// Number of uses of any adapter so far.
    uses: u64,
}

#[derive(Debug)]
struct LoadedAdapter {
    path: String,
    /// Number of its latest use.
    last_use: u64,
}

impl LoadedAdapters {
    fn insert(&mut self, name: String, path: String, most: Option<usize>) {
        self.uses += 1;
        self.by_name.insert(name, LoadedAdapter { path, last_use: self.uses });
        while most.is_some_and(|most| self.by_name.len() > most) {
            let oldest = self.by_name.iter().min_by_key(|(_, adapter)| adapter.last_use);
            let Some(name) = oldest.map(|(name, _)| name.clone()) else { return };
            self.by_name.remove(&name);
        }
    }

    fn paths(&self) -> BTreeMap<String, String> {
        self.by_name.iter().map(|(name, adapter)| (name.clone(), adapter.path.clone())).collect()
    }
}

impl LoraAdapters {
    /// Whether an adapter is loaded, which a request uses.
    pub(crate) fn has(&self, name: &str) -> bool {
        let mut loaded = self.0.lock();
        loaded.uses += 1;
        let now = loaded.uses;
        loaded.by_name.get_mut(name).map(|adapter| adapter.last_use = now).is_some()
    }

    /// Entries of the adapters in `/v1/models`.
    pub(crate) fn model_cards(&self, base: &str, owner: &str) -> Vec<Value> {
        let created = super::stats::unix_ms() / 1_000;
        let card = |(name, path): (&String, &String)| {
            json!({"id": name, "object": "model", "created": created, "owned_by": owner, "root": path,
                   "parent": base, "max_model_len": null})
        };
        self.0.lock().paths().iter().map(card).collect()
    }
}

impl SimEngine {
    /// Paths of the loaded LoRA adapters, by name.
    #[must_use]
    pub fn lora_adapters(&self) -> BTreeMap<String, String> {
        self.engine.adapters.0.lock().paths()
    }

    /// Whether adapters can be loaded from now on. Without it, vLLM has no such path (`VLLM_ALLOW_RUNTIME_LORA_UPDATING`), and
    /// SGLang rejects every load (`--enable-lora`).
    pub fn allow_adapter_loads(&self, allowed: bool) {
        self.engine.rejects_adapter_loads.store(!allowed, Ordering::Relaxed);
    }
}

/// Handles the paths of both protocols that load and unload adapters; `None` for other paths.
pub(crate) async fn dispatch(engine: &SimEngineState, parts: &Parts, body: &Bytes) -> Option<SimResponse> {
    let call = match engine.options.protocol {
        SimProtocol::Vllm => parts.uri.path().strip_prefix("/v1")?,
        SimProtocol::Sglang => parts.uri.path(),
    };
    match call {
        _ if parts.method != Method::POST => None,
        "/load_lora_adapter" => Some(load(engine, body).await),
        "/unload_lora_adapter" => Some(unload(engine, body)),
        _ => None,
    }
}

async fn load(engine: &SimEngineState, body: &Bytes) -> SimResponse {
    engine.stats.update(|stats| stats.adapter_load_requests += 1);
    let protocol = engine.options.protocol;
    let (name, path) = (string_member(body, "lora_name"), string_member(body, "lora_path"));
    let rejected = |message: String| Err((StatusCode::BAD_REQUEST, message));
    let outcome = if engine.rejects_adapter_loads.load(Ordering::Relaxed) {
        match protocol {
            SimProtocol::Vllm => return response::not_found(protocol),
            SimProtocol::Sglang => {
                rejected("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.".to_owned())
            }
        }
    } else if name.is_empty() || path.is_empty() {
        rejected("Both 'lora_name' and 'lora_path' must be provided.".to_owned())
    } else if engine.adapters.has(&name) {
        rejected(format!("The lora adapter '{name}' has already been loaded."))
    } else {
        tokio::time::sleep(engine.timing.scaled(engine.options.service.adapter_load_s)).await;
        // vLLM lists adapters that it has to read again.
        let most = engine.options.max_loaded_adapters.filter(|_| protocol == SimProtocol::Sglang);
        engine.adapters.0.lock().insert(name.clone(), path, most);
        engine.stats.update(|stats| stats.adapter_loads += 1);
        Ok(format!("Success: LoRA adapter '{name}' added successfully."))
    };
    adapter_response(protocol, outcome, &engine.adapters.0.lock().paths())
}

fn unload(engine: &SimEngineState, body: &Bytes) -> SimResponse {
    let name = string_member(body, "lora_name");
    let mut adapters = engine.adapters.0.lock();
    let outcome = match adapters.by_name.remove(&name) {
        Some(_) => Ok(format!("Success: LoRA adapter '{name}' removed successfully.")),
        None => Err((StatusCode::NOT_FOUND, format!("The lora adapter '{name}' cannot be found."))),
    };
    adapter_response(engine.options.protocol, outcome, &adapters.paths())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_adapter_that_was_used_least_recently_is_evicted() {
        let adapters = LoraAdapters::default();
        let load = |name: &str| adapters.0.lock().insert(name.to_owned(), format!("/{name}"), Some(2));
        ["a", "b"].into_iter().for_each(load);
        assert!(adapters.has("a"));
        load("c");
        assert_eq!(adapters.0.lock().paths().into_keys().collect::<Vec<_>>(), ["a", "c"]);
    }
}
