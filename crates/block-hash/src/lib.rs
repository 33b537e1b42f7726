//! Computes the block hashes of token ids that engines and stores use.
//!
//! Engines identify a block of KV cache by a hash over its tokens and the hash of the previous block. A [`BlockHashChain`] computes these
//! hashes for one prompt under one [`HashScheme`]. It can be stored and extended: a follow-up turn of a conversation costs only its new
//! blocks.
//!
//! Only full blocks have a hash. Blocks whose content depends on more than tokens, adapter and salt (images, prompt embeddings) are not
//! supported: take their hashes from the engine's events.

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
