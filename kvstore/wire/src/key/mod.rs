//! The keys under which engines store pages of their KV cache.
//!
//! A page is stored as one or several objects, one for every rank and perhaps for keys and values. Their keys
//! have a namespace (at least the model), the page's hash and the part in common, in an order that depends on
//! the engine. Nothing here allocates.

mod hash;
mod layout;
mod lmcache;
mod sglang;
mod vllm;

use std::fmt;

pub use hash::BlockKeyHash;
pub use layout::{AttentionKind, KeyLayout, SglangKeyFormat};
pub use lmcache::{LmcacheMpPart, LmcachePart};
pub use sglang::{SglangPart, SglangRanks, SglangTensor};
pub use vllm::VllmPart;

/// The key of an object that holds a page or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ObjectKey<'k> {
    /// What comes before the page's hash or the first rank: the model, perhaps with a prefix. Empty for SGLang
    /// up to 0.5.10.
    pub namespace: &'k str,
    /// Which page.
    pub hash: BlockKeyHash,
    /// Which part of the page.
    pub part: BlockPart<'k>,
}

/// Which part of a page an object holds, in the terms of the engine that stored it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockPart<'k> {
    /// SGLang's HiCache.
    Sglang(SglangPart),
    /// vLLM's `MooncakeStoreConnector`.
    Vllm(VllmPart),
    /// LMCache.
    Lmcache(LmcachePart<'k>),
    /// LMCache's multi-process server.
    LmcacheMp(LmcacheMpPart<'k>),
}

impl<'k> ObjectKey<'k> {
    /// Takes a key apart, or nothing if no engine that is known makes such keys.
    pub fn parse(key: &'k str) -> Option<Self> {
        vllm::parse(key).or_else(|| sglang::parse(key)).or_else(|| lmcache::parse(key))
    }
}

impl fmt::Display for ObjectKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.part {
            BlockPart::Sglang(part) => sglang::format(self.namespace, &self.hash, part, f),
            BlockPart::Vllm(part) => vllm::format(self.namespace, &self.hash, part, f),
            BlockPart::Lmcache(part) => lmcache::format(self.namespace, &self.hash, part, f),
            BlockPart::LmcacheMp(part) => lmcache::format_mp(self.namespace, &self.hash, part, f),
        }
    }
}

/// A number as it is formatted in base 10: digits, without leading zeros.
fn decimal(text: &str) -> Option<u32> {
    match text.as_bytes() {
        [b'0'] => Some(0),
        [b'1'..=b'9', ..] => text.parse().ok(),
        _ => None,
    }
}

/// A number as it is formatted in base 16: lower-case digits, without leading zeros.
fn hexadecimal(text: &str) -> Option<u64> {
    match text.as_bytes() {
        [b'0'] => Some(0),
        [b'1'..=b'9' | b'a'..=b'f', rest @ ..] if !rest.iter().any(u8::is_ascii_uppercase) => {
            u64::from_str_radix(text, 16).ok()
        }
        _ => None,
    }
}
