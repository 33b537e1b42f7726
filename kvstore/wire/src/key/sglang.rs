//! Keys of SGLang's HiCache: `[prefix_]hash[_ranks]_k` and `…_v`.

use std::fmt;

use super::{BlockKeyHash, BlockPart, ObjectKey, decimal};

/// Digits of a SHA-256 hash.
const HASH_DIGITS: usize = 64;

/// One part of a block, as SGLang stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SglangPart {
    /// Ranks that stored the part.
    pub ranks: SglangRanks,
    /// Tensor that the part contains.
    pub tensor: SglangTensor,
}

/// The ranks in a key. A single number is ambiguous without the model's [`super::KeyLayout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SglangRanks {
    /// No ranks: MLA up to 0.5.6.
    Absent,
    /// An empty pipeline rank: MLA since 0.5.10 without pipeline parallelism.
    Empty,
    /// The tensor-parallel rank of MHA without pipeline parallelism, or the pipeline rank of MLA.
    One(u32),
    /// The ranks of MHA with pipeline parallelism.
    Two { tp: u32, pp: u32 },
}

/// The attention tensor in an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SglangTensor {
    /// Keys, or the complete latent of MLA.
    Key,
    Value,
}

pub(super) fn parse(key: &str) -> Option<ObjectKey<'_>> {
    let (rest, tensor) = match (key.strip_suffix("_k"), key.strip_suffix("_v")) {
        (Some(rest), _) => (rest, SglangTensor::Key),
        (_, Some(rest)) => (rest, SglangTensor::Value),
        _ => return None,
    };
    let (namespace, page, ranks) = ranks(rest)?;
    // MLA has no separate values.
    let exists =
        tensor == SglangTensor::Key || matches!(ranks, SglangRanks::One(_) | SglangRanks::Two { .. });
    exists.then_some(ObjectKey {
        namespace,
        hash: page,
        part: BlockPart::Sglang(SglangPart { ranks, tensor }),
    })
}

fn ranks(text: &str) -> Option<(&str, BlockKeyHash, SglangRanks)> {
    if let Some((namespace, page)) = page(text) {
        return Some((namespace, page, SglangRanks::Absent));
    }
    let (rest, last) = text.rsplit_once('_')?;
    if let Some((namespace, page)) = page(rest) {
        let ranks = if last.is_empty() { SglangRanks::Empty } else { SglangRanks::One(decimal(last)?) };
        return Some((namespace, page, ranks));
    }
    let (rest, first) = rest.rsplit_once('_')?;
    let (namespace, page) = page(rest)?;
    Some((namespace, page, SglangRanks::Two { tp: decimal(first)?, pp: decimal(last)? }))
}

/// The namespace and the hash at the end of `text`.
fn page(text: &str) -> Option<(&str, BlockKeyHash)> {
    let (before, digits) = text.split_at_checked(text.len().checked_sub(HASH_DIGITS)?)?;
    let page = BlockKeyHash::from_hex(digits)?;
    match before.strip_suffix('_') {
        Some("") => None,
        Some(namespace) => Some((namespace, page)),
        None => before.is_empty().then_some(("", page)),
    }
}

pub(super) fn format(
    namespace: &str,
    page: &BlockKeyHash,
    part: &SglangPart,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    if !namespace.is_empty() {
        write!(f, "{namespace}_")?;
    }
    write!(f, "{page}")?;
    match part.ranks {
        SglangRanks::Absent => {}
        SglangRanks::Empty => f.write_str("_")?,
        SglangRanks::One(rank) => write!(f, "_{rank}")?,
        SglangRanks::Two { tp, pp } => write!(f, "_{tp}_{pp}")?,
    }
    f.write_str(match part.tensor {
        SglangTensor::Key => "_k",
        SglangTensor::Value => "_v",
    })
}
