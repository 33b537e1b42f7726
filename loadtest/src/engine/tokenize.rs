//! `/tokenize` and vLLM's `…/render`: the tokens of a prompt or a conversation.

use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};

use super::chat_prompt::chat_prompt;
use super::request::{GenerationEndpoint, GenerationRequest, json_object};
use super::response::{self, SimRejection, SimResponse};
use super::tokens::{token_text, tokens_of_text};
use super::{SimEngineState, SimProtocol};

/// Maximum number of prompts per request (SGLang).
const MAX_PROMPTS: usize = 2_048;

/// Responds with the simulator's own tokens.
pub(crate) fn tokenize(engine: &SimEngineState, body: &Bytes) -> SimResponse {
    let protocol = engine.options.protocol;
    match tokens(protocol, body) {
        Ok((count, tokens)) => {
            let mut result =
                json!({"count": count, "max_model_len": engine.options.context_tokens, "tokens": tokens});
            if protocol == SimProtocol::Vllm {
                result["token_strs"] = Value::Null;
            }
            response::json_ok(&result)
        }
        Err(rejection) => response::rejection(protocol, &rejection),
    }
}

/// Responds with the requests that vLLM's engine would get. As with vLLM, the endpoint has a switch of its own.
pub(crate) fn render(engine: &SimEngineState, api: GenerationEndpoint, body: &Bytes) -> SimResponse {
    let protocol = engine.options.protocol;
    if !engine.options.scale_out {
        let message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out";
        let kind = "ForbiddenError";
        return response::rejection(
            protocol,
            &SimRejection { status: StatusCode::FORBIDDEN, kind, param: None, message: message.to_owned() },
        );
    }
    let parsed = match GenerationRequest::of_call(engine, api, body) {
        Ok(parsed) => parsed,
        Err(rejection) => return response::rejection(protocol, &rejection),
    };
    let mut requests = parsed.prompts.iter().map(|prompt| {
        json!({
            "request_id": format!("cmpl-{}", response::hex_id()), "token_ids": **prompt, "token_offsets": null,
            "features": null, "content_parts": null, "sampling_params": {"max_tokens": parsed.max_tokens, "n": parsed.n},
            "model": engine.options.model, "stream": parsed.stream, "priority": 0, "cache_salt": parsed.body.get("cache_salt"),
        })
    });
    response::json_ok(&match api {
        GenerationEndpoint::Completion | GenerationEndpoint::Generate => requests.collect(),
        _ => requests.next().unwrap_or_default(),
    })
}

/// Responds with a text for token ids. Tokens are hashes, so it is not the text of which they are the tokens.
pub(crate) fn detokenize(engine: &SimEngineState, body: &Bytes) -> SimResponse {
    let protocol = engine.options.protocol;
    match texts(protocol, body) {
        Ok(text) => {
            let name = if protocol == SimProtocol::Vllm { "prompt" } else { "text" };
            response::json_ok(&json!({ name: text }))
        }
        Err(rejection) => response::rejection(protocol, &rejection),
    }
}

/// One text, or a list of them if SGLang got several lists of ids.
fn texts(protocol: SimProtocol, body: &[u8]) -> Result<Value, SimRejection> {
    let body = json_object(body)?;
    let invalid = || SimRejection::invalid_body("tokens", "Field required, a list of token ids");
    let of = |ids: &[Value]| -> Result<String, SimRejection> {
        ids.iter().map(|id| id.as_u64().map(token_text).ok_or_else(invalid)).collect()
    };
    match body.get("tokens").and_then(Value::as_array).map(Vec::as_slice) {
        Some(lists @ [Value::Array(_), ..]) if protocol == SimProtocol::Sglang => {
            let each = lists.iter().map(|list| list.as_array().ok_or_else(invalid).and_then(|ids| of(ids)));
            each.collect::<Result<Vec<String>, _>>().map(|texts| json!(texts))
        }
        Some(ids) => of(ids).map(Value::String),
        None => Err(invalid()),
    }
}

/// `count` and `tokens`; both are lists if SGLang got several prompts.
fn tokens(protocol: SimProtocol, body: &[u8]) -> Result<(Value, Value), SimRejection> {
    let missing = || SimRejection::bad_request("prompt or messages: Field required");
    let body: Value = serde_json::from_slice(body)
        .map_err(|error| SimRejection::bad_request(format!("JSON decode error: {error}")))?;
    match (body.get("prompt"), body.as_object()) {
        (Some(Value::String(prompt)), _) => Ok(counted(&tokens_of_text(prompt))),
        (Some(Value::Array(prompts)), _)
            if protocol == SimProtocol::Sglang && prompts.len() <= MAX_PROMPTS =>
        {
            let each = prompts.iter().map(|prompt| prompt.as_str().ok_or_else(missing));
            let counted: Result<(Vec<Value>, Vec<Value>), SimRejection> =
                each.map(|prompt| prompt.map(|prompt| counted(&tokens_of_text(prompt)))).collect();
            counted.map(|(counts, tokens)| (json!(counts), json!(tokens)))
        }
        (None, Some(chat)) => Ok(counted(&chat_prompt(chat)?.0)),
        _ => Err(missing()),
    }
}

fn counted(tokens: &[u32]) -> (Value, Value) {
    (json!(tokens.len()), json!(tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_conversations_and_lists_are_counted() {
        let read = |protocol, body: &str| tokens(protocol, body.as_bytes());
        let expected = tokens_of_text("abcdefgh");
        assert_eq!(read(SimProtocol::Vllm, r#"{"prompt":"abcdefgh"}"#).unwrap(), (json!(2), json!(expected)));
        let list = r#"{"model":"m","prompt":["abcdefgh","abcd"]}"#;
        assert_eq!(read(SimProtocol::Sglang, list).unwrap().0, json!([2, 1]));
        assert!(read(SimProtocol::Vllm, list).is_err());
        let chat = r#"{"messages":[{"role":"user","content":"abcdefgh"}]}"#;
        let (_, tokens) = read(SimProtocol::Vllm, chat).unwrap();
        let rendered =
            chat_prompt(serde_json::from_str::<Value>(chat).unwrap().as_object().unwrap()).unwrap().0;
        assert_eq!(tokens, json!(*rendered));
        let ids = |body: &str| texts(SimProtocol::Sglang, body.as_bytes());
        let (one, two) = (token_text(1), token_text(2));
        assert_eq!(ids(r#"{"tokens":[1,2]}"#).unwrap(), json!(format!("{one}{two}")));
        assert_eq!(ids(r#"{"tokens":[[1],[2]]}"#).unwrap(), json!([one, two]));
        assert!(ids(r#"{"tokens":["a"]}"#).is_err() && ids("{}").is_err());
        for bad in ["{}", "[]", "{", r#"{"prompt":7}"#] {
            assert!(read(SimProtocol::Sglang, bad).is_err(), "{bad}");
        }
    }
}
