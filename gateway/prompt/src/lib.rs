//! From a request body to the token ids that the engine will see.
//!
//! A router that knows where KV cache is must know the prompt's tokens before it chooses an engine. This crate does what the engine
//! does with a request: it reads the body, prepares the messages as vLLM or SGLang prepares them, renders the model's chat template
//! and tokenises the text. What it cannot know exactly it refuses with a reason ([`Unpredictable`]); a wrong guess would cost a cache
//! hit, never a wrong answer, because the engine always gets the client's own bytes.
//!
//! Enter at [`Model`]: [`Model::load`] once, [`Model::read_chat`] and [`Model::tokens_of_chat`] per request, [`Model::remember`] when the caller has computed
//! what it wants to keep with the conversation.

mod bodies;
mod body;
mod caches;
mod chat;
mod conversation;
mod engine;
mod error;
mod files;
mod model;
mod prompt;
mod registry;
mod template;
mod tokenize;

pub use body::{ChatBody, TextBody, TextPrompt};
pub use caches::PromptCaches;
pub use engine::{ContentFormat, Engine};
pub use error::{LoadError, Unpredictable};
pub use model::{Limits, Model};
pub use prompt::{Ids, Prompt};
pub use registry::{Registry, Source};
pub use template::Now;
#[doc(hidden)]
pub use template::render_template;
