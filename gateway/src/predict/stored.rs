//! How an engine's pages are named in the store.

use mooncake_wire::key::{Attention, KeyLayout, ObjectKey, PageHash, SglangForm};
use moongate_discovery::{KvStore, StoreKeys};
use moongate_scheduler::index::{Namespace, Part};

/// The objects of pages of one keyspace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredAs {
    layout: KeyLayout,
    namespace: Namespace,
}

/// One object, as the index counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stored {
    /// The page's key in the index.
    pub(super) page: u64,
    /// Which of the page's objects it is.
    pub(super) part: Part,
}

impl StoredAs {
    /// The objects of an engine that uses the store so; `None` if it does not tell enough.
    pub(super) fn of(store: &KvStore, namespace: Namespace) -> Option<Self> {
        let layout = match &store.keys {
            StoreKeys::Sglang { prefix, mla } => KeyLayout::Sglang {
                prefix: prefix.clone()?,
                attention: if (*mla)? { Attention::Mla } else { Attention::Mha },
                tp_size: store.tp_size?,
                pp_size: store.pp_size.unwrap_or(1),
                // Prefixes came after the newer form.
                form: if prefix.as_deref() == Some("") { SglangForm::V0_5_3 } else { SglangForm::V0_5_10 },
            },
            StoreKeys::Vllm { prefix, model } => {
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
            StoreKeys::Opaque { .. } => return None,
        };
        let stored = Self { layout, namespace };
        stored.part(0).map(|_| stored)
    }

    /// What an object's key stands for, if it is one of these.
    pub(super) fn read(&self, key: &ObjectKey<'_>) -> Option<Stored> {
        if key.namespace != self.key_namespace() {
            return None;
        }
        let number = self.layout.keys(key.page).position(|of_page| of_page.part == key.part)?;
        Some(Stored { page: self.index_key(&key.page)?, part: self.part(number)? })
    }

    /// The keys that tell whether a page is complete: of its first object and of its last. Ranks write their objects at about the
    /// same time, so the ones between are taken for there.
    pub(super) fn probes(&self, page: PageHash) -> [String; 2] {
        let mut keys = self.layout.keys(page);
        let first = keys.next().map(|key| key.to_string()).unwrap_or_default();
        let last = keys.last().map_or_else(|| first.clone(), |key| key.to_string());
        [first, last]
    }

    /// All parts of a page.
    pub(super) fn parts(&self) -> impl Iterator<Item = Part> {
        (0..self.layout.parts_per_page()).filter_map(|number| self.part(usize::try_from(number).ok()?))
    }

    fn part(&self, number: usize) -> Option<Part> {
        Part::new(u8::try_from(number).ok()?, u8::try_from(self.layout.parts_per_page()).ok()?)
    }

    fn key_namespace(&self) -> &str {
        match &self.layout {
            KeyLayout::Sglang { prefix, .. } => prefix,
            KeyLayout::Vllm { namespace, .. } => namespace,
            KeyLayout::Lmcache { model, .. } => model,
        }
    }

    /// The page's key in the index: of the same 64 bits of the hash that the engine's events carry.
    fn index_key(&self, page: &PageHash) -> Option<u64> {
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

    fn store(keys: StoreKeys, tp_size: u32) -> KvStore {
        KvStore {
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
        let space = Namespace::new(&["x"]);
        let keys = StoreKeys::Sglang { prefix: Some("tiny".into()), mla: Some(false) };
        let sglang = StoredAs::of(&store(keys, 2), space).unwrap();
        let read = sglang.read(&ObjectKey::parse(SGLANG).unwrap()).unwrap();
        assert_eq!(read.page, space.key(0xcf97_adee_db59_e05b), "the first eight bytes");
        assert_eq!(read.part, Part::new(3, 4).unwrap(), "rank 1's values are the last of four");
        let keys = StoreKeys::Vllm { prefix: String::new(), model: Some("tiny".into()) };
        let vllm = StoredAs::of(&store(keys, 1), space).unwrap();
        let read = vllm.read(&ObjectKey::parse(VLLM).unwrap()).unwrap();
        assert_eq!(read.page, space.key(0x84b1_46b1_51d5_5111), "the last eight bytes");
        assert_eq!(sglang.read(&ObjectKey::parse(VLLM).unwrap()), None);
        assert_eq!(vllm.probes(ObjectKey::parse(VLLM).unwrap().page), [VLLM, VLLM]);
        let page = ObjectKey::parse(SGLANG).unwrap().page;
        assert_eq!(sglang.probes(page), [SGLANG.replace("_1_v", "_0_k"), SGLANG.to_owned()]);
        assert_eq!(sglang.parts().count(), 4);
    }

    #[test]
    fn too_little_said_is_nothing() {
        let space = Namespace::new(&["x"]);
        let keys = StoreKeys::Sglang { prefix: None, mla: Some(false) };
        assert_eq!(StoredAs::of(&store(keys, 1), space), None);
        let keys = StoreKeys::Sglang { prefix: Some("m".into()), mla: Some(false) };
        assert_eq!(StoredAs::of(&store(keys, 64), space), None, "more parts than the index can tell apart");
    }
}
