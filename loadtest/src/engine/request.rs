//! Parsing of generation requests.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::api_responses::ResponsesRequest;
use super::chat_prompt::{chat_prompt, is_thinking_requested};
use super::response::SimRejection;
use super::tokens::tokens_of_text;
use super::tools::SimToolCall;
use super::{SimEngineState, api_messages};

/// Maximum number of choices per prompt.
const MAX_CHOICES: u64 = 128;
/// Maximum number of prompts per request.
const MAX_PROMPTS: usize = 2_048;
/// Maximum number of output tokens per choice.
const MAX_OUTPUT: u64 = 1_000_000;

/// Endpoint of a generation request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GenerationEndpoint {
    Chat,
    Completion,
    Generate,
    /// Anthropic's Messages.
    Messages,
    /// `OpenAI`'s Responses.
    Responses,
}

#[derive(Debug)]
pub(crate) struct GenerationRequest {
    pub(crate) endpoint: GenerationEndpoint,
    pub(crate) model: Option<String>,
    pub(crate) prompts: Vec<Arc<Vec<u32>>>,
    /// Whether the prompts are a list (`/generate` then responds with a list).
    pub(crate) batched: bool,
    pub(crate) n: u32,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) stop: Vec<String>,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) logprobs: bool,
    /// First prompt token whose log-probability `/generate` returns.
    pub(crate) logprobs_from: Option<usize>,
    pub(crate) return_token_ids: bool,
    pub(crate) tool: Option<SimToolCall>,
    /// Whether the output starts with reasoning.
    pub(crate) thinks: bool,
    pub(crate) rids: Vec<String>,
    /// The body; of Messages and Responses, the equal chat completion.
    pub(crate) body: Map<String, Value>,
    /// The request that a Responses object repeats.
    pub(crate) responses: Option<Arc<ResponsesRequest>>,
}

/// Parses a JSON object. The error is the engine's 400 response.
pub(crate) fn json_object(body: &[u8]) -> Result<Map<String, Value>, SimRejection> {
    let body: Value = serde_json::from_slice(body)
        .map_err(|error| SimRejection::bad_request(format!("JSON decode error: {error}")))?;
    let Value::Object(body) = body else {
        return Err(SimRejection::bad_request("Input should be a valid dictionary"));
    };
    Ok(body)
}

impl GenerationRequest {
    /// Parses the body of an endpoint's call.
    pub(crate) fn of_call(
        engine: &SimEngineState,
        api: GenerationEndpoint,
        body: &[u8],
    ) -> Result<Self, SimRejection> {
        let body = json_object(body)?;
        match api {
            GenerationEndpoint::Messages => {
                Self::parse(api, api_messages::chat_form(engine.options.protocol, &body)?)
            }
            GenerationEndpoint::Responses => {
                let (request, chat) = ResponsesRequest::parse(engine, body)?;
                Ok(Self { responses: Some(request), ..Self::parse(api, chat)? })
            }
            _ => Self::parse(api, body),
        }
    }

