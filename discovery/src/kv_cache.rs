//! Facts of an engine's KV cache that are needed to predict cache hits.

use std::fmt;

/// Maximum number of ranks per engine, data-parallel or tensor-parallel.
pub(crate) const MAX_RANKS: u32 = 4096;
/// Longest accepted hash seed, key part or address of a store, in bytes.
pub(crate) const MAX_TEXT: usize = 255;

/// How an engine hashes a KV page from its tokens and all preceding tokens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum EngineBlockHashing {
    /// SGLang: SHA-256 over the digest of the page before (none for the first) and the page's tokens, each as 32 bits little-endian.
    Sglang {
        /// Whether `extra_key` and `cache_salt` of a request are mixed in before the first page. `None`: unknown for this version, so
        /// hashes of requests with either cannot be computed.
        namespaced: Option<bool>,
        /// Speculative decoding of the EAGLE family: each token is hashed together with the following one.
        bigrams: bool,
        /// Whether hashes in KV events depend on `extra_key` (the event format `dynamo`); otherwise only those of LoRA adapters do.
        namespaced_events: bool,
    },
    /// vLLM: a hash over the digest of the block before (that of the seed for the first), the block's tokens and the request's extra keys.
    Vllm {
        /// Encoding of these three and the hash function.
        algorithm: VllmHashAlgorithm,
        /// Seed of the digest before the first block (`PYTHONHASHSEED`, or vLLM's constant).
        seed: String,
    },
    /// A hash that cannot be computed outside the engine; only the hashes in its KV events can be compared.
    Opaque {
        /// The engine's name of the hash, or the reason why it cannot be computed.
        name: String,
    },
}

/// The values of vLLM's `--prefix-caching-hash-algo` that can be computed outside the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum VllmHashAlgorithm {
    /// SHA-256 over Python's pickle, protocol 5; vLLM's default.
    Sha256,
    /// SHA-256 over canonical CBOR.
    Sha256Cbor,
}

impl fmt::Display for VllmHashAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sha256 => "sha256",
            Self::Sha256Cbor => "sha256_cbor",
        })
    }
}

/// The address at which one data-parallel rank publishes KV events (ZeroMQ PUB).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventSource {
    /// Data-parallel rank of the engine.
    pub dp_rank: u32,
    /// `tcp://host:port`. If the engine binds, the address for subscribers; if it connects, the address that it connects to.
    pub endpoint: String,
    /// `true`: the engine binds, so a subscriber connects. `false`: the engine connects, so a subscriber must bind.
    pub engine_binds: bool,
    /// `tcp://host:port` for requesting missed batches (ZeroMQ ROUTER; the engine always binds it).
    pub replay: Option<String>,
    /// Topic prefix of every message; empty subscribes to all.
    pub topic: String,
}

/// How an engine stores KV pages in a Mooncake store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineStoreFacts {
    /// Naming scheme of the objects of a page.
    pub keys: StoreKeyScheme,
    /// Tensor-parallel ranks, each with its own objects for a page; `None` if not reported.
    pub tp_size: Option<u32>,
    /// Pipeline-parallel ranks, each with its own objects; `None` if not reported.
    pub pp_size: Option<u32>,
    /// Minimum number of cached tokens for which the engine reads from the store; `None` if not reported.
    pub prefetch_threshold: Option<u32>,
    /// How long the engine waits for reads from the store; `None` if not reported, and always for vLLM.
    pub prefetch_policy: Option<PrefetchPolicy>,
    /// `host:port` of the store's master; `None` if not reported.
    pub master: Option<String>,
}

/// Names of the objects that make up one page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreKeyScheme {
    /// SGLang: `[{prefix}_]{page hash}` and a suffix by rank.
    Sglang {
        /// Key prefix, empty if there is none; `None` if not reported.
        prefix: Option<String>,
        /// One object per page for all tensor-parallel ranks (MLA), or K and V of every rank (MHA); `None` if not reported.
        mla: Option<bool>,
    },
    /// vLLM: `[{prefix}@]{model}@tp_rank:…@{block hash}`.
    Vllm {
        /// Key prefix, empty by default; vLLM does not report it.
        prefix: String,
        /// Last component of the model's path; `None` if not reported.
        model: Option<String>,
    },
    /// An unsupported scheme, whose keys cannot be computed.
    Opaque {
        /// The engine's name of the scheme.
        name: String,
    },
}

/// SGLang's `--hicache-storage-prefetch-policy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefetchPolicy {
    /// Uses the pages that have arrived when the request could start.
    BestEffort,
    /// Waits until all pages have arrived.
    WaitComplete,
    /// Waits for a time that grows with the number of tokens.
    Timeout,
}

/// Declared facts of an engine's KV cache; they override those that the engine reports. In the file: the table `kv` of an instance.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct DeclaredKvFacts {
    pub hash_algorithm: Option<VllmHashAlgorithm>,
    /// Value of vLLM's `PYTHONHASHSEED`.
    pub hash_seed: Option<String>,
    /// Address of rank 0's KV events, `tcp://host:port`; rank r at `port + r`. The gateway connects to it.
    pub events: Option<String>,
    /// Address at which rank 0 replays KV events, in the same form.
    pub replay: Option<String>,
    /// Tensor-parallel ranks that write to the store.
    pub tp_size: Option<u32>,
    /// Prefix of the store's keys; empty for none.
    pub store_key_prefix: Option<String>,
    /// Minimum number of tokens for which the engine reads from the store.
    pub prefetch_threshold: Option<u32>,
}
