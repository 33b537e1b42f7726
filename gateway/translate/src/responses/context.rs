//! The response object, which repeats the request's settings.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

use crate::chat::ChatUsage;
use crate::json::JsonObject;

use super::items::OutputItem;

/// Members that the response repeats.
const REPEATED: [&str; 13] = [
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "truncation",
    "user",
];

/// Members that every response has, with the API's defaults.
const DEFAULTS: [(&str, DefaultSetting); 5] = [
    ("metadata", DefaultSetting::NoMembers),
    ("parallel_tool_calls", DefaultSetting::Bool(true)),
    ("tool_choice", DefaultSetting::Text("auto")),
    ("tools", DefaultSetting::NoItems),
    ("truncation", DefaultSetting::Text("disabled")),
];

#[derive(Debug, Clone, Copy)]
enum DefaultSetting {
    Bool(bool),
    Text(&'static str),
    NoItems,
    NoMembers,
}

impl Serialize for DefaultSetting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Bool(value) => value.serialize(serializer),
            Self::Text(text) => text.serialize(serializer),
            Self::NoItems => [(); 0].serialize(serializer),
            Self::NoMembers => serializer.serialize_map(Some(0))?.end(),
        }
    }
}

/// The settings of a Responses request that its response repeats.
#[derive(Debug, Clone, Default)]
pub struct ResponsesContext {
    settings: Vec<(&'static str, Box<RawValue>)>,
}

impl ResponsesContext {
    pub(super) fn read(request: &JsonObject<'_>) -> Self {
        let settings = REPEATED.into_iter().filter_map(|name| {
            request.get(name).filter(|value| value.get() != "null").map(|value| (name, value.to_owned()))
        });
        Self { settings: settings.collect() }
    }
}

impl Serialize for ResponsesContext {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (name, value) in &self.settings {
            map.serialize_entry(name, value)?;
        }
        for (name, value) in DEFAULTS {
            if !self.settings.iter().any(|(given, _)| *given == name) {
                map.serialize_entry(name, &value)?;
            }
        }
        map.end()
    }
}

/// A response, complete or not.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) struct ResponseObject<'a> {
    pub(super) id: String,
    pub(super) object: &'static str,
    pub(super) created_at: u64,
    pub(super) status: &'static str,
    pub(super) error: Option<ResponseError<'a>>,
    pub(super) incomplete_details: Option<IncompleteDetails>,
    pub(super) model: &'a str,
    pub(super) output: &'a [OutputItem],
    pub(super) previous_response_id: Option<&'static str>,
    pub(super) store: bool,
    pub(super) usage: Option<ResponseUsage>,
    #[serde(flatten)]
    pub(super) context: &'a ResponsesContext,
}

#[derive(Debug, Serialize)]
pub(super) struct ResponseError<'a> {
    pub(super) code: &'static str,
    pub(super) message: &'a str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct IncompleteDetails {
    pub(super) reason: &'static str,
}

/// How a response ended.
#[derive(Debug, Clone, Copy)]
pub(super) enum ResponseEnd {
    Completed,
    Incomplete(IncompleteDetails),
}

impl ResponseEnd {
    /// `None` for a reason that says that the engine did not finish.
    pub(super) fn of(finish_reason: &str) -> Option<Self> {
        match finish_reason {
            "stop" | "tool_calls" | "function_call" => Some(Self::Completed),
            "length" => Some(Self::Incomplete(IncompleteDetails { reason: "max_output_tokens" })),
            "content_filter" => Some(Self::Incomplete(IncompleteDetails { reason: "content_filter" })),
            _ => None,
        }
    }

    /// The status of the response, and of its last item.
    pub(super) fn status(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Incomplete(_) => "incomplete",
        }
    }

    pub(super) fn incomplete_details(self) -> Option<IncompleteDetails> {
        match self {
            Self::Completed => None,
            Self::Incomplete(details) => Some(details),
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct ResponseUsage {
    input_tokens: u64,
    input_tokens_details: InputTokensDetails,
    output_tokens: u64,
    output_tokens_details: OutputTokensDetails,
    total_tokens: u64,
}

#[derive(Debug, Serialize)]
struct InputTokensDetails {
    cached_tokens: u64,
    cache_write_tokens: u64,
}

#[derive(Debug, Serialize)]
struct OutputTokensDetails {
    reasoning_tokens: u64,
}

impl From<ChatUsage> for ResponseUsage {
    fn from(usage: ChatUsage) -> Self {
        let (input_tokens, output_tokens) =
            (usage.prompt_tokens.unwrap_or(0), usage.completion_tokens.unwrap_or(0));
        let input = usage.prompt_tokens_details.unwrap_or_default();
        let output = usage.completion_tokens_details.unwrap_or_default();
        Self {
            input_tokens,
            input_tokens_details: InputTokensDetails {
                cached_tokens: input.cached_tokens.unwrap_or(0),
                cache_write_tokens: input.created_cache_tokens.unwrap_or(0),
            },
            output_tokens,
            output_tokens_details: OutputTokensDetails {
                reasoning_tokens: output.reasoning_tokens.or(usage.reasoning_tokens).unwrap_or(0),
            },
            total_tokens: input_tokens.saturating_add(output_tokens),
        }
    }
}

/// The id of an item or response: the chat completion's with another prefix.
pub(super) fn derived_id(prefix: &str, chat_id: &str) -> String {
    format!("{prefix}_{}", chat_id.strip_prefix("chatcmpl-").unwrap_or(chat_id))
}
