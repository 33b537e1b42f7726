//! `/tokenize` and vLLM's `…/render`: the tokens that a prompt or a conversation would have.

use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};

use super::ask::{Api, Ask, chat_prompt};
use super::reply::{self, Refusal, Reply};
use super::tokens::tokens_of_text;
use super::{Engine, Face};

/// Most prompts of one request (SGLang).
const MAX_PROMPTS: usize = 2_048;

/// Answers with the simulator's own tokens.
pub(crate) fn answer(engine: &Engine, body: &Bytes) -> Reply {
    let face = engine.config.face;
    match tokens(face, body) {
        Ok((count, tokens)) => {
            let mut answer =
                json!({"count": count, "max_model_len": engine.config.context_tokens, "tokens": tokens});
            if face == Face::Vllm {
                answer["token_strs"] = Value::Null;
            }
            reply::json_ok(&answer)
        }
        Err(refused) => reply::refusal(face, &refused),
    }
}

/// Answers with the requests that vLLM's engine would get. Like vLLM's own, they are switched on apart.
pub(crate) fn render(engine: &Engine, api: Api, body: &Bytes) -> Reply {
    let face = engine.config.face;
    if !engine.config.scale_out {
        let message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out";
        let kind = "ForbiddenError";
        return reply::refusal(
            face,
            &Refusal { status: StatusCode::FORBIDDEN, kind, message: message.to_owned() },
        );
    }
    let ask = match Ask::read(api, body) {
        Ok(ask) => ask,
        Err(refused) => return reply::refusal(face, &refused),
    };
    let mut requests = ask.prompts.iter().map(|prompt| {
        json!({
            "request_id": format!("cmpl-{}", reply::hex_id()), "token_ids": **prompt, "token_offsets": null,
            "features": null, "content_parts": null, "sampling_params": {"max_tokens": ask.max_tokens, "n": ask.n},
            "model": engine.config.model, "stream": ask.stream, "priority": 0, "cache_salt": ask.body.get("cache_salt"),
        })
    });
    reply::json_ok(&match api {
        Api::Chat => requests.next().unwrap_or_default(),
        Api::Completion | Api::Generate => requests.collect(),
    })
}

/// `count` and `tokens`; both are lists if SGLang got several prompts.
fn tokens(face: Face, body: &[u8]) -> Result<(Value, Value), Refusal> {
    let missing = || Refusal::bad_request("prompt or messages: Field required");
    let body: Value = serde_json::from_slice(body)
        .map_err(|error| Refusal::bad_request(format!("JSON decode error: {error}")))?;
    match (body.get("prompt"), body.as_object()) {
        (Some(Value::String(prompt)), _) => Ok(counted(&tokens_of_text(prompt))),
        (Some(Value::Array(prompts)), _) if face == Face::Sglang && prompts.len() <= MAX_PROMPTS => {
            let each = prompts.iter().map(|prompt| prompt.as_str().ok_or_else(missing));
            let counted: Result<(Vec<Value>, Vec<Value>), Refusal> =
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
        assert_eq!(read(Face::Vllm, r#"{"prompt":"abcdefgh"}"#).unwrap(), (json!(2), json!(expected)));
        let list = r#"{"model":"m","prompt":["abcdefgh","abcd"]}"#;
        assert_eq!(read(Face::Sglang, list).unwrap().0, json!([2, 1]));
        assert!(read(Face::Vllm, list).is_err());
        let chat = r#"{"messages":[{"role":"user","content":"abcdefgh"}]}"#;
        let (_, tokens) = read(Face::Vllm, chat).unwrap();
        let rendered =
            chat_prompt(serde_json::from_str::<Value>(chat).unwrap().as_object().unwrap()).unwrap().0;
        assert_eq!(tokens, json!(*rendered));
        for bad in ["{}", "[]", "{", r#"{"prompt":7}"#] {
            assert!(read(Face::Sglang, bad).is_err(), "{bad}");
        }
    }
}
