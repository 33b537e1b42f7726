//! Messages of a chat completion's request.

use serde::Serialize;
use serde_json::value::RawValue;

/// What becomes of system messages that are not first in the conversation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum InlineSystem {
    /// They are appended to the first system message. Many chat templates accept no other.
    #[default]
    Merge,
    /// They stay in place, which leaves the prompt's prefix unchanged. For chat templates that accept them.
    Keep,
}

/// Usage at the end, and in each chunk, so that the first event has the number of input tokens.
#[derive(Debug, Serialize)]
pub(crate) struct StreamOptions {
    include_usage: bool,
    continuous_usage_stats: bool,
}

impl StreamOptions {
    pub(crate) const WITH_USAGE: Self = Self { include_usage: true, continuous_usage_stats: true };
}

#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ResponseFormat<'a> {
    JsonSchema { json_schema: JsonSchema<'a> },
}

#[derive(Debug, Serialize)]
pub(crate) struct JsonSchema<'a> {
    pub(crate) name: &'static str,
    pub(crate) schema: &'a RawValue,
    pub(crate) strict: bool,
}

/// One message; a variant per shape, since an absent member is left out.
#[derive(Debug, Serialize)]
#[serde(tag = "role", rename_all = "lowercase")]
pub(crate) enum ChatMessage {
    System { content: ChatContent },
    User { content: ChatContent },
    Assistant(AssistantMessage),
    Tool(ToolMessage),
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct AssistantMessage {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<ChatContent>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ChatRequestToolCall>,
}

/// The result of one tool call, or a part of it.
#[derive(Debug, Serialize)]
pub(crate) struct ToolMessage {
    pub(crate) tool_call_id: String,
    pub(crate) content: ChatContent,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum ChatContent {
    Text(String),
    Parts(Vec<ChatPart>),
}

impl ChatContent {
    /// A single text is sent as a string, which every chat template accepts.
    pub(crate) fn from_parts(mut parts: Vec<ChatPart>) -> Self {
        match parts.pop() {
            Some(ChatPart::Text { text }) if parts.is_empty() => Self::Text(text),
            last => {
                parts.extend(last);
                Self::Parts(parts)
            }
        }
    }
}

#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ChatPart {
    Text {
        text: String,
    },
    ImageUrl {
        image_url: ChatImageUrl,
    },
    /// An extension of SGLang: its chat templates expand the named tool, whose definition is deferred.
    ToolReference {
        name: String,
    },
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatImageUrl {
    pub(crate) url: String,
}

#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "function")]
pub(crate) struct ChatRequestToolCall {
    pub(crate) id: String,
    pub(crate) function: ChatFunctionCall,
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatFunctionCall {
    pub(crate) name: String,
    /// A JSON object, as text.
    pub(crate) arguments: String,
}
