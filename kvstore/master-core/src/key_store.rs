//! The keys of a shard's objects, in chunks by length: without the rounding and the pointers of separate allocations.

use crate::indices::SlabIndex;
use crate::slab::{CHUNK_BYTES, Slab};

/// Difference between the lengths of two classes.
const LENGTH_STEP: usize = 4;
/// Maximum length of a key in a chunk; longer ones are allocated separately.
const MAX_IN_CHUNK: usize = 256;
/// Length of a [`StoredKey`] that is allocated separately.
const SEPARATE: u16 = u16::MAX;

/// Where a key is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StoredKey {
    /// In two halves, so that it takes six bytes.
    slot: [u16; 2],
    /// Length in bytes, or [`SEPARATE`].
    length: u16,
}

impl StoredKey {
    fn new(slot: u32, length: u16) -> Self {
        Self { slot: [(slot >> 16) as u16, slot as u16], length }
    }

    fn slot(self) -> u32 {
        u32::from(self.slot[0]) << 16 | u32::from(self.slot[1])
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SeparateKey(u32);

impl SlabIndex for SeparateKey {
    fn from_slot(slot: u32) -> Self {
        Self(slot)
    }

    fn slot(self) -> u32 {
        self.0
    }
}

/// Keys of up to `stride` bytes.
#[derive(Debug)]
struct KeyClass {
    stride: usize,
    chunks: Vec<Box<[u8]>>,
    free: Vec<u32>,
    /// Number of slots used since the class was last empty.
    used: u32,
}

/// The keys of a shard.
#[derive(Debug, Default)]
pub(crate) struct KeyStore {
    /// By length.
    classes: Vec<KeyClass>,
    separate: Slab<SeparateKey, Box<str>>,
}

impl KeyStore {
    pub(crate) fn insert(&mut self, key: &str) -> StoredKey {
        let length = match u16::try_from(key.len()) {
            Ok(length) if key.len() <= MAX_IN_CHUNK => length,
            _ => return StoredKey::new(self.separate.insert(key.into()).slot(), SEPARATE),
        };
        let class = class_of(key.len());
        while self.classes.len() <= class {
            self.classes.push(KeyClass::new((self.classes.len() + 1) * LENGTH_STEP));
        }
        StoredKey::new(self.classes[class].insert(key.as_bytes()), length)
    }

    pub(crate) fn remove(&mut self, key: StoredKey) {
        if key.length == SEPARATE {
            self.separate.remove(SeparateKey(key.slot()));
        } else {
            self.classes[class_of(key.length.into())].remove(key.slot());
        }
    }

    pub(crate) fn bytes(&self, key: StoredKey) -> &[u8] {
        if key.length == SEPARATE {
            return self.separate[SeparateKey(key.slot())].as_bytes();
        }
        self.classes[class_of(key.length.into())].bytes(key.slot(), key.length.into())
    }

    pub(crate) fn get(&self, key: StoredKey) -> &str {
        // Only keys are stored, so the bytes are always valid.
        std::str::from_utf8(self.bytes(key)).unwrap_or_default()
    }
}

/// Position of the class for keys of this length.
fn class_of(length: usize) -> usize {
    length.saturating_sub(1) / LENGTH_STEP
}

impl KeyClass {
    fn new(stride: usize) -> Self {
        Self { stride, chunks: Vec::new(), free: Vec::new(), used: 0 }
    }

    /// Chunk of a slot, and its offset there.
    fn position(&self, slot: u32) -> (usize, usize) {
        let keys_per_chunk = CHUNK_BYTES / self.stride;
        (slot as usize / keys_per_chunk, slot as usize % keys_per_chunk * self.stride)
    }

    fn insert(&mut self, key: &[u8]) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.used += 1;
            self.used - 1
        });
        let (chunk, offset) = self.position(slot);
        if chunk == self.chunks.len() {
            self.chunks.push(vec![0; CHUNK_BYTES].into());
        }
        self.chunks[chunk][offset..offset + key.len()].copy_from_slice(key);
        slot
    }

    /// Removes a key. When the class becomes empty, its memory is freed.
    fn remove(&mut self, slot: u32) {
        self.free.push(slot);
        if self.free.len() == self.used as usize {
            *self = Self::new(self.stride);
        }
    }

    fn bytes(&self, slot: u32, length: usize) -> &[u8] {
        let (chunk, offset) = self.position(slot);
        &self.chunks[chunk][offset..offset + length]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn stored_keys_stay_the_same(steps in proptest::collection::vec((any::<bool>(), 1..300_usize, 0..20_u8), 1..200)) {
            let (mut store, mut model) = (KeyStore::default(), BTreeMap::new());
            for (add, length, number) in steps {
                if let Some((stored, key)) = model.remove(&number) {
                    prop_assert_eq!(store.get(stored), &key);
                    store.remove(stored);
                }
                if add {
                    let key = format!("{number:02}{}", "é".repeat(length / 2));
                    model.insert(number, (store.insert(&key), key));
                }
                for (stored, key) in model.values() {
                    prop_assert_eq!(store.get(*stored), key);
                }
            }
            model.into_values().for_each(|(stored, _)| store.remove(stored));
            prop_assert!(store.classes.iter().all(|class| class.chunks.is_empty()) && store.separate.len() == 0);
        }
    }

    #[test]
    fn a_key_takes_its_length_rounded_up() {
        let mut store = KeyStore::default();
        let keys: Vec<StoredKey> =
            (0..CHUNK_BYTES / 68).map(|number| store.insert(&format!("{number:068}"))).collect();
        assert_eq!(store.classes[class_of(68)].chunks.len(), 1);
        store.remove(keys[1]);
        assert_eq!((store.insert(&"x".repeat(65)).slot(), store.get(keys[2])), (1, &*format!("{:068}", 2)));
    }
}
