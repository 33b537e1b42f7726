//! `OpenAI`'s Responses, as both engines serve them.
//!
//! The prompt is that of the equal chat completion; output items and events follow from its reasoning, content and tool
//! call. Responses are stored only with [`response_store`](super::SimEngineOptions::response_store), as with the real
//! engines' own switch for it.

mod chat_form;
mod items;
mod object;
mod store;
mod stream;

use std::sync::Arc;

use http::request::Parts;
use http::{Method, StatusCode};
use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;

pub(crate) use self::object::complete_response;
pub(crate) use self::store::ResponseStore;
pub(crate) use self::stream::ResponsesStream;

use self::store::StoredResponse;
use super::response::{self, SimRejection, SimResponse};
use super::stats::unix_ms;
use super::{SimEngineState, SimProtocol, api_vllm};

type Members = Map<String, Value>;

/// Beginning of every path of this API.
pub(crate) const PATH: &str = "/v1/responses";

/// A request, with what its response repeats and what is stored with it.
#[derive(Debug)]
pub(crate) struct ResponsesRequest {
    protocol: SimProtocol,
    pub(crate) id: String,
    created: u64,
    body: Members,
    /// The conversation before this response: vLLM's chat messages, SGLang's items.
    history: Vec<Value>,
    store: Option<Arc<ResponseStore>>,
    context_tokens: usize,
}

impl ResponsesRequest {
    /// Parses a body. Returns the request and the equal chat completion.
    pub(crate) fn parse(
        engine: &SimEngineState,
        body: Members,
    ) -> Result<(Arc<Self>, Members), SimRejection> {
        let protocol = engine.options.protocol;
        let store = engine.options.response_store.then_some(&engine.response_store);
        check_stored(protocol, store.is_some(), &body)?;
        check_model(engine, &body)?;
        let previous = previous_response(protocol, store, &body)?;
        let history = chat_form::history(protocol, previous.as_ref(), &body)?;
        let id = body.get("request_id").and_then(Value::as_str).map(str::to_owned);
        let id = id.unwrap_or_else(|| items::new_id(protocol, "resp"));
        let mut chat = chat_form::chat_form(protocol, &history, &body)?;
        chat.insert("rid".to_owned(), json!(id));
        let stores = body.get("store").and_then(Value::as_bool).unwrap_or(true);
        let request = Self {
            protocol,
            id,
            created: unix_ms() / 1_000,
            history,
            store: store.filter(|_| stores).cloned(),
            context_tokens: engine.options.context_tokens,
            body,
        };
        Ok((Arc::new(request), chat))
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.body.get(name)?.as_str()
    }

    fn flag(&self, name: &str) -> bool {
        self.body.get(name).and_then(Value::as_bool).unwrap_or(false)
    }

    /// Whether the client does not wait for the response. With `stream` it does.
    pub(crate) fn is_in_background(&self) -> bool {
        self.flag("background") && !self.flag("stream")
    }

    /// Stores a response that is queued, for later retrieval, and returns it.
    pub(crate) fn store_queued(&self, model: &str, cancel: CancellationToken) -> Value {
        let queued = self.object(model, "queued", Vec::new(), None);
        if let Some(store) = &self.store {
            let (response, history) = (queued.clone(), self.history.clone());
            store.insert(&self.id, StoredResponse { response, history, cancel: Some(cancel) });
        }
        queued
    }

    /// Stores a finished response, if the request allows it.
    pub(crate) fn store_finished(&self, response: &Value) {
        if let Some(store) = &self.store {
            let (response, history) = (response.clone(), self.history.clone());
            store.insert(&self.id, StoredResponse { response, history, cancel: None });
        }
    }

    /// Marks a stored response as failed.
    pub(crate) fn store_failed(&self) {
        if let Some(store) = &self.store {
            store.set_status(&self.id, "failed");
        }
    }
}

fn invalid(param: &'static str, message: impl Into<String>) -> SimRejection {
    SimRejection::invalid_request(StatusCode::BAD_REQUEST, param, message)
}

fn not_found(id: &str) -> SimRejection {
    let message = format!("Response with id '{id}' not found.");
    SimRejection::invalid_request(StatusCode::NOT_FOUND, "response_id", message)
}

fn store_disabled(param: &'static str) -> SimRejection {
    let message = "Response store is disabled. Stateful Responses require --enable-response-store on a standalone \
                   server; response storage is unavailable in PD mode.";
    invalid(param, message)
}

