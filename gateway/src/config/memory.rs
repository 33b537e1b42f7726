//! Settings of the memory that requests share.

use clap::Args;
use moongate_runtime::memory_limit;

/// Used if neither the machine's nor the control group's memory limit can be read: the chart's limit.
const FALLBACK_MEMORY_LIMIT: u64 = 2 << 30;
/// Each default is the memory limit divided by this.
const DEFAULT_SHARE: u64 = 4;
/// Largest default for prompts. Text that is not cached costs a millisecond per 100 KiB.
const MAX_DEFAULT_PROMPT_MEMORY: u64 = 128 << 20;
/// Smallest value of either setting.
const MIN_BYTES: u64 = 1 << 20;

/// Memory shared by all requests.
#[derive(Debug, Clone, Args)]
pub struct MemoryOptions {
    /// Memory for the bodies of all requests together; more are rejected (503). A quarter is reserved for bodies up to 1 MiB.
    /// Default: a quarter of the memory limit (control group, else machine).
    #[arg(long, value_name = "BYTES", env = "MOONGATE_BODY_MEMORY", value_parser = clap::value_parser!(u64).range(MIN_BYTES..))]
    pub body_memory: Option<u64>,

    /// Memory for tokenizing prompts: a third for the tokens and block hashes of earlier ones, two thirds for prompts being tokenized;
    /// when that is exhausted, a request is routed without a prediction. Default: a quarter of the memory limit, at most 128 MiB, which
    /// holds about 5 million tokens.
    #[arg(long, value_name = "BYTES", env = "MOONGATE_PROMPT_MEMORY", value_parser = clap::value_parser!(u64).range(MIN_BYTES..))]
    pub prompt_memory: Option<u64>,

    /// Memory for responses of the Responses API that clients may continue by `previous_response_id` with any engine; 0: none are stored
    /// here, and such a request goes to the engine that made the response. Default: 0, because a response is then kept for a day
    /// unless its request has `"store": false`.
    #[arg(long, value_name = "BYTES", env = "MOONGATE_RESPONSE_STORE", default_value_t = 0)]
    pub response_store: u64,
}

/// Bytes per use, derived from the settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryShares {
    pub(crate) bodies: u64,
    /// Prompts that are being tokenized.
    pub(crate) prompts: u64,
    /// Tokens and bodies of earlier prompts.
    pub(crate) texts: u64,
    /// Block hashes of earlier prompts.
    pub(crate) hashes: u64,
    /// Cached tokens that engines have returned.
    pub(crate) engine_tokens: u64,
}

impl MemoryOptions {
    pub(crate) fn shares(&self) -> MemoryShares {
        self.shares_of(memory_limit().unwrap_or(FALLBACK_MEMORY_LIMIT))
    }

    fn shares_of(&self, limit: u64) -> MemoryShares {
        let default = (limit / DEFAULT_SHARE).max(MIN_BYTES);
        let prompt_memory = self.prompt_memory.unwrap_or(default.min(MAX_DEFAULT_PROMPT_MEMORY));
        let kept = prompt_memory / 3;
        let engine_tokens = (kept / 4).min(64 << 20);
        let earlier = kept - engine_tokens;
        MemoryShares {
            bodies: self.body_memory.unwrap_or(default),
            prompts: prompt_memory - kept,
            texts: earlier - earlier / 4,
            hashes: earlier / 4,
            engine_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_leave_half_of_the_limit() {
        const MIB: u64 = 1 << 20;
        let default = MemoryOptions { body_memory: None, prompt_memory: None, response_store: 0 };
        let shares = default.shares_of(2048 * MIB);
        assert_eq!(shares.bodies, 512 * MIB);
        let kept = shares.texts + shares.hashes + shares.engine_tokens;
        assert_eq!((kept, shares.prompts + kept), (128 * MIB / 3, 128 * MIB));
        assert_eq!(shares.engine_tokens, kept / 4);
        let large = default.shares_of(64 << 30);
        assert_eq!((large.bodies, large.prompts), (16 << 30, shares.prompts));
        let given =
            MemoryOptions { body_memory: Some(7 * MIB), prompt_memory: Some(8 * MIB), response_store: 0 };
        let shares = given.shares_of(64 << 30);
        assert_eq!(
            (shares.bodies, shares.prompts + shares.texts + shares.hashes + shares.engine_tokens),
            (7 * MIB, 8 * MIB)
        );
    }
}
