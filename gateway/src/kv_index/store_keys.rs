//! Names of an engine's blocks in the store.

use mooncake_wire::key::{AttentionKind, BlockKeyHash, KeyLayout, ObjectKey, SglangKeyFormat};
use moongate_discovery::{EngineStoreFacts, StoreKeyScheme};
use moongate_scheduler::index::{BlockHashNamespace, BlockPartIndex};

/// The objects of one keyspace's blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoreKeyNaming {
    layout: KeyLayout,
    namespace: BlockHashNamespace,
}

/// One object, as the index counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoredBlockPart {
    /// The block's key in the index.
    pub(crate) block: u64,
    /// Index of the object within its block.
    pub(crate) part: BlockPartIndex,
}

impl StoreKeyNaming {
    /// The key naming of an engine; `None` if it does not report enough.
    pub(crate) fn from_store(store: &EngineStoreFacts, namespace: BlockHashNamespace) -> Option<Self> {
        let layout = match &store.keys {
            StoreKeyScheme::Sglang { prefix, mla } => KeyLayout::Sglang {
                prefix: prefix.clone()?,
                attention: if (*mla)? { AttentionKind::Mla } else { AttentionKind::Mha },
                tp_size: store.tp_size?,
                pp_size: store.pp_size.unwrap_or(1),
                // SGLang versions with prefixes always use the newer format.
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
        let naming = Self { layout, namespace };
        naming.part(0).map(|_| naming)
    }

    /// Parses an object's key; `None` if it is of another naming.
    pub(crate) fn parse_key(&self, key: &ObjectKey<'_>) -> Option<StoredBlockPart> {
        if key.namespace != self.key_namespace() {
            return None;
        }
        let number = self.layout.keys(key.hash).position(|candidate| candidate.part == key.part)?;
        Some(StoredBlockPart { block: self.index_key(&key.hash)?, part: self.part(number)? })
    }

    /// Keys that reveal whether a block is complete: those of its first and last objects. Ranks write their objects at about the
    /// same time, so the objects in between are assumed to exist.
    pub(crate) fn probe_keys(&self, block: BlockKeyHash) -> [String; 2] {
        let mut keys = self.layout.keys(block);
        let first = keys.next().map(|key| key.to_string()).unwrap_or_default();
        let last = keys.last().map_or_else(|| first.clone(), |key| key.to_string());
        [first, last]
    }

    /// What the keys of a block's objects have before and after the block's hash; the same for all blocks. `block` is any.
    pub(crate) fn key_affixes(&self, block: BlockKeyHash) -> Vec<[String; 2]> {
        let hash = block.to_string();
        let keys = self.layout.keys(block).map(|key| key.to_string());
        keys.filter_map(|key| key.split_once(&hash).map(|(before, after)| [before.into(), after.into()]))
            .collect()
    }

    /// All parts of a block.
    pub(crate) fn parts(&self) -> impl Iterator<Item = BlockPartIndex> {
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

    /// The block's key in the index, from the same 64 bits of the hash that the engine's events carry.
    fn index_key(&self, block: &BlockKeyHash) -> Option<u64> {
        let bytes = block.as_bytes();
        let key_bytes = match self.layout {
            KeyLayout::Vllm { .. } => bytes.last_chunk(),
            KeyLayout::Sglang { .. } | KeyLayout::Lmcache { .. } => bytes.first_chunk(),
        };
        Some(self.namespace.key(u64::from_be_bytes(*key_bytes?)))
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
    fn store_keys_match_the_hashes_of_events() {
        let namespace = BlockHashNamespace::new(&["x"]);
        let keys = StoreKeyScheme::Sglang { prefix: Some("tiny".into()), mla: Some(false) };
        let sglang = StoreKeyNaming::from_store(&store(keys, 2), namespace).unwrap();
        let parsed = sglang.parse_key(&ObjectKey::parse(SGLANG).unwrap()).unwrap();
        assert_eq!(parsed.block, namespace.key(0xcf97_adee_db59_e05b), "the first eight bytes");
        assert_eq!(parsed.part, BlockPartIndex::new(3, 4).unwrap(), "rank 1's values are the last of four");
        let keys = StoreKeyScheme::Vllm { prefix: String::new(), model: Some("tiny".into()) };
        let vllm = StoreKeyNaming::from_store(&store(keys, 1), namespace).unwrap();
        let parsed = vllm.parse_key(&ObjectKey::parse(VLLM).unwrap()).unwrap();
        assert_eq!(parsed.block, namespace.key(0x84b1_46b1_51d5_5111), "the last eight bytes");
        assert_eq!(sglang.parse_key(&ObjectKey::parse(VLLM).unwrap()), None);
        assert_eq!(vllm.probe_keys(ObjectKey::parse(VLLM).unwrap().hash), [VLLM, VLLM]);
        let block = ObjectKey::parse(SGLANG).unwrap().hash;
        assert_eq!(sglang.probe_keys(block), [SGLANG.replace("_1_v", "_0_k"), SGLANG.to_owned()]);
        assert_eq!(sglang.parts().count(), 4);
        let affixes = sglang.key_affixes(block);
        assert_eq!(affixes.len(), 4);
        assert_eq!(affixes[3], ["tiny_", "_1_v"]);
    }

    #[test]
    fn incomplete_facts_give_no_naming() {
        let namespace = BlockHashNamespace::new(&["x"]);
        let keys = StoreKeyScheme::Sglang { prefix: None, mla: Some(false) };
        assert_eq!(StoreKeyNaming::from_store(&store(keys, 1), namespace), None);
        let keys = StoreKeyScheme::Sglang { prefix: Some("m".into()), mla: Some(false) };
        assert_eq!(
            StoreKeyNaming::from_store(&store(keys, 64), namespace),
            None,
            "more parts than the index supports"
        );
    }
}
