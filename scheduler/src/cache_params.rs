//! Cache parameters of an engine: they determine how much of a predicted hit it can use, and when.

use crate::seconds::Seconds;

/// Behaviour of an engine when a prompt reaches the head of its queue and blocks are still being fetched from the
/// shared store (SGLang's `hicache_storage_prefetch_policy`).
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum PrefetchBehavior {
    /// Stops fetching and computes the rest.
    BestEffort,
    /// Skips the request until all blocks are fetched.
    WaitComplete,
    /// Skips the request for a limited time, counted from its arrival, then computes the rest.
    Timeout {
        /// Base time for any prompt, in seconds.
        base_s: Seconds,
        /// Additional seconds for every 1,024 tokens to fetch.
        per_1k_tokens_s: Seconds,
    },
}

/// Cache settings of an engine. The default is SGLang 0.5 with a fast store; the caller overrides it with values that
/// the engine reports.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct EngineCacheParams {
    /// Tokens per block; caches hold whole blocks.
    pub page_tokens: u32,
    /// Behaviour when a fetch takes longer than the queue wait.
    pub prefetch: PrefetchBehavior,
    /// Minimum number of tokens for a fetch from the shared store.
    pub prefetch_threshold: u32,
    /// Bytes per second from host memory to the device.
    pub l2_bytes_per_s: f64,
    /// Bytes per second from the shared store to host memory, until
    /// [`InstanceLoad::fetch_slowness`](crate::InstanceLoad::fetch_slowness) is learned: no engine reports it.
    pub l3_bytes_per_s: f64,
    /// Bytes of KV cache per token, summed over all ranks.
    pub kv_bytes_per_token: f64,
    /// Host memory capacity in tokens; 0 if unknown.
    pub l2_tokens: u64,
    /// Maximum number of tokens in one prefill pass.
    pub max_prefill_tokens: u32,
}

impl EngineCacheParams {
    /// Seconds to read one token from the shared store.
    #[must_use]
    pub(crate) fn fetch_per_token(&self) -> Seconds {
        self.kv_bytes_per_token / self.l3_bytes_per_s
    }
}

impl Default for EngineCacheParams {
    fn default() -> Self {
        Self {
            page_tokens: 1,
            prefetch: PrefetchBehavior::BestEffort,
            prefetch_threshold: 256,
            l2_bytes_per_s: 50e9,
            l3_bytes_per_s: 20e9,
            kv_bytes_per_token: 192_512.0,
            l2_tokens: 0,
            max_prefill_tokens: 8_192,
        }
    }
}