    /// Parses a body, of Messages and Responses the equal chat completion. The error is the engine's 400 response.
    pub(crate) fn parse(api: GenerationEndpoint, body: Map<String, Value>) -> Result<Self, SimRejection> {
        let sampling = match api {
            GenerationEndpoint::Generate => {
                body.get("sampling_params").and_then(Value::as_object).cloned().unwrap_or_default()
            }
            _ => body.clone(),
        };
        let (prompts, batched, tool) = match api {
            GenerationEndpoint::Chat | GenerationEndpoint::Messages | GenerationEndpoint::Responses => {
                let (tokens, tool) = chat_prompt(&body)?;
                (vec![tokens], false, tool)
            }
            GenerationEndpoint::Completion => {
                let (prompts, batched) = parse_prompts(body.get("prompt"), "prompt")?;
                (prompts, batched, None)
            }
            GenerationEndpoint::Generate => {
                let (prompts, batched) = match body.get("input_ids").filter(|ids| !ids.is_null()) {
                    Some(ids) => parse_prompts(Some(ids), "input_ids")?,
                    None => parse_prompts(body.get("text"), "text")?,
                };
                (prompts, batched, None)
            }
        };
        let flag = |name: &str| body.get(name).and_then(Value::as_bool).unwrap_or(false);
        let logprobs = match api {
            GenerationEndpoint::Chat => flag("logprobs"),
            GenerationEndpoint::Messages | GenerationEndpoint::Responses => false,
            GenerationEndpoint::Completion => body.get("logprobs").and_then(Value::as_u64).is_some(),
            GenerationEndpoint::Generate => flag("return_logprob"),
        };
        let include_usage = body
            .get("stream_options")
            .and_then(|options| options.get("include_usage"))
            .and_then(Value::as_bool)
            .unwrap_or(false);
        Ok(Self {
            endpoint: api,
            model: body.get("model").and_then(Value::as_str).map(str::to_owned),
            prompts,
            batched,
            n: choices(&sampling)?,
            max_tokens: max_tokens(api, &sampling)?,
            stop: strings(sampling.get("stop")),
            stream: flag("stream"),
            include_usage,
            logprobs,
            logprobs_from: body
                .get("logprob_start_len")
                .and_then(Value::as_u64)
                .and_then(|start| usize::try_from(start).ok()),
            return_token_ids: flag("return_token_ids"),
            tool,
            thinks: !matches!(api, GenerationEndpoint::Completion | GenerationEndpoint::Generate)
                && is_thinking_requested(&body),
            rids: strings(body.get("rid")),
            body,
            responses: None,
        })
    }

    /// Whether the first token must not be the end of the sequence.
    pub(crate) fn forbids_early_end(&self) -> bool {
        self.u32("min_tokens").is_some_and(|tokens| tokens > 0)
            || self.body.get("ignore_eos").and_then(Value::as_bool).unwrap_or(false)
    }

    /// Number of choices over all prompts.
    pub(crate) fn choice_count(&self) -> usize {
        self.prompts.len() * self.n as usize
    }

    /// Prompt and choice number of the `index`-th output.
    pub(crate) fn prompt_and_choice(&self, index: usize) -> (usize, u32) {
        let n = self.n as usize;
        (index / n, u32::try_from(index % n).unwrap_or_default())
    }

    pub(crate) fn u32(&self, name: &str) -> Option<u32> {
        self.body.get(name).and_then(Value::as_u64).and_then(|value| u32::try_from(value).ok())
    }
}

fn strings(value: Option<&Value>) -> Vec<String> {
    match value {
        Some(Value::String(one)) if !one.is_empty() => vec![one.clone()],
        Some(Value::Array(many)) => many.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    }
}

fn choices(sampling: &Map<String, Value>) -> Result<u32, SimRejection> {
    match sampling.get("n").filter(|n| !n.is_null()) {
        None => Ok(1),
        Some(n) => n
            .as_u64()
            .filter(|n| (1..=MAX_CHOICES).contains(n))
            .and_then(|n| u32::try_from(n).ok())
            .ok_or_else(|| {
                SimRejection::bad_request(format!("n must be between 1 and {MAX_CHOICES}, got {n}"))
            }),
    }
}

fn max_tokens(api: GenerationEndpoint, sampling: &Map<String, Value>) -> Result<Option<u32>, SimRejection> {
    let names: &[&str] = match api {
        GenerationEndpoint::Chat => &["max_completion_tokens", "max_tokens"],
        GenerationEndpoint::Completion | GenerationEndpoint::Messages | GenerationEndpoint::Responses => {
            &["max_tokens"]
        }
        GenerationEndpoint::Generate => &["max_new_tokens"],
    };
    for name in names {
        if let Some(value) = sampling.get(*name).filter(|value| !value.is_null()) {
            return value
                .as_u64()
                .filter(|value| (1..=MAX_OUTPUT).contains(value))
                .and_then(|value| u32::try_from(value).ok())
                .map(Some)
                .ok_or_else(|| {
                    SimRejection::bad_request(format!("{name} must be at least 1, got {value}."))
                });
        }
    }
    // Default limits of SGLang and vLLM for completions.
    Ok(match api {
        GenerationEndpoint::Chat | GenerationEndpoint::Messages | GenerationEndpoint::Responses => None,
        GenerationEndpoint::Completion => Some(16),
        GenerationEndpoint::Generate => Some(128),
    })
}

