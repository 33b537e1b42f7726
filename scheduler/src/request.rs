//! What the decision needs to know of a request.

use crate::fleet::ModelIndex;

/// A point in time or a duration in seconds, as the caller's clock counts them.
pub type Seconds = f64;

/// One client request, reduced to what routing needs.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct RequestProfile {
    /// The model asked for.
    pub model: ModelIndex,
    /// Prompt length in tokens: exact if tokenised, otherwise estimated by the caller.
    pub input_tokens: u32,
    /// Expected answer length in tokens (the client's limit, or the caller's guess).
    pub output_tokens: u32,
    /// Number of sequences that one request makes the engine run (`n` × batch size), at least 1.
    pub sequences: u32,
    /// Larger is more urgent; 0 is the default.
    pub priority: i32,
    /// Hash of the session or conversation, if the client names one.
    pub session: Option<u64>,
    /// Hash of the tenant's name; requests of one tenant share its part of a busy fleet.
    pub tenant: Option<u64>,
    /// Latest wanted time to first token, counted from the arrival. `None` takes the scheduler's own target for a
    /// prompt of this length.
    pub ttft_target: Option<Seconds>,
}

impl RequestProfile {
    /// All prompt tokens that the engine has to hold: every sequence of a batch counts.
    #[must_use]
    pub fn total_input_tokens(&self) -> u64 {
        u64::from(self.input_tokens)
    }

    /// Most tokens this request can occupy on the engine that decodes it.
    #[must_use]
    pub fn total_tokens(&self) -> u64 {
        self.total_input_tokens() + u64::from(self.output_tokens) * u64::from(self.sequences.max(1))
    }
}
