//! Why a message ended, and its usage.

use serde::Serialize;
use serde_json::Value;

use crate::chat::ChatUsage;

/// Anthropic's reasons for the end of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct StopState {
    pub(super) stop_reason: &'static str,
    pub(super) stop_sequence: Option<String>,
}

/// How a chat completion ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChatEnd<'a> {
    pub(super) finish_reason: &'a str,
    /// The stop string, or the id of the stop token, at which the engine stopped.
    pub(super) matched_stop: Option<&'a Value>,
    /// Whether tools are called, with complete arguments.
    pub(super) calls_tools: bool,
}

impl ChatEnd<'_> {
    /// `None` for a reason that says that the engine did not finish.
    ///
    /// The end by length comes first, for the last tool call may be incomplete. A stop string counts only if no complete tool call
    /// precedes it, as in vLLM.
    pub(super) fn stop(self) -> Option<StopState> {
        let stop_sequence = self.matched_stop.and_then(Value::as_str).map(str::to_owned);
        let stop_reason = match self.finish_reason {
            "length" => "max_tokens",
            "content_filter" => "refusal",
            "stop" | "tool_calls" | "function_call" if self.calls_tools => "tool_use",
            "stop" | "tool_calls" | "function_call" if stop_sequence.is_some() => {
                return Some(StopState { stop_reason: "stop_sequence", stop_sequence });
            }
            "stop" => "end_turn",
            "tool_calls" | "function_call" => "tool_use",
            _ => return None,
        };
        Some(StopState { stop_reason, stop_sequence: None })
    }
}

/// Anthropic counts cached tokens apart from the other input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(super) struct MessageUsage {
    input_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_creation_input_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_read_input_tokens: Option<u64>,
    output_tokens: u64,
}

impl From<ChatUsage> for MessageUsage {
    fn from(usage: ChatUsage) -> Self {
        let details = usage.prompt_tokens_details.unwrap_or_default();
        let cached =
            details.cached_tokens.unwrap_or(0).saturating_add(details.created_cache_tokens.unwrap_or(0));
        Self {
            input_tokens: usage.prompt_tokens.unwrap_or(0).saturating_sub(cached),
            cache_creation_input_tokens: details.created_cache_tokens,
            cache_read_input_tokens: details.cached_tokens,
            output_tokens: usage.completion_tokens.unwrap_or(0),
        }
    }
}

impl MessageUsage {
    /// At the start of a stream nothing has been generated.
    pub(super) fn without_output(self) -> Self {
        Self { output_tokens: 0, ..self }
    }
}

/// The message id of a chat completion's id.
pub(super) fn message_id(chat_id: &str) -> String {
    format!("msg_{}", chat_id.strip_prefix("chatcmpl-").unwrap_or(chat_id))
}
