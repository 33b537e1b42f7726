//! The format of an engine's response: complete events of a stream, token counts, id and finish reasons.

mod agent_fields;
mod events;
mod fields;
mod sse;

pub(crate) use events::ResponseEvents;
pub(crate) use fields::{ResponseFinish, ResponseSummary, TokenUsage};
pub use sse::{SseError, SseFramer};
