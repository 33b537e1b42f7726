//! Keys of vLLM's `MooncakeStoreConnector`: `[prefix@]model…@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@hash`.

use std::fmt;

use super::{BlockKeyHash, BlockPart, ObjectKey, decimal};

/// One part of a block, as vLLM stores it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct VllmPart {
    pub tp: u32,
    /// Rank of prefill context parallelism.
    pub pcp: u32,
    /// Rank of decode context parallelism.
    pub dcp: u32,
    pub pp: u32,
    /// KV-cache group: layers with the same block size.
    pub group: u32,
}

pub(super) fn parse(key: &str) -> Option<ObjectKey<'_>> {
    let (rest, hash) = key.rsplit_once('@')?;
    let (rest, group) = field(rest, "group:")?;
    let (rest, pp) = field(rest, "pp_rank:")?;
    let (rest, dcp) = field(rest, "dcp")?;
    let (rest, pcp) = field(rest, "pcp")?;
    let (namespace, tp) = field(rest, "tp_rank:")?;
    if namespace.is_empty() {
        return None;
    }
    let part = BlockPart::Vllm(VllmPart { tp, pcp, dcp, pp, group });
    Some(ObjectKey { namespace, hash: BlockKeyHash::from_hex(hash)?, part })
}

/// Splits off the last field, which must have this name, and returns the rest and its value.
fn field<'k>(text: &'k str, name: &str) -> Option<(&'k str, u32)> {
    let (rest, field) = text.rsplit_once('@')?;
    Some((rest, decimal(field.strip_prefix(name)?)?))
}

pub(super) fn format(
    namespace: &str,
    hash: &BlockKeyHash,
    part: &VllmPart,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    let VllmPart { tp, pcp, dcp, pp, group } = part;
    write!(f, "{namespace}@tp_rank:{tp}@pcp{pcp}@dcp{dcp}@pp_rank:{pp}@group:{group}@{hash}")
}
