//! Keys under which engines store blocks of their KV cache.
//!
//! A block is stored as one or several objects: one per rank, possibly with separate keys and values. Each key contains a
//! namespace (at least the model), the block's hash and the part, in an order that depends on the engine. Nothing here
//! allocates.

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

/// Key of an object that contains a block or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ObjectKey<'k> {
    /// The text before the block's hash or the first rank: the model, possibly with a prefix. Empty for SGLang up to 0.5.10.
    pub namespace: &'k str,
    pub hash: BlockKeyHash,
    /// Part of the block that the object contains.
    pub part: BlockPart<'k>,
}

/// Part of a block, in the terms of the engine that stored it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockPart<'k> {
    Sglang(SglangPart),
    Vllm(VllmPart),
    Lmcache(LmcachePart<'k>),
    LmcacheMp(LmcacheMpPart<'k>),
}

impl<'k> ObjectKey<'k> {
    /// Parses a key; `None` if no supported engine writes such keys.
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
