//! Events of a stream of messages.

use serde::Serialize;

use crate::error::StreamFailure;

use super::stop::{MessageUsage, StopState};

#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum MessageEvent<'a> {
    MessageStart { message: StartedMessage<'a> },
    ContentBlockStart { index: u32, content_block: StartedBlock<'a> },
    ContentBlockDelta { index: u32, delta: BlockDelta<'a> },
    ContentBlockStop { index: u32 },
    MessageDelta { delta: &'a StopState, usage: MessageUsage },
    MessageStop,
    Error { error: ErrorDetail<'a> },
}

#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "message")]
pub(super) struct StartedMessage<'a> {
    pub(super) id: String,
    pub(super) role: &'static str,
    pub(super) model: &'a str,
    pub(super) content: [(); 0],
    pub(super) stop_reason: Option<&'static str>,
    pub(super) stop_sequence: Option<&'static str>,
    pub(super) usage: MessageUsage,
}

#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum StartedBlock<'a> {
    Text { text: &'static str },
    Thinking { thinking: &'static str, signature: &'static str },
    ToolUse { id: &'a str, name: &'a str, input: EmptyInput },
}

/// The arguments follow in deltas.
#[derive(Debug, Serialize)]
pub(super) struct EmptyInput {}

#[derive(Debug, Serialize)]
#[serde(tag = "type")]
pub(super) enum BlockDelta<'a> {
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "input_json_delta")]
    Input { partial_json: &'a str },
}

#[derive(Debug, Serialize)]
pub(super) struct ErrorDetail<'a> {
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) message: &'a str,
}

impl MessageEvent<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
            Self::Error { .. } => "error",
        }
    }

    /// Appends the event to `out`.
    pub(super) fn write(&self, out: &mut Vec<u8>) -> Result<(), StreamFailure> {
        let json =
            serde_json::to_string(self).map_err(|error| StreamFailure::Malformed(error.to_string()))?;
        for part in ["event: ", self.name(), "\ndata: ", &json, "\n\n"] {
            out.extend_from_slice(part.as_bytes());
        }
        Ok(())
    }
}

impl StreamFailure {
    /// The failure as an error event of a stream of messages.
    #[must_use]
    pub fn message_event(&self) -> Vec<u8> {
        let text = self.to_string();
        let (kind, message) = match self {
            Self::Engine { status, message } => (error_type(*status), message.as_str()),
            Self::Malformed(_) | Self::Truncated => ("api_error", text.as_str()),
        };
        let mut out = Vec::new();
        // Two strings are always JSON.
        let _ = MessageEvent::Error { error: ErrorDetail { kind, message } }.write(&mut out);
        out
    }
}

/// Anthropic's type of an error with this HTTP status.
fn error_type(status: Option<u64>) -> &'static str {
    match status {
        Some(400 | 422) => "invalid_request_error",
        Some(401) => "authentication_error",
        Some(403) => "permission_error",
        Some(404) => "not_found_error",
        Some(408 | 504) => "timeout_error",
        Some(413) => "request_too_large",
        Some(429) => "rate_limit_error",
        Some(503 | 529) => "overloaded_error",
        _ => "api_error",
    }
}
