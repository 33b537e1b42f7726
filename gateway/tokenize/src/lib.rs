//! From a request body to the token ids that the engine will see.
//!
//! A router that knows where KV cache is must know the prompt's tokens before it chooses an engine. This crate does what the engine
//! does with a request: it reads the body, prepares the messages as vLLM or SGLang prepares them, renders the model's chat template
//! and tokenises the text. What it cannot know exactly it refuses with a reason ([`PromptError`]); a wrong guess would cost a cache
//! hit, never a wrong answer, because the engine always gets the client's own bytes.
//!
//! Enter at [`PromptTokenizer`]: [`PromptTokenizer::load`] once, [`PromptTokenizer::read_chat`] and [`PromptTokenizer::tokens_of_chat`] per request, [`PromptTokenizer::remember`] when the caller has computed
//! what it wants to keep with the conversation.

mod body;
mod body_cache;
mod caches;
mod chat;
mod conversation_cache;
mod dialect;
mod error;
mod files;
mod model;
mod prompt;
mod registry;
mod template;
mod tokenize;

pub use body::{ChatBody, TextBody, TextPrompt};
pub use caches::PromptCaches;
pub use dialect::{ContentFormat, PromptDialect};
pub use error::{ModelLoadError, PromptError};
pub use model::{PromptLimits, PromptTokenizer};
pub use prompt::{SharedTokenIds, TokenizedPrompt};
pub use registry::{ModelFolder, TokenizerRegistry};
pub use template::TemplateTime;
#[doc(hidden)]
pub use template::render_template;
