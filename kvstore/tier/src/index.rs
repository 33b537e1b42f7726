//! Index of objects, in order of eviction.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use foldhash::fast::RandomState;

use crate::block::{AllocatedBlocks, BlockIndex};

/// An object in the file. Its blocks are freed when the last reader drops it.
#[derive(Debug)]
pub(crate) struct TierObject {
    pub(crate) generation: u64,
    pub(crate) len: u64,
    /// CRC-32C of the part in each block.
    pub(crate) crcs: Vec<u32>,
    pub(crate) blocks: AllocatedBlocks,
}

impl TierObject {
    /// The first block, whose page describes the object.
    pub(crate) fn first(&self) -> Option<BlockIndex> {
        self.blocks.blocks.first().copied()
    }
}

#[derive(Debug)]
struct IndexedObject {
    stored: Arc<TierObject>,
    used: u64,
}

/// Objects by key and by last use.
#[derive(Debug, Default)]
pub(crate) struct TierIndex {
    by_key: HashMap<Arc<[u8]>, IndexedObject, RandomState>,
    by_use: BTreeMap<u64, Arc<[u8]>>,
    clock: u64,
    bytes: u64,
}

impl TierIndex {
    pub(crate) fn len(&self) -> usize {
        self.by_key.len()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn contains(&self, key: &[u8]) -> bool {
        self.by_key.contains_key(key)
    }

    pub(crate) fn size(&self, key: &[u8]) -> Option<u64> {
        self.by_key.get(key).map(|entry| entry.stored.len)
    }

    /// Returns the object of a key and marks it as most recently used.
    pub(crate) fn used(&mut self, key: &[u8]) -> Option<Arc<TierObject>> {
        self.clock += 1;
        let entry = self.by_key.get_mut(key)?;
        if let Some(key) = self.by_use.remove(&entry.used) {
            entry.used = self.clock;
            self.by_use.insert(self.clock, key);
        }
        Some(Arc::clone(&entry.stored))
    }

    /// Inserts an object and returns the one to drop: an older one of the same key, or this one if a newer exists.
    pub(crate) fn insert(&mut self, key: &[u8], stored: Arc<TierObject>) -> Option<Arc<TierObject>> {
        if self.by_key.get(key).is_some_and(|entry| entry.stored.generation > stored.generation) {
            return Some(stored);
        }
        let before = self.remove(key);
        self.clock += 1;
        let key: Arc<[u8]> = key.into();
        self.bytes += stored.len;
        self.by_use.insert(self.clock, Arc::clone(&key));
        self.by_key.insert(key, IndexedObject { stored, used: self.clock });
        before
    }

    pub(crate) fn remove(&mut self, key: &[u8]) -> Option<Arc<TierObject>> {
        let entry = self.by_key.remove(key)?;
        self.by_use.remove(&entry.used);
        self.bytes -= entry.stored.len;
        Some(entry.stored)
    }

    /// Removes an object unless it was replaced. Returns whether it did.
    pub(crate) fn remove_if_same(&mut self, key: &[u8], stored: &Arc<TierObject>) -> bool {
        let same = self.by_key.get(key).is_some_and(|entry| Arc::ptr_eq(&entry.stored, stored));
        same && self.remove(key).is_some()
    }

    /// Removes the least recently used object.
    pub(crate) fn pop(&mut self) -> Option<(Arc<[u8]>, Arc<TierObject>)> {
        let key = self.by_use.first_key_value().map(|(_, key)| Arc::clone(key))?;
        let stored = self.remove(&key)?;
        Some((key, stored))
    }

    /// All keys, the next to be evicted first.
    pub(crate) fn keys(&self) -> Vec<Arc<[u8]>> {
        self.by_use.values().map(Arc::clone).collect()
    }
}
