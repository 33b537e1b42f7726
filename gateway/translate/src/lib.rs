//! Anthropic Messages for engines that lack them: a request is translated to a chat completion, and the response or stream back. Pure:
//! bytes in, bytes out.
//!
//! A request is translated without loss or rejected with the name of the member that a chat completion cannot express
//! ([`Untranslatable`]); hints that no engine follows are dropped. The conversion of Messages follows the one inside SGLang 0.5.23
//! (`sglang/srt/entrypoints/anthropic/serving.py`), so that the same conversation gives the same prompt on either path;
//! `tests/vectors.json` has bodies converted by it.
//!
//! Members that direct KV transfer are passed through like any other unknown member: the caller strips them.

mod chat;
mod error;
mod json;
mod messages;

pub use chat::InlineSystem;
pub use error::{StreamFailure, Untranslatable, UntranslatableResponse};
pub use messages::{ChatStreamToMessages, chat_to_messages, messages_to_chat, messages_to_chat_with};
