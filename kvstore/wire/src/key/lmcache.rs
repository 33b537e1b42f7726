//! Keys of LMCache: `model@world_size@worker@hash@dtype[@tag%value…]`, and of its multi-process server:
//! `model@kv_rank@group@hash[@salt]`.

use std::fmt;

use super::{BlockKeyHash, BlockPart, ObjectKey, decimal, hexadecimal};

/// One part of a block, as LMCache stores it. The block's hash has 8 bytes, big-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LmcachePart<'k> {
    pub world_size: u32,
    /// Index of the worker that stored the part.
    pub worker: u32,
    /// Whether the hash is written as a negative number. Its bytes are the two's complement then.
    pub negative: bool,
    /// Data type of the KV cache.
    pub dtype: &'k str,
    /// Tags in the form `name%value`, separated by `@`; often empty.
    pub tags: &'k str,
}

/// One part of a block, as LMCache's multi-process server stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LmcacheMpPart<'k> {
    /// Rank that stored the part.
    pub kv_rank: u32,
    /// Index of the layer group.
    pub group: u64,
    pub salt: &'k str,
}

/// Digits of a rank in a key of the multi-process server, padded with zeros.
const KV_RANK_DIGITS: usize = 8;

pub(super) fn parse(key: &str) -> Option<ObjectKey<'_>> {
    let (namespace, rest) = key.split_once('@')?;
    if namespace.is_empty() {
        return None;
    }
    parse_mp(namespace, rest).or_else(|| parse_single(namespace, rest))
}

/// Splits at the first `@`; without one the second part is empty. `None` for a trailing `@`, which LMCache does not write.
fn split_optional(text: &str) -> Option<(&str, &str)> {
    match text.split_once('@') {
        Some((_, "")) => None,
        Some((first, rest)) => Some((first, rest)),
        None => Some((text, "")),
    }
}

fn parse_mp<'k>(namespace: &'k str, rest: &'k str) -> Option<ObjectKey<'k>> {
    let (kv_rank, rest) = rest.split_once('@')?;
    let (group, rest) = rest.split_once('@')?;
    let (hash, salt) = split_optional(rest)?;
    if kv_rank.len() != KV_RANK_DIGITS {
        return None;
    }
    let kv_rank = BlockKeyHash::from_hex(kv_rank)?;
    let kv_rank = u32::from_be_bytes(*kv_rank.as_bytes().first_chunk()?);
    let part = BlockPart::LmcacheMp(LmcacheMpPart { kv_rank, group: hexadecimal(group)?, salt });
    Some(ObjectKey { namespace, hash: BlockKeyHash::from_hex(hash)?, part })
}

fn parse_single<'k>(namespace: &'k str, rest: &'k str) -> Option<ObjectKey<'k>> {
    let (world_size, rest) = rest.split_once('@')?;
    let (worker, rest) = rest.split_once('@')?;
    let (hash, rest) = rest.split_once('@')?;
    let (dtype, tags) = split_optional(rest)?;
    if dtype.is_empty() {
        return None;
    }
    let (negative, hash) = match hash.strip_prefix('-') {
        Some(magnitude) => (true, negative_hash(hexadecimal(magnitude)?)?),
        None => (false, hexadecimal(hash)?),
    };
    let (world_size, worker) = (decimal(world_size)?, decimal(worker)?);
    let part = BlockPart::Lmcache(LmcachePart { world_size, worker, negative, dtype, tags });
    Some(ObjectKey { namespace, hash: BlockKeyHash::new(&hash.to_be_bytes())?, part })
}

/// The two's complement of a hash that Python writes as `-magnitude`.
fn negative_hash(magnitude: u64) -> Option<u64> {
    (1..=1 << 63).contains(&magnitude).then(|| magnitude.wrapping_neg())
}

pub(super) fn format(
    namespace: &str,
    hash: &BlockKeyHash,
    part: &LmcachePart<'_>,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    let LmcachePart { world_size, worker, negative, dtype, tags } = part;
    let number = u64::from_be_bytes(*hash.as_bytes().first_chunk().ok_or(fmt::Error)?);
    write!(f, "{namespace}@{world_size}@{worker}@")?;
    if *negative {
        write!(f, "-{:x}", number.wrapping_neg())?;
    } else {
        write!(f, "{number:x}")?;
    }
    write!(f, "@{dtype}")?;
    if tags.is_empty() { Ok(()) } else { write!(f, "@{tags}") }
}

pub(super) fn format_mp(
    namespace: &str,
    hash: &BlockKeyHash,
    part: &LmcacheMpPart<'_>,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    let LmcacheMpPart { kv_rank, group, salt } = part;
    write!(f, "{namespace}@{kv_rank:08x}@{group:x}@{hash}")?;
    if salt.is_empty() { Ok(()) } else { write!(f, "@{salt}") }
}