type ParsedPrompts = (Vec<Arc<Vec<u32>>>, bool);

/// A string, token ids, or a list of either.
fn parse_prompts(value: Option<&Value>, name: &str) -> Result<ParsedPrompts, SimRejection> {
    let invalid = || {
        SimRejection::bad_request(format!("{name} must be a non-empty text, token ids, or a list of them"))
    };
    let one = |value: &Value| -> Option<Arc<Vec<u32>>> {
        let tokens = match value {
            Value::String(text) => tokens_of_text(text),
            Value::Array(ids) => token_ids(ids)?,
            _ => return None,
        };
        (!tokens.is_empty()).then(|| Arc::new(tokens))
    };
    match value {
        Some(Value::Array(items)) if items.first().is_some_and(|item| !item.is_number()) => {
            if items.len() > MAX_PROMPTS {
                return Err(SimRejection::bad_request(format!(
                    "at most {MAX_PROMPTS} prompts, got {}",
                    items.len()
                )));
            }
            let prompts: Option<Vec<_>> = items.iter().map(one).collect();
            Ok((prompts.ok_or_else(invalid)?, true))
        }
        Some(value) => Ok((vec![one(value).ok_or_else(invalid)?], false)),
        None => Err(invalid()),
    }
}

fn token_ids(ids: &[Value]) -> Option<Vec<u32>> {
    ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(api: GenerationEndpoint, body: &str) -> Result<GenerationRequest, SimRejection> {
        GenerationRequest::parse(api, json_object(body.as_bytes())?)
    }

    #[test]
    fn all_prompt_formats_are_parsed() {
        let shapes = [
            (r#"{"prompt":"abcdefgh"}"#, 1, false),
            (r#"{"prompt":["abcd","efgh"]}"#, 2, true),
            (r#"{"prompt":[1,2,3]}"#, 1, false),
            (r#"{"prompt":[[1,2],[3]]}"#, 2, true),
        ];
        for (body, prompts, batched) in shapes {
            let request = read(GenerationEndpoint::Completion, body).expect(body);
            assert_eq!((request.prompts.len(), request.batched), (prompts, batched), "{body}");
        }
        for bad in [r#"{"prompt":[]}"#, r#"{"prompt":""}"#, r"{}", r#"{"prompt":[-1]}"#, "[]", "{"] {
            assert!(read(GenerationEndpoint::Completion, bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn token_limits_are_read_per_endpoint() {
        let chat =
            r#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":5,"max_completion_tokens":7}"#;
        assert_eq!(read(GenerationEndpoint::Chat, chat).expect("chat").max_tokens, Some(7));
        let generate = r#"{"text":"hi","sampling_params":{"max_new_tokens":9,"n":2}}"#;
        let request = read(GenerationEndpoint::Generate, generate).expect("generate");
        assert_eq!((request.max_tokens, request.n, request.prompt_and_choice(1)), (Some(9), 2, (0, 1)));
        assert!(read(GenerationEndpoint::Completion, r#"{"prompt":"a","max_tokens":0}"#).is_err());
        assert!(read(GenerationEndpoint::Completion, r#"{"prompt":"a","n":1000}"#).is_err());
    }

    proptest! {
        #[test]
        fn no_body_panics(body in "\\PC{0,80}", name in prop::sample::select(vec!["messages", "prompt", "text", "input_ids", "n", "rid"])) {
            for api in [GenerationEndpoint::Chat, GenerationEndpoint::Completion, GenerationEndpoint::Generate] {
                let _ = read(api, &body);
                let _ = read(api, &format!("{{\"{name}\":{body}}}"));
            }
        }
    }
}
