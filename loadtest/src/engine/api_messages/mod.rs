//! Anthropic's Messages, as both engines serve it: by conversion to and from a chat completion.

mod chat_form;
mod render;

use serde_json::{Value, json};

pub(crate) use self::chat_form::chat_form;
pub(crate) use self::render::{MessagesStream, complete_response};

use super::chat_prompt::chat_prompt;
use super::request::json_object;
use super::response::{self, INVALID_BODY, SimRejection, SimResponse};
use super::{SimEngineState, SimProtocol, api_vllm};

/// `/v1/messages/count_tokens`: the prompt's length, without computing it.
pub(crate) fn count_tokens(engine: &SimEngineState, body: &[u8]) -> SimResponse {
    let protocol = engine.options.protocol;
    let counted = || {
        let mut body = json_object(body)?;
        // The engines' own conversion needs a limit, which counting ignores.
        body.entry("max_tokens").or_insert(json!(1));
        let chat = chat_form(protocol, &body)?;
        if protocol == SimProtocol::Vllm {
            api_vllm::check_model(engine, chat.get("model").and_then(Value::as_str))?;
        }
        Ok(chat_prompt(&chat)?.0.len())
    };
    match (counted(), protocol) {
        (Ok(tokens), SimProtocol::Sglang) => response::json_ok(&json!({"input_tokens": tokens})),
        (Ok(tokens), SimProtocol::Vllm) => response::json_ok(
            &json!({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}),
        ),
        (Err(rejection), _) => reject(protocol, &rejection),
    }
}

/// An error in Anthropic's format, with the types that each engine uses. vLLM validates bodies before its handler and
/// rejects them in `OpenAI`'s format.
pub(crate) fn reject(protocol: SimProtocol, rejection: &SimRejection) -> SimResponse {
    if protocol == SimProtocol::Vllm && rejection.kind == INVALID_BODY {
        return response::rejection(protocol, rejection);
    }
    let (kind, message) = match protocol {
        SimProtocol::Vllm => (rejection.kind, rejection.message.as_str()),
        // SGLang hides the causes of its own failures.
        SimProtocol::Sglang if rejection.status.is_server_error() => ("api_error", "Internal server error"),
        SimProtocol::Sglang => {
            let kind = if rejection.kind == "BadRequest" { rejection.kind } else { "invalid_request_error" };
            (kind, rejection.message.as_str())
        }
    };
    response::json_with(rejection.status, &error_value(kind, message))
}

fn error_value(kind: &str, message: &str) -> Value {
    json!({"type": "error", "error": {"type": kind, "message": message}})
}
