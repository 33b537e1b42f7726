//! Computes the block hashes of token ids that engines and stores use.
//!
//! Engines identify a block of KV cache by a hash over its tokens and the hash of the previous block. A [`BlockHashChain`] computes these
//! hashes for one prompt under one [`HashScheme`]. It can be stored and extended: a follow-up turn of a conversation costs only its new
//! blocks.
//!
//! Only full blocks have a hash. vLLM's blocks with tokens of images, recordings and videos need the engine's hash of these
//! ([`HashScheme::with_media`]). Media of SGLang and prompt embeddings are not supported: take their hashes from the engine's events.

mod block;
mod cbor;
mod hash_chain;
mod hash_scheme;
mod pickle;
mod python;
mod vllm_extra_keys;

pub use block::{BlockDigest, HashedBlock};
pub use hash_chain::BlockHashChain;
pub use hash_scheme::{
    DEFAULT_VLLM_SEED, HashScheme, HashSchemeError, LMCACHE_CHUNK_TOKENS, MAX_BLOCK_TOKENS,
    MAX_EXTRA_KEY_BYTES, SglangNamespace,
};
pub use vllm_extra_keys::{VllmExtraKeys, VllmLoraAdapter, VllmMediaItem};
