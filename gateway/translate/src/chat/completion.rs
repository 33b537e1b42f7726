//! Responses and chunks of chat completions, as vLLM 0.32 and SGLang 0.5.23 send them. Unknown members are ignored.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::error::StreamFailure;

/// A complete response.
#[derive(Debug, Deserialize)]
pub(crate) struct ChatCompletion<'a> {
    #[serde(default)]
    pub(crate) id: String,
    #[serde(default)]
    pub(crate) model: String,
    #[serde(borrow)]
    pub(crate) choices: Vec<ChatChoice<'a>>,
    pub(crate) usage: Option<ChatUsage>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ChatChoice<'a> {
    #[serde(borrow)]
    pub(crate) message: ChatOutput<'a>,
    pub(crate) finish_reason: Option<String>,
    /// SGLang's name for the matched stop string, or for the id of a stop token.
    pub(crate) matched_stop: Option<Value>,
    /// vLLM's name for the same.
    pub(crate) stop_reason: Option<Value>,
}

/// One event of a stream.
#[derive(Debug, Deserialize)]
pub(crate) struct ChatChunk<'a> {
    #[serde(default)]
    pub(crate) id: String,
    #[serde(default)]
    pub(crate) model: String,
    #[serde(borrow)]
    pub(crate) choices: Vec<ChatChunkChoice<'a>>,
    pub(crate) usage: Option<ChatUsage>,
    error: Option<IgnoredAny>,
}

impl<'a> ChatChunk<'a> {
    /// Reads the payload of an event.
    pub(crate) fn read(payload: &'a str) -> Result<Self, StreamFailure> {
        let chunk = serde_json::from_str::<Self>(payload);
        if let Ok(chunk) = chunk
            && chunk.error.is_none()
        {
            return Ok(chunk);
        }
        Err(EngineError::read(payload).map_or_else(
            || StreamFailure::Malformed("an event is not a chunk".to_owned()),
            |error| StreamFailure::Engine { status: error.status, message: error.message },
        ))
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct ChatChunkChoice<'a> {
    #[serde(default)]
    pub(crate) index: u32,
    #[serde(borrow, default)]
    pub(crate) delta: ChatOutput<'a>,
    pub(crate) finish_reason: Option<String>,
    pub(crate) matched_stop: Option<Value>,
    pub(crate) stop_reason: Option<Value>,
}

/// A message, or the part that a chunk adds to it.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct ChatOutput<'a> {
    pub(crate) content: Option<String>,
    /// SGLang's name for the reasoning.
    pub(crate) reasoning_content: Option<String>,
    /// vLLM's name for the same.
    pub(crate) reasoning: Option<String>,
    pub(crate) refusal: Option<String>,
    #[serde(borrow)]
    pub(crate) tool_calls: Option<Vec<ChatToolCall<'a>>>,
}

impl ChatOutput<'_> {
    /// The reasoning, if there is any.
    pub(crate) fn take_reasoning(&mut self) -> Option<String> {
        self.reasoning_content.take().or(self.reasoning.take()).filter(|text| !text.is_empty())
    }

    /// The visible text, if there is any. A refusal is text that the model wrote instead.
    pub(crate) fn take_text(&mut self) -> Option<String> {
        let text = self.content.take().filter(|text| !text.is_empty());
        text.or(self.refusal.take()).filter(|text| !text.is_empty())
    }
}

/// A tool call, or the part that a chunk adds to it.
#[derive(Debug, Deserialize)]
pub(crate) struct ChatToolCall<'a> {
    pub(crate) index: Option<u32>,
    pub(crate) id: Option<String>,
    #[serde(borrow)]
    pub(crate) function: Option<ChatFunction<'a>>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ChatFunction<'a> {
    pub(crate) name: Option<String>,
    /// JSON in a string; SGLang also allows the object itself.
    #[serde(borrow)]
    pub(crate) arguments: Option<&'a RawValue>,
}

impl ChatFunction<'_> {
    /// The arguments, or a fragment of them, as JSON text.
    pub(crate) fn arguments(&self) -> Result<String, serde_json::Error> {
        match self.arguments.map(RawValue::get) {
            None | Some("null") => Ok(String::new()),
            Some(text) if text.starts_with('"') => serde_json::from_str(text),
            Some(json) => Ok(json.to_owned()),
        }
    }
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub(crate) struct ChatUsage {
    pub(crate) prompt_tokens: Option<u64>,
    pub(crate) completion_tokens: Option<u64>,
    pub(crate) prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub(crate) struct PromptTokensDetails {
    pub(crate) cached_tokens: Option<u64>,
    /// Tokens that this request added to the cache, which vLLM reports.
    pub(crate) created_cache_tokens: Option<u64>,
}

/// An error in place of a chunk.
#[derive(Debug)]
struct EngineError {
    message: String,
    /// The HTTP status that the engine would have sent before the stream began.
    status: Option<u64>,
}

impl EngineError {
    /// The error in `payload`, if it is one: `{"error": {…}}`, or with `"object": "error"` the object itself.
    fn read(payload: &str) -> Option<Self> {
        let envelope: Value = serde_json::from_str(payload).ok()?;
        let error = match envelope.get("error") {
            Some(error) if !error.is_null() => error,
            _ if envelope.get("object")? == "error" => &envelope,
            _ => return None,
        };
        let message = error.get("message").unwrap_or(error);
        Some(Self {
            message: message.as_str().map_or_else(|| message.to_string(), str::to_owned),
            status: error.get("code").and_then(Value::as_u64),
        })
    }
}
