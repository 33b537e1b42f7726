//! `/tokenize` and vLLM's `…/render`: the tokens that a prompt or a conversation would have.

use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};

use super::request::{GenerationEndpoint, GenerationRequest, chat_prompt};
use super::response::{self, SimRejection, SimResponse};
use super::tokens::tokens_of_text;
use super::{SimEngineState, SimProtocol};

/// Most prompts of one request (SGLang).
const MAX_PROMPTS: usize = 2_048;

/// Answers with the simulator's own tokens.
pub(crate) fn tokenize(engine: &SimEngineState, body: &Bytes) -> SimResponse {
    let face = engine.options.protocol;
    match tokens(face, body) {
        Ok((count, tokens)) => {
            let mut answer =
                json!({"count": count, "max_model_len": engine.options.context_tokens, "tokens": tokens});
            if face == SimProtocol::Vllm {
                answer["token_strs"] = Value::Null;
            }
            response::json_ok(&answer)
        }
        Err(refused) => response::rejection(face, &refused),
    }
}

/// Answers with the requests that vLLM's engine would get. Like vLLM's own, they are switched on apart.
pub(crate) fn render(engine: &SimEngineState, api: GenerationEndpoint, body: &Bytes) -> SimResponse {
    let face = engine.options.protocol;
    if !engine.options.scale_out {
        let message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out";
        let kind = "ForbiddenError";
        return response::rejection(
            face,
            &SimRejection { status: StatusCode::FORBIDDEN, kind, message: message.to_owned() },
        );
    }
    let ask = match GenerationRequest::parse(api, body) {
        Ok(ask) => ask,
        Err(refused) => return response::rejection(face, &refused),
    };
    let mut requests = ask.prompts.iter().map(|prompt| {
        json!({
            "request_id": format!("cmpl-{}", response::hex_id()), "token_ids": **prompt, "token_offsets": null,
            "features": null, "content_parts": null, "sampling_params": {"max_tokens": ask.max_tokens, "n": ask.n},
            "model": engine.options.model, "stream": ask.stream, "priority": 0, "cache_salt": ask.body.get("cache_salt"),
        })
    });
    response::json_ok(&match api {
        GenerationEndpoint::Chat => requests.next().unwrap_or_default(),
        GenerationEndpoint::Completion | GenerationEndpoint::Generate => requests.collect(),
    })
}

/// `count` and `tokens`; both are lists if SGLang got several prompts.
fn tokens(face: SimProtocol, body: &[u8]) -> Result<(Value, Value), SimRejection> {
    let missing = || SimRejection::bad_request("prompt or messages: Field required");
    let body: Value = serde_json::from_slice(body)
        .map_err(|error| SimRejection::bad_request(format!("JSON decode error: {error}")))?;
    match (body.get("prompt"), body.as_object()) {
        (Some(Value::String(prompt)), _) => Ok(counted(&tokens_of_text(prompt))),
        (Some(Value::Array(prompts)), _) if face == SimProtocol::Sglang && prompts.len() <= MAX_PROMPTS => {
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
        let read = |face, body: &str| tokens(face, body.as_bytes());
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
        for bad in ["{}", "[]", "{", r#"{"prompt":7}"#] {
            assert!(read(SimProtocol::Sglang, bad).is_err(), "{bad}");
        }
    }
}
