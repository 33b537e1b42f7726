//! Converts requests of OpenAI's Responses API to chats.

mod sglang;
mod vllm;

use minijinja::Value;
use serde::de::{Error as _, IgnoredAny};
use serde::{Deserialize, Deserializer};

use super::messages::{items, kind_of};
use super::rules::TemplateRules;
use crate::api::ConversationApi;
use crate::body::{ChatBody, malformed};
use crate::dialect::PromptDialect;
use crate::error::PromptError;

/// Members of a `/v1/responses` body that determine the prompt.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct ResponsesBody {
    pub(crate) input: ResponsesInput,
    #[serde(default)]
    instructions: Option<String>,
    #[serde(default)]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    tool_choice: Option<Value>,
    #[serde(default)]
    reasoning: Option<Value>,
    #[serde(default)]
    chat_template_kwargs: Option<Value>,
    #[serde(default = "default_truncation")]
    truncation: Option<String>,
    #[serde(default)]
    max_output_tokens: Option<f64>,
    #[serde(default)]
    previous_response_id: Option<IgnoredAny>,
    #[serde(default)]
    conversation: Option<IgnoredAny>,
    #[serde(default)]
    prompt: Option<IgnoredAny>,
    #[serde(default)]
    previous_input_messages: Option<IgnoredAny>,
    /// Size of the body in bytes.
    #[serde(skip)]
    pub(crate) bytes: usize,
}

/// The input: a user's text, or items.
#[derive(Debug, Clone)]
pub(crate) enum ResponsesInput {
    Text(String),
    Items(Vec<Value>),
}

impl<'de> Deserialize<'de> for ResponsesInput {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ResponsesInput, D::Error> {
        let input = Value::deserialize(deserializer)?;
        match input.as_str() {
            Some(text) => Ok(ResponsesInput::Text(text.to_owned())),
            None => items(&input, "input").map(ResponsesInput::Items).map_err(D::Error::custom),
        }
    }
}

impl Default for ResponsesInput {
    fn default() -> ResponsesInput {
        ResponsesInput::Items(Vec::new())
    }
}

/// The default of the API. Null differs from it.
#[expect(clippy::unnecessary_wraps, reason = "the member can also be null")]
fn default_truncation() -> Option<String> {
    Some(NO_TRUNCATION.to_owned())
}

const NO_TRUNCATION: &str = "disabled";

impl ResponsesBody {
    /// Parses a body.
    ///
    /// # Errors
    /// [`PromptError::EngineState`] if it continues turns that only the engine has.
    pub(crate) fn parse(body: &[u8]) -> Result<ResponsesBody, PromptError> {
        let read: ResponsesBody = serde_json::from_slice(body).map_err(malformed)?;
        for (given, name) in [
            (read.previous_response_id.is_some(), "previous_response_id"),
            (read.conversation.is_some(), "conversation"),
            (read.prompt.is_some(), "prompt"),
        ] {
            if given {
                return Err(PromptError::EngineState(name));
            }
        }
        if read.previous_input_messages.is_some() {
            return Err(PromptError::UnsupportedMember("previous_input_messages"));
        }
        Ok(ResponsesBody { bytes: body.len(), ..read })
    }

    /// The chat that `engine` converts it to.
    pub(crate) fn to_chat(
        &self,
        engine: PromptDialect,
        rules: &TemplateRules<'_>,
    ) -> Result<ChatBody, PromptError> {
        let chat = match engine {
            PromptDialect::Vllm => vllm::convert(self)?,
            PromptDialect::Sglang => sglang::convert(self, rules.merges_systems)?,
        };
        Ok(ChatBody { api: ConversationApi::Responses, bytes: self.bytes, ..chat })
    }

    /// The system prompt; `None` if it is empty.
    fn instructions(&self) -> Option<&str> {
        self.instructions.as_deref().filter(|text| !text.is_empty())
    }
}

/// The type of an item. A message may omit it.
fn item_kind(item: &Value) -> String {
    kind_of(item).unwrap_or_else(|| "message".to_owned())
}

/// The parts of a message's content; `None` for a text.
fn content_parts(content: &Value) -> Result<Option<Vec<Value>>, PromptError> {
    if content.as_str().is_some() { Ok(None) } else { items(content, "content").map(Some) }
}