/// Rejects members that need a store without one. vLLM ignores `store` and finds no previous response.
fn check_stored(protocol: SimProtocol, has_store: bool, body: &Members) -> Result<(), SimRejection> {
    let flag = |name: &str| body.get(name).and_then(Value::as_bool);
    let is_background = flag("background").unwrap_or(false);
    let stores = flag("store").unwrap_or(true);
    let has_previous = body.get("previous_response_id").is_some_and(|id| !id.is_null());
    match protocol {
        SimProtocol::Sglang if !has_store && has_previous => Err(store_disabled("previous_response_id")),
        SimProtocol::Sglang if !has_store && is_background => Err(store_disabled("background")),
        SimProtocol::Sglang if is_background && !stores => {
            Err(invalid("store", "background=true requires store=true."))
        }
        SimProtocol::Vllm if is_background && !stores => {
            Err(SimRejection::invalid_body("background", "background can only be used when `store` is true"))
        }
        SimProtocol::Vllm if !has_store && is_background => Err(invalid(
            "background",
            "This vLLM engine does not support `store=True` and therefore does not support the background mode. To \
             enable these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching \
             the vLLM server.",
        )),
        _ => Ok(()),
    }
}

fn check_model(engine: &SimEngineState, body: &Members) -> Result<(), SimRejection> {
    let model = body.get("model").and_then(Value::as_str);
    match (api_vllm::check_model(engine, model), engine.options.protocol) {
        (Err(_), SimProtocol::Sglang) => {
            let message = format!("The model '{}' does not exist", model.unwrap_or_default());
            Err(SimRejection::invalid_request(StatusCode::NOT_FOUND, "model", message))
        }
        (checked, _) => checked,
    }
}

fn previous_response(
    protocol: SimProtocol,
    store: Option<&Arc<ResponseStore>>,
    body: &Members,
) -> Result<Option<StoredResponse>, SimRejection> {
    let Some(id) = body.get("previous_response_id").and_then(Value::as_str) else { return Ok(None) };
    check_id(protocol, id)?;
    store.and_then(|store| store.get(id)).map(Some).ok_or_else(|| not_found(id))
}

fn check_id(protocol: SimProtocol, id: &str) -> Result<(), SimRejection> {
    if protocol == SimProtocol::Sglang && !id.starts_with("resp_") {
        let message = format!("Invalid 'response_id': '{id}'. Expected an ID that begins with 'resp'.");
        return Err(invalid("response_id", message));
    }
    Ok(())
}

/// Handles the paths below [`PATH`]: retrieval and cancellation.
pub(crate) fn dispatch(engine: &SimEngineState, parts: &Parts) -> Option<SimResponse> {
    let rest = parts.uri.path().strip_prefix(PATH)?.strip_prefix('/')?;
    let (id, cancels) = match (rest.strip_suffix("/cancel"), &parts.method) {
        (Some(id), &Method::POST) => (id, true),
        (None, &Method::GET) => (rest, false),
        _ => return None,
    };
    if id.is_empty() || id.contains('/') {
        return None;
    }
    let protocol = engine.options.protocol;
    let found = find(engine, id).and_then(|stored| {
        if !cancels {
            return Ok(stored.response);
        }
        let is_running = matches!(stored.status(), "queued" | "in_progress");
        match protocol {
            SimProtocol::Vllm if !is_running => {
                Err(invalid("response_id", "Cannot cancel a synchronous response."))
            }
            _ if !is_running => Ok(stored.response),
            _ => {
                if let Some(cancel) = &stored.cancel {
                    cancel.cancel();
                }
                engine.response_store.set_status(id, "cancelled").ok_or_else(|| not_found(id))
            }
        }
    });
    Some(match found {
        Ok(response) => response::json_ok(&response),
        Err(rejection) => reject(protocol, &rejection),
    })
}

fn find(engine: &SimEngineState, id: &str) -> Result<StoredResponse, SimRejection> {
    let protocol = engine.options.protocol;
    if protocol == SimProtocol::Sglang && !engine.options.response_store {
        return Err(store_disabled("response_id"));
    }
    check_id(protocol, id)?;
    engine.response_store.get(id).ok_or_else(|| not_found(id))
}

/// An error of this API. SGLang nests it, as `OpenAI` does and as its other endpoints do not.
pub(crate) fn reject(protocol: SimProtocol, rejection: &SimRejection) -> SimResponse {
    match protocol {
        SimProtocol::Vllm => response::rejection(protocol, rejection),
        SimProtocol::Sglang => {
            let SimRejection { status, param, message, .. } = rejection;
            let kind =
                if status.is_server_error() { "Internal Server Error" } else { "invalid_request_error" };
            let error = json!({"message": message, "type": kind, "param": param, "code": status.as_u16()});
            response::json_with(*status, &json!({"error": error}))
        }
    }
}
