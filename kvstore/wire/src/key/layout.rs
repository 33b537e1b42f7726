//! Into which objects a model's pages are divided.

use super::{
    BlockKeyHash, BlockPart, LmcachePart, ObjectKey, SglangPart, SglangRanks, SglangTensor, VllmPart,
};

/// How a model's attention is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionKind {
    /// Keys and values of heads, which are divided among tensor-parallel ranks.
    Mha,
    /// One latent for all heads, equal on all tensor-parallel ranks and stored once.
    Mla,
}

/// Which releases of SGLang make keys of a form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SglangKeyFormat {
    /// 0.5.3 to 0.5.6: no pipeline ranks.
    V0_5_3,
    /// Since 0.5.10.
    V0_5_10,
}

/// Which objects exist for each page of a model. All of them are needed to load the page.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KeyLayout {
    /// SGLang's HiCache.
    Sglang {
        /// Before the hash; empty before 0.5.23. See [`KeyLayout::sglang_prefix`].
        prefix: String,
        /// How the model is cached.
        attention: AttentionKind,
        /// Tensor-parallel ranks, or the least common multiple of theirs where engines of several sizes share
        /// pages.
        tp_size: u32,
        /// Pipeline ranks.
        pp_size: u32,
        /// Which form keys have.
        form: SglangKeyFormat,
    },
    /// vLLM's `MooncakeStoreConnector`.
    Vllm {
        /// `[prefix@]` and the last component of the model's path.
        namespace: String,
        /// Tensor-parallel ranks.
        tp_size: u32,
        /// Ranks of context parallelism in prefill.
        pcp_size: u32,
        /// Ranks of context parallelism in decode, into which the tensor-parallel ranks are grouped.
        dcp_size: u32,
        /// Pipeline ranks.
        pp_size: u32,
        /// Groups of layers.
        groups: u32,
    },
    /// LMCache with one process per engine.
    Lmcache {
        /// The model.
        model: String,
        /// How many workers there are, each with its part.
        world_size: u32,
        /// The type of the cache's numbers.
        dtype: String,
        /// Tags as `name%value`, with `@` between them.
        tags: String,
    },
}

impl KeyLayout {
    /// SGLang's prefix since 0.5.23, from its `extra_backend_tag` and the model's served name.
    pub fn sglang_prefix(tag: Option<&str>, model: &str) -> String {
        let model = model.replace('/', "-");
        tag.map_or_else(|| model.clone(), |tag| format!("{tag}_{model}"))
    }

    /// How many objects a page has.
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

    /// The keys of all objects of a page. For LMCache only the first 8 bytes of the hash count, as a number that
    /// is not negative.
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

    /// The part with that index, which is below [`KeyLayout::parts_per_page`].
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

/// Takes the lowest digit off a number with digits below `base`.
fn digit(rest: &mut u64, base: u32) -> u32 {
    let base = u64::from(base.max(1));
    let digit = *rest % base;
    *rest /= base;
    // It is below `base`.
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
