//! From token ids to the page hashes that engines and stores use.
//!
//! Engines name a page of KV cache by a hash over its tokens and the hash of the page before it. A [`BlockHashChain`]
//! computes these names for one prompt under one [`HashScheme`]. It can be kept and extended: a follow-up turn of a
//! conversation costs only its new pages.
//!
//! Only full pages have a name. Pages whose content depends on more than tokens, adapter and salt (images, prompt
//! embeddings) are not covered: their hashes must be taken from the engine's events.

mod block;
mod cbor;
mod hash_chain;
mod hash_scheme;
mod pickle;
mod python;

pub use block::{BlockDigest, HashedBlock};
pub use hash_chain::BlockHashChain;
pub use hash_scheme::{
    DEFAULT_VLLM_SEED, HashScheme, HashSchemeError, LMCACHE_CHUNK_TOKENS, MAX_BLOCK_TOKENS,
    MAX_EXTRA_KEY_BYTES, SglangNamespace, VllmExtraKeys, VllmLoraAdapter,
};
