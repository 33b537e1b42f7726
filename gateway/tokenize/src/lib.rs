//! Converts a request body to the token ids that the engine computes.
//!
//! A KV-cache-aware router needs the prompt's tokens before it selects an engine. This crate reproduces the engine's processing of a
//! request: it parses the body, prepares the messages as vLLM or SGLang does, renders the model's chat template and tokenizes the text.
//! Requests that it cannot reproduce exactly are rejected with a reason ([`PromptError`]). An error here could only cost a cache hit, never
//! change a response, because the engine always receives the client's own bytes.
//!
//! Entry point: [`PromptTokenizer`], with [`PromptTokenizer::load`] once, then [`PromptTokenizer::read_conversation`] and
//! [`PromptTokenizer::tokenize_chat`] per request.

mod api;
mod body;
mod body_cache;
mod caches;
mod chat;
mod dialect;
mod error;
mod files;
mod image_tokens;
mod limits;
mod model;
mod prompt;
mod prompt_text;
mod python_text;
mod registry;
mod segment_cache;
mod segmented_text;
mod shared_parts;
mod template;
mod template_probe;
mod tokenize;
mod truncation;
mod turn_cache;

pub use api::ConversationApi;
pub use body::{ChatBody, TextBody, TextPrompt};
pub use caches::PromptCaches;
pub use chat::{MediaModality, MediaReference};
pub use dialect::{ContentFormat, PromptDialect};
pub use error::{ModelLoadError, PromptError, TokenizerLibraryError};
pub use image_tokens::ImageTokenRule;
pub use limits::PromptLimits;
pub use model::{PromptTokenizer, RenderedMediaChat};
pub use prompt::{SegmentedTokens, TokenizedPrompt};
pub use prompt_text::{PromptText, PromptTextPrefix};
pub use registry::{ModelFolder, TokenizerRegistry};
pub use template::TemplateTime;
#[doc(hidden)]
pub use template::render_template;
pub use truncation::PromptTruncation;
