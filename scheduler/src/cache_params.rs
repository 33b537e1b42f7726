//! How an engine caches: what decides how much of a predicted hit it can use, and when.

use crate::request::Seconds;

/// What an engine does with a prompt whose pages are still being fetched from the shared store when its turn comes
/// (SGLang's `hicache_storage_prefetch_policy`).
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum PrefetchBehavior {
    /// Stops fetching and computes the rest.
    BestEffort,
    /// Passes over the request until all is fetched.
    WaitComplete,
    /// Passes over it for some time, counted from its arrival, then computes the rest.
    Timeout {
        /// Time for any prompt.
        base_s: Seconds,
        /// Time more for every 1,024 tokens to fetch.
        per_1k_tokens_s: Seconds,
    },
}

/// An engine's cache, as its settings say. The default is SGLang 0.5's with a fast store; the caller fills in what the
/// engine says of itself.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct EngineCacheParams {
    /// Tokens per page: caches hold whole pages.
    pub page_tokens: u32,
    /// What happens when fetching takes longer than waiting.
    pub prefetch: PrefetchBehavior,
    /// Nothing is fetched for fewer tokens than these.
    pub prefetch_threshold: u32,
    /// Bytes per second from host memory to the device.
    pub l2_bytes_per_s: f64,
    /// Bytes per second from the shared store to host memory, until [`InstanceLoad::fetch_slowness`](crate::Load::fetch_slowness) is learned: no
    /// engine tells.
    pub l3_bytes_per_s: f64,
    /// Bytes of KV cache per token, all ranks together.
    pub kv_bytes_per_token: f64,
    /// Tokens that host memory holds, 0 if not known.
    pub l2_tokens: u64,
    /// Most tokens of one prefill pass.
    pub max_prefill_tokens: u32,
}

impl EngineCacheParams {
    /// Seconds to read a token from the shared store.
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
