//! Chat completions: the members of requests that are written, and of responses that are read.

mod completion;
mod events;
mod request;
mod stream;
mod tools;

pub(crate) use completion::{ChatCompletion, ChatToolCall, ChatUsage};
pub use request::InlineSystem;
pub(crate) use request::{
    AssistantMessage, ChatContent, ChatFunctionCall, ChatImageUrl, ChatMessage, ChatPart,
    ChatRequestToolCall, JsonSchema, ResponseFormat, StreamOptions, ToolMessage,
};
pub(crate) use stream::{BlockEvent, BlockWriter, ChatStreamFacts, ChatStreamReader};
pub(crate) use tools::{ChatFunctionDefinition, ChatTool, ChatToolChoice, ToolParameters, ToolSettings};
