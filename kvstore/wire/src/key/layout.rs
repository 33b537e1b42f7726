//! Key layouts: the objects into which a model's blocks are divided.

use super::{
    BlockKeyHash, BlockPart, LmcachePart, ObjectKey, SglangPart, SglangRanks, SglangTensor, VllmPart,
};

/// Kind of attention, which determines the KV cache's layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionKind {
    /// Keys and values per head, divided among tensor-parallel ranks.
    Mha,
    /// One latent for all heads, identical on all tensor-parallel ranks and stored once.
    Mla,
}

/// Key format of SGLang releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SglangKeyFormat {
    /// 0.5.3 to 0.5.6: no pipeline ranks.
    V0_5_3,
    /// Since 0.5.10: with pipeline ranks.
    V0_5_10,
}

/// The objects of each block of a model. All of them are needed to load the block.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KeyLayout {
    Sglang {
        /// Prefix before the hash; empty before 0.5.23. See [`KeyLayout::sglang_prefix`].
        prefix: String,
        /// Attention kind of the model.
        attention: AttentionKind,
        /// Number of tensor-parallel ranks, or their least common multiple if engines of several sizes share blocks.
        tp_size: u32,
        pp_size: u32,
        form: SglangKeyFormat,
    },
    Vllm {
        /// `[prefix@]` and the last path component of the model.
        namespace: String,
        tp_size: u32,
        /// Number of prefill context-parallel ranks.
        pcp_size: u32,
        /// Number of decode context-parallel ranks, into which the tensor-parallel ranks are grouped.
        dcp_size: u32,
        pp_size: u32,
        groups: u32,
    },
    /// LMCache with one process per engine.
    Lmcache {
        model: String,
        /// Number of workers, each of which stores one part.
        world_size: u32,
        /// Data type of the KV cache.
        dtype: String,
        /// Tags in the form `name%value`, separated by `@`.
        tags: String,
    },
}

impl KeyLayout {
    /// SGLang's key prefix since 0.5.23, from its `extra_backend_tag` and the served model name.
    pub fn sglang_prefix(tag: Option<&str>, model: &str) -> String {
        let model = model.replace('/', "-");
        tag.map_or_else(|| model.clone(), |tag| format!("{tag}_{model}"))
    }

    /// Number of objects per block.
    pub fn parts_per_page(&self) -> u64 {
        let product = |sizes: &[u32]| {
            sizes.iter().fold(1_u64, |product, size| product.saturating_mul(u64::from(*size)))
        };
        match self {
            Self::Sglang { attention: AttentionKind::Mha, tp_size, pp_size, form, .. } => match form {
                SglangKeyFormat::V0_5_3 => product(&[2, *tp_size]),
                SglangKeyFormat::V0_5_10 => product(&[2, *tp_size, *pp_size]),
            },
            Self::Sglang { attention: AttentionKind::Mla, pp_size, form, .. } => match form {
                SglangKeyFormat::V0_5_3 => 1,
                SglangKeyFormat::V0_5_10 => product(&[*pp_size]),
            },
            Self::Vllm { tp_size, pcp_size, pp_size, groups, .. } => {
                product(&[*tp_size, *pcp_size, *pp_size, *groups])
            }
            Self::Lmcache { world_size, .. } => product(&[*world_size]),
        }
    }

    /// Keys of all objects of a block. For LMCache only the first 8 bytes of the hash are used, as a non-negative number.
    pub fn keys(&self, page: BlockKeyHash) -> impl Iterator<Item = ObjectKey<'_>> {
        let namespace = match self {
            Self::Sglang { prefix: namespace, .. }
            | Self::Vllm { namespace, .. }
            | Self::Lmcache { model: namespace, .. } => namespace,
        };
        (0..self.parts_per_page()).map(move |index| ObjectKey {
            namespace,
            hash: page,
            part: self.part(index),
        })
    }

    /// The part with this index, which must be below [`KeyLayout::parts_per_page`].
    fn part(&self, index: u64) -> BlockPart<'_> {
        match self {
            Self::Sglang { attention, pp_size, form, .. } => {
                BlockPart::Sglang(sglang_part(index, *attention, *pp_size, *form))
            }
            Self::Vllm { tp_size, pcp_size, dcp_size, pp_size, .. } => {
                let mut rest = index;
                let tp = digit(&mut rest, *tp_size);
                BlockPart::Vllm(VllmPart {
                    tp,
                    pcp: digit(&mut rest, *pcp_size),
                    dcp: tp % (*dcp_size).max(1),
                    pp: digit(&mut rest, *pp_size),
                    group: digit(&mut rest, u32::MAX),
                })
            }
            Self::Lmcache { world_size, dtype, tags, .. } => BlockPart::Lmcache(LmcachePart {
                world_size: *world_size,
                worker: digit(&mut index.clone(), *world_size),
                negative: false,
                dtype,
                tags,
            }),
        }
    }
}

/// Removes and returns the lowest digit of a number in this base.
fn digit(rest: &mut u64, base: u32) -> u32 {
    let base = u64::from(base.max(1));
    let digit = *rest % base;
    *rest /= base;
    // A digit is below `base`, which is a u32.
    u32::try_from(digit).unwrap_or(u32::MAX)
}

fn sglang_part(index: u64, attention: AttentionKind, pp_size: u32, form: SglangKeyFormat) -> SglangPart {
    let mut rest = index;
    let pipelined = form == SglangKeyFormat::V0_5_10 && pp_size > 1;
    if attention == AttentionKind::Mla {
        let ranks = match form {
            SglangKeyFormat::V0_5_3 => SglangRanks::Absent,
            SglangKeyFormat::V0_5_10 if pipelined => SglangRanks::One(digit(&mut rest, pp_size)),
            SglangKeyFormat::V0_5_10 => SglangRanks::Empty,
        };
        return SglangPart { ranks, tensor: SglangTensor::Key };
    }
    let tensor = if digit(&mut rest, 2) == 0 { SglangTensor::Key } else { SglangTensor::Value };
    let pp = if pipelined { digit(&mut rest, pp_size) } else { 0 };
    let tp = digit(&mut rest, u32::MAX);
    let ranks = if pipelined { SglangRanks::Two { tp, pp } } else { SglangRanks::One(tp) };
    SglangPart { ranks, tensor }
}
