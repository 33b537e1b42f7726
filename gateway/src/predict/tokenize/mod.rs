//! Tokens of prompts whose model has no tokenizer here: engines are asked for them.
//!
//! Engines answer with what they would make of the prompt themselves: vLLM at `…/render` and `/tokenize`, SGLang at `/tokenize`. A
//! request waits for that no longer than a limit, and goes its way without a prediction if there is no answer.

mod answer;
mod asker;
mod query;
mod ways;

pub(crate) use asker::EngineTokenizer;
pub(super) use asker::Told;
pub(crate) use ways::TokenizeWays;

/// Why no engine told a prompt's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotTold {
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
    Refused,
    /// Something else went wrong with the asking.
    #[error("the engine failed to tell its tokens")]
    Failed,
}

impl NotTold {
    /// Short name for metrics.
    pub(super) fn name(self) -> &'static str {
        match self {
            NotTold::TooLarge => "tokenize_too_large",
            NotTold::NotOffered => "tokenize_not_offered",
            NotTold::Busy => "tokenize_busy",
            NotTold::Timeout => "tokenize_timeout",
            NotTold::Refused => "tokenize_refused",
            NotTold::Failed => "tokenize_failed",
        }
    }
}
