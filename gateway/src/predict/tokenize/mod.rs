//! Tokens of prompts whose model has no local tokenizer: engines are queried for them.
//!
//! Engines return the tokens that they would use for the prompt themselves: vLLM at `…/render` and `/tokenize`, SGLang at
//! `/tokenize`. A request waits at most for a time limit, and is routed without a prediction if there is no response.

mod engine_tokenizer;
mod query;
mod response;

pub(crate) use engine_tokenizer::EngineTokenizer;
pub(super) use engine_tokenizer::EngineTokens;
pub(super) use response::RenderedMedium;

/// Why no engine returned a prompt's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EngineTokenizeError {
    /// The engine could not tokenize it within the time limit.
    #[error("the request is too large for an engine to tokenize in time")]
    TooLarge,
    /// No available engine supports such a request.
    #[error("no available engine can tokenize such a request")]
    NotOffered,
    /// All permits of the engines are in use.
    #[error("the engines are busy with other tokenize queries")]
    Busy,
    /// The time limit has passed.
    #[error("no engine tokenized it in time")]
    Timeout,
    /// The engine rejected the request as invalid.
    #[error("the engine rejected the tokenize query")]
    Rejected,
    /// The query failed for another reason.
    #[error("the tokenize query failed")]
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
            EngineTokenizeError::Rejected => "tokenize_rejected",
            EngineTokenizeError::Failed => "tokenize_failed",
        }
    }
}
