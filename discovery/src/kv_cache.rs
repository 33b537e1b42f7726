//! What one engine says about its KV cache: enough to predict what it holds of a prompt.

use std::fmt;

/// How an engine names a KV page by its tokens and all tokens before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineBlockHashing {
    /// SGLang: SHA-256 over the digest of the page before (none for the first) and the page's tokens, each as 32 bits little-endian.
    Sglang {
        /// Whether `extra_key` and `cache_salt` of a request are mixed in before the first page. `None`: not known of this version, so
        /// hashes of requests that carry either cannot be computed.
        namespaced: Option<bool>,
        /// Speculative decoding of the EAGLE family: each token is hashed together with the one after it.
        bigrams: bool,
    },
    /// vLLM: a hash over the digest of the block before (that of the seed for the first), the block's tokens and the request's extra keys.
    Vllm {
        /// How these three become bytes, and then a digest.
        algorithm: VllmHashAlgorithm,
        /// What the digest before the first block is made from (`PYTHONHASHSEED`, or vLLM's constant).
        seed: String,
    },
    /// Nobody outside the engine can compute it. Only the hashes in its KV events can be compared.
    Opaque {
        /// What the engine calls it, or why it cannot be computed.
        name: String,
    },
}

/// vLLM's `--prefix-caching-hash-algo`, as far as it can be computed outside the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum VllmHashAlgorithm {
    /// SHA-256 over Python's pickle, protocol 5. The default.
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

/// Where one data-parallel rank publishes what enters and leaves its KV cache (ZeroMQ PUB).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventSource {
    /// Data-parallel rank of the engine.
    pub dp_rank: u32,
    /// `tcp://host:port`. Where the engine binds: as it is reached from outside. Where it connects: the address that it calls.
    pub endpoint: String,
    /// `true`: the engine binds, so a subscriber connects. `false`: the engine connects, so a subscriber must bind.
    pub engine_binds: bool,
    /// `tcp://host:port` where missed batches are asked for again (ZeroMQ ROUTER; the engine always binds it).
    pub replay: Option<String>,
    /// What every message begins with; empty subscribes to everything.
    pub topic: String,
}

/// How an engine keeps KV pages in a Mooncake store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineStoreFacts {
    /// How the objects of a page are named.
    pub keys: StoreKeyScheme,
    /// Tensor-parallel ranks that have objects of their own for a page; `None` if not told.
    pub tp_size: Option<u32>,
    /// Pipeline-parallel ranks, likewise.
    pub pp_size: Option<u32>,
    /// The engine reads from the store only if at least so many tokens would come from there; `None` if not told.
    pub prefetch_threshold: Option<u32>,
    /// How long the engine waits for what it reads; `None` if not told, and always for vLLM.
    pub prefetch_policy: Option<PrefetchPolicy>,
    /// `host:port` of the master, if told.
    pub master: Option<String>,
}

/// Names of the objects that make up one page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreKeyScheme {
    /// SGLang: `[{prefix}_]{page hash}` and a suffix by rank.
    Sglang {
        /// Empty if keys have none; `None` if not told.
        prefix: Option<String>,
        /// One object per page for all tensor-parallel ranks (MLA), or K and V of every rank (MHA); `None` if not told.
        mla: Option<bool>,
    },
    /// vLLM: `[{prefix}@]{model}@tp_rank:…@{block hash}`.
    Vllm {
        /// Empty if keys have none, as is the default; vLLM does not tell.
        prefix: String,
        /// Last component of the model's path; `None` if not told.
        model: Option<String>,
    },
    /// A scheme that is not known here.
    Opaque {
        /// What the engine calls it.
        name: String,
    },
}

/// SGLang's `--hicache-storage-prefetch-policy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefetchPolicy {
    /// Takes what has arrived when the request could start.
    BestEffort,
    /// Waits for everything.
    WaitComplete,
    /// Waits for a time that grows with the number of tokens.
    Timeout,
}

/// What a person says about an engine's KV cache; wins over what the engine tells. In the file: the table `kv` of an instance.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct DeclaredKvFacts {
    /// vLLM's hash algorithm.
    pub hash_algorithm: Option<VllmHashAlgorithm>,
    /// vLLM's `PYTHONHASHSEED`.
    pub hash_seed: Option<String>,
    /// Where rank 0 publishes KV events, `tcp://host:port`; rank r at `port + r`. The gateway connects to it.
    pub events: Option<String>,
    /// Where rank 0 replays KV events, likewise.
    pub replay: Option<String>,
    /// Tensor-parallel ranks that write to the store.
    pub tp_size: Option<u32>,
    /// What the store's keys begin with; empty for nothing.
    pub store_key_prefix: Option<String>,
    /// Least tokens for which the engine reads from the store.
    pub prefetch_threshold: Option<u32>,
}
