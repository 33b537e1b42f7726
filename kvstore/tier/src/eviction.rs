//! Eviction of objects, and the record of evicted keys.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::block::{AllocatedBlocks, BlockIndex};
use crate::index::TierObject;
use crate::{FileTier, TierError};

/// Maximum number of evicted keys kept until the next [`FileTier::take_evicted_keys`].
const MAX_EVICTED_KEYS: usize = 1 << 20;

impl FileTier {
    /// Returns the keys of objects evicted or found corrupt since the last call. Some may have been put again.
    #[must_use]
    pub fn take_evicted_keys(&self) -> Vec<Arc<[u8]>> {
        std::mem::take(&mut *self.evicted_keys.lock())
    }

    /// Allocates blocks, evicting the least recently used objects if needed.
    pub(crate) fn reserve_blocks(&self, count: u64) -> Result<AllocatedBlocks, TierError> {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        loop {
            if let Some(allocated) = self.free.allocate(count) {
                return Ok(allocated);
            }
            let mut removed = Vec::new();
            let mut missing = count.saturating_sub(self.free.len());
            let mut index = self.index.lock();
            while missing > 0
                && let Some((key, stored)) = index.pop()
            {
                missing = missing.saturating_sub(stored.blocks.blocks.len());
                self.record_evicted_key(&key);
                removed.push(stored);
            }
            drop(index);
            if removed.is_empty() && self.free.len() < count {
                return Err(TierError::Busy);
            }
            self.evicted.fetch_add(removed.len() as u64, Ordering::Relaxed);
            self.drop_all(removed)?;
        }
    }

    /// Drops objects that were removed from the index: their pages are wiped before their blocks are freed.
    pub(crate) fn drop_all(&self, removed: Vec<Arc<TierObject>>) -> Result<(), TierError> {
        let pages: Vec<BlockIndex> = removed.iter().filter_map(|stored| stored.first()).collect();
        let wiped = self.wipe(&pages);
        if wiped.is_err() {
            // A page that remains refers to blocks whose content must not change. Leak them until the tier is opened again.
            removed.into_iter().for_each(std::mem::forget);
        }
        wiped
    }

    pub(crate) fn drop_damaged(&self, key: &[u8], stored: &Arc<TierObject>, failure: &TierError) {
        if !self.index.lock().remove_if_same(key, stored) {
            return;
        }
        self.damaged.fetch_add(1, Ordering::Relaxed);
        self.record_evicted_key(key);
        tracing::warn!("{}: {failure}", self.path.display());
        if let Err(problem) = self.drop_all(vec![Arc::clone(stored)]) {
            tracing::warn!("cannot wipe the page of a corrupt object: {problem}");
        }
    }

    fn record_evicted_key(&self, key: &[u8]) {
        let mut removed = self.evicted_keys.lock();
        if removed.len() < MAX_EVICTED_KEYS {
            removed.push(key.into());
        }
    }
}
