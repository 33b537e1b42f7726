//! OpenAI's Responses API.

mod context;
mod events;
mod input;
mod items;
mod request;
mod response;
mod stream;
mod tools;

pub use context::ResponsesContext;
pub use request::{ChatForResponses, responses_to_chat};
pub use response::chat_to_responses;
pub use stream::ChatStreamToResponses;
