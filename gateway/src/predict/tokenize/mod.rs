//! Tokens of prompts whose model has no tokenizer here: engines are asked for them.
//!
//! Engines answer with what they would make of the prompt themselves: vLLM at `…/render` and `/tokenize`, SGLang at `/tokenize`. A
//! request waits for that no longer than a limit, and goes its way without a prediction if there is no answer.

mod engine_tokenizer;
mod methods;
mod query;
mod response;

pub(crate) use engine_tokenizer::EngineTokenizer;
pub(super) use engine_tokenizer::EngineTokens;
pub(crate) use methods::TokenizeMethods;

/// Why no engine told a prompt's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EngineTokenizeError {
    /// Reading it would take the engine too long.
    #[error("the request is too large to ask an engine for its tokens")]
    TooLarge,
    /// Nobody offers it for such a request, or nobody who does is well.
    #[error("no engine offers to tell this request's tokens now")]
    NotOffered,
    /// They are asked for as many prompts as they can tell in time.
    #[error("the engines are asked about too many other prompts just now")]
    Busy,
    /// The limit has passed.
    #[error("no engine told its tokens in time")]
    Timeout,
    /// The engine takes the request for wrong.
    #[error("the engine refused to tell its tokens")]
    Rejected,
    /// Something else went wrong with the asking.
    #[error("the engine failed to tell its tokens")]
    Failed,
}

impl EngineTokenizeError {
    /// Short name for metrics.
    pub(super) fn name(self) -> &'static str {
        match self {
            EngineTokenizeError::TooLarge => "tokenize_too_large",
            EngineTokenizeError::NotOffered => "tokenize_not_offered",
            EngineTokenizeError::Busy => "tokenize_busy",
            EngineTokenizeError::Timeout => "tokenize_timeout",
            EngineTokenizeError::Rejected => "tokenize_refused",
            EngineTokenizeError::Failed => "tokenize_failed",
        }
    }
}
