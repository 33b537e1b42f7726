//! From token ids to the page hashes that engines and stores use.
//!
//! Engines name a page of KV cache by a hash over its tokens and the hash of the page before it. A [`Chain`]
//! computes these names for one prompt under one [`Scheme`]. It can be kept and extended: a follow-up turn of a
//! conversation costs only its new pages.
//!
//! Only full pages have a name. Pages whose content depends on more than tokens, adapter and salt (images, prompt
//! embeddings) are not covered: their hashes must be taken from the engine's events.

mod cbor;
mod chain;
mod page;
mod pickle;
mod python;
mod scheme;

pub use chain::Chain;
pub use page::{Digest, Page};
pub use scheme::{
    Adapter, DEFAULT_VLLM_SEED, LMCACHE_CHUNK_TOKENS, MAX_EXTRA_BYTES, MAX_PAGE_TOKENS, Scheme, SchemeError,
    SglangNamespace, VllmExtra,
};
