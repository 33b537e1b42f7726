//! Why a request, a response or a stream was not translated.

use thiserror::Error;

/// A request that has no equivalent chat completion. The client's error: status 400.
#[derive(Debug, Error)]
pub enum Untranslatable {
    /// The body, or a member of it, is not the JSON that it has to be.
    #[error("`{member}` is not valid: {problem}")]
    Json { member: String, problem: serde_json::Error },
    /// The API requires a member that is missing.
    #[error("`{member}` is missing; it is required")]
    Missing { member: String },
    /// A name occurs twice in one object, and readers differ in which they use.
    #[error("`{member}` is given twice; send it once")]
    Repeated { member: String },
    /// A value that the API does not allow in this place.
    #[error("`{member}` is not valid: it must be {expected}")]
    Invalid { member: String, expected: &'static str },
    /// Part of the API, but a chat completion cannot express it.
    #[error("`{member}` is not supported by this model's engine: {reason}")]
    Unsupported { member: String, reason: String },
}

impl Untranslatable {
    pub(crate) fn unsupported(member: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Unsupported { member: member.into(), reason: reason.into() }
    }

    pub(crate) fn invalid(member: impl Into<String>, expected: &'static str) -> Self {
        Self::Invalid { member: member.into(), expected }
    }
}

/// A complete response of an engine that cannot be translated. The engine's error: status 502.
#[derive(Debug, Error)]
pub enum UntranslatableResponse {
    #[error("the engine's response is not a chat completion: {0}")]
    Json(#[from] serde_json::Error),
    #[error("the engine's response has no choice")]
    NoChoice,
    #[error("the engine's response has the finish reason {0:?}, so it is not complete")]
    NotFinished(Option<String>),
    #[error("the engine's response calls the tool `{tool}` with arguments that are not a JSON object")]
    ToolArguments { tool: String },
}

/// Why a translated stream is not complete. The client has received an error event, unless the stream was only truncated.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StreamFailure {
    /// The engine reported an error in its stream, with the HTTP status that it would otherwise have had.
    #[error("the engine reported an error: {message}")]
    Engine { status: Option<u64>, message: String },
    /// The engine's events are not a chat completion's.
    #[error("the engine's stream is not a chat completion's: {0}")]
    Malformed(String),
    /// The stream ended before its last event.
    #[error("the engine's stream ended without `data: [DONE]`")]
    Truncated,
}
