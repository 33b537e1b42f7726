//! Keys of vLLM's `MooncakeStoreConnector`: `[prefix@]model…@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@hash`.

use std::fmt;

use super::{BlockKeyHash, BlockPart, ObjectKey, decimal};

/// A part of a page as vLLM stores it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct VllmPart {
    /// The tensor-parallel rank.
    pub tp: u32,
    /// The rank of context parallelism in prefill.
    pub pcp: u32,
    /// The rank of context parallelism in decode.
    pub dcp: u32,
    /// The pipeline rank.
    pub pp: u32,
    /// The group of layers that share a block size.
    pub group: u32,
}

pub(super) fn parse(key: &str) -> Option<ObjectKey<'_>> {
    let (rest, page) = key.rsplit_once('@')?;
    let (rest, group) = field(rest, "group:")?;
    let (rest, pp) = field(rest, "pp_rank:")?;
    let (rest, dcp) = field(rest, "dcp")?;
    let (rest, pcp) = field(rest, "pcp")?;
    let (namespace, tp) = field(rest, "tp_rank:")?;
    if namespace.is_empty() {
        return None;
    }
    let part = BlockPart::Vllm(VllmPart { tp, pcp, dcp, pp, group });
    Some(ObjectKey { namespace, hash: BlockKeyHash::from_hex(page)?, part })
}

/// The last field, which has this name, and what comes before it.
fn field<'k>(text: &'k str, name: &str) -> Option<(&'k str, u32)> {
    let (rest, field) = text.rsplit_once('@')?;
    Some((rest, decimal(field.strip_prefix(name)?)?))
}

pub(super) fn format(
    namespace: &str,
    page: &BlockKeyHash,
    part: &VllmPart,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    let VllmPart { tp, pcp, dcp, pp, group } = part;
    write!(f, "{namespace}@tp_rank:{tp}@pcp{pcp}@dcp{dcp}@pp_rank:{pp}@group:{group}@{page}")
}
