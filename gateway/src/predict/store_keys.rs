//! How an engine's pages are named in the store.

use mooncake_wire::key::{AttentionKind, BlockKeyHash, KeyLayout, ObjectKey, SglangKeyFormat};
use moongate_discovery::{EngineStoreFacts, StoreKeyScheme};
use moongate_scheduler::index::{BlockHashNamespace, BlockPartIndex};

/// The objects of pages of one keyspace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoreKeyNaming {
    layout: KeyLayout,
    namespace: BlockHashNamespace,
}

/// One object, as the index counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StoredBlockPart {
    /// The page's key in the index.
    pub(super) page: u64,
    /// Which of the page's objects it is.
    pub(super) part: BlockPartIndex,
}

impl StoreKeyNaming {
    /// The objects of an engine that uses the store so; `None` if it does not tell enough.
    pub(super) fn from_store(store: &EngineStoreFacts, namespace: BlockHashNamespace) -> Option<Self> {
        let layout = match &store.keys {
            StoreKeyScheme::Sglang { prefix, mla } => KeyLayout::Sglang {
                prefix: prefix.clone()?,
                attention: if (*mla)? { AttentionKind::Mla } else { AttentionKind::Mha },
                tp_size: store.tp_size?,
                pp_size: store.pp_size.unwrap_or(1),
                // Prefixes came after the newer form.
                form: if prefix.as_deref() == Some("") {
                    SglangKeyFormat::V0_5_3
                } else {
                    SglangKeyFormat::V0_5_10
                },
            },
            StoreKeyScheme::Vllm { prefix, model } => {
                let model = model.as_deref()?;
                KeyLayout::Vllm {
                    namespace: if prefix.is_empty() { model.to_owned() } else { format!("{prefix}@{model}") },
                    tp_size: store.tp_size.unwrap_or(1),
                    pcp_size: 1,
                    dcp_size: 1,
                    pp_size: store.pp_size.unwrap_or(1),
                    groups: 1,
                }
            }
            StoreKeyScheme::Opaque { .. } => return None,
        };
        let stored = Self { layout, namespace };
        stored.part(0).map(|_| stored)
    }

    /// What an object's key stands for, if it is one of these.
    pub(super) fn parse_key(&self, key: &ObjectKey<'_>) -> Option<StoredBlockPart> {
        if key.namespace != self.key_namespace() {
            return None;
        }
        let number = self.layout.keys(key.hash).position(|of_page| of_page.part == key.part)?;
        Some(StoredBlockPart { page: self.index_key(&key.hash)?, part: self.part(number)? })
    }

    /// The keys that tell whether a page is complete: of its first object and of its last. Ranks write their objects at about the
    /// same time, so the ones between are taken for there.
    pub(super) fn probe_keys(&self, page: BlockKeyHash) -> [String; 2] {
        let mut keys = self.layout.keys(page);
        let first = keys.next().map(|key| key.to_string()).unwrap_or_default();
        let last = keys.last().map_or_else(|| first.clone(), |key| key.to_string());
        [first, last]
    }

    /// All parts of a page.
    pub(super) fn parts(&self) -> impl Iterator<Item = BlockPartIndex> {
        (0..self.layout.parts_per_page()).filter_map(|number| self.part(usize::try_from(number).ok()?))
    }

    fn part(&self, number: usize) -> Option<BlockPartIndex> {
        BlockPartIndex::new(u8::try_from(number).ok()?, u8::try_from(self.layout.parts_per_page()).ok()?)
    }

    fn key_namespace(&self) -> &str {
        match &self.layout {
            KeyLayout::Sglang { prefix, .. } => prefix,
            KeyLayout::Vllm { namespace, .. } => namespace,
            KeyLayout::Lmcache { model, .. } => model,
        }
    }

    /// The page's key in the index: of the same 64 bits of the hash that the engine's events carry.
    fn index_key(&self, page: &BlockKeyHash) -> Option<u64> {
        let bytes = page.as_bytes();
        let eight = match self.layout {
            KeyLayout::Vllm { .. } => bytes.last_chunk(),
            KeyLayout::Sglang { .. } | KeyLayout::Lmcache { .. } => bytes.first_chunk(),
        };
        Some(self.namespace.key(u64::from_be_bytes(*eight?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SGLANG: &str = "tiny_cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72_1_v";
    const VLLM: &str = "tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111";

    fn store(keys: StoreKeyScheme, tp_size: u32) -> EngineStoreFacts {
        EngineStoreFacts {
            keys,
            tp_size: Some(tp_size),
            pp_size: None,
            prefetch_threshold: None,
            prefetch_policy: None,
            master: None,
        }
    }

    #[test]
    fn keys_meet_the_hashes_of_events() {
        let space = BlockHashNamespace::new(&["x"]);
        let keys = StoreKeyScheme::Sglang { prefix: Some("tiny".into()), mla: Some(false) };
        let sglang = StoreKeyNaming::from_store(&store(keys, 2), space).unwrap();
        let read = sglang.parse_key(&ObjectKey::parse(SGLANG).unwrap()).unwrap();
        assert_eq!(read.page, space.key(0xcf97_adee_db59_e05b), "the first eight bytes");
        assert_eq!(read.part, BlockPartIndex::new(3, 4).unwrap(), "rank 1's values are the last of four");
        let keys = StoreKeyScheme::Vllm { prefix: String::new(), model: Some("tiny".into()) };
        let vllm = StoreKeyNaming::from_store(&store(keys, 1), space).unwrap();
        let read = vllm.parse_key(&ObjectKey::parse(VLLM).unwrap()).unwrap();
        assert_eq!(read.page, space.key(0x84b1_46b1_51d5_5111), "the last eight bytes");
        assert_eq!(sglang.parse_key(&ObjectKey::parse(VLLM).unwrap()), None);
        assert_eq!(vllm.probe_keys(ObjectKey::parse(VLLM).unwrap().hash), [VLLM, VLLM]);
        let page = ObjectKey::parse(SGLANG).unwrap().hash;
        assert_eq!(sglang.probe_keys(page), [SGLANG.replace("_1_v", "_0_k"), SGLANG.to_owned()]);
        assert_eq!(sglang.parts().count(), 4);
    }

    #[test]
    fn too_little_said_is_nothing() {
        let space = BlockHashNamespace::new(&["x"]);
        let keys = StoreKeyScheme::Sglang { prefix: None, mla: Some(false) };
        assert_eq!(StoreKeyNaming::from_store(&store(keys, 1), space), None);
        let keys = StoreKeyScheme::Sglang { prefix: Some("m".into()), mla: Some(false) };
        assert_eq!(
            StoreKeyNaming::from_store(&store(keys, 64), space),
            None,
            "more parts than the index can tell apart"
        );
    }
}
