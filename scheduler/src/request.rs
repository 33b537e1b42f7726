//! Facts of a request that decisions depend on.

use crate::background::BACKGROUND_PRIORITY;
use crate::fleet::ModelIndex;
use crate::seconds::Seconds;

/// One client request, reduced to what routing needs.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct RequestProfile {
    pub model: ModelIndex,
    /// Prompt length in tokens: exact if tokenized, otherwise estimated by the caller.
    pub input_tokens: u32,
    /// The client's limit for the response in tokens; the scheduler learns how long responses are.
    pub max_output_tokens: Option<u32>,
    /// Number of sequences that the engine runs for the request (`n` × batch size), at least 1.
    pub sequences: u32,
    /// Larger is more urgent; 0 is the default.
    pub priority: i32,
    /// Hash of the session or conversation, if the client names one.
    pub session: Option<u64>,
    /// Hash of the tenant's name; requests of one tenant share its part of a busy fleet.
    pub tenant: Option<u64>,
    /// Requested time to first token, counted from the arrival. `None` takes the scheduler's own target for a prompt of
    /// this length.
    pub ttft_target: Option<Seconds>,
}

impl RequestProfile {
    /// Whether it must not delay others.
    #[must_use]
    pub fn is_background(&self) -> bool {
        self.priority == BACKGROUND_PRIORITY
    }

    /// Prompt tokens of all sequences that the engine has to hold.
    #[must_use]
    pub fn total_input_tokens(&self) -> u64 {
        u64::from(self.input_tokens)
    }
}
