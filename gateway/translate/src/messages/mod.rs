//! Anthropic's Messages API.

mod content;
mod events;
mod image;
mod request;
mod response;
mod stop;
mod stream;
mod tool_result;
mod tools;

pub use request::{messages_to_chat, messages_to_chat_with};
pub use response::chat_to_messages;
pub use stream::ChatStreamToMessages;
