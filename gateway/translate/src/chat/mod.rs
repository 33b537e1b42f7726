//! Chat completions: the members of requests that are written, and of responses that are read.

mod completion;
mod events;
mod request;

pub(crate) use completion::{ChatChunk, ChatCompletion, ChatOutput, ChatToolCall, ChatUsage};
pub(crate) use events::payloads;
pub(crate) use request::{
    AssistantMessage, ChatContent, ChatFunctionCall, ChatImageUrl, ChatMessage, ChatPart,
    ChatRequestToolCall, ToolMessage,
};
