//! Room for new objects: who makes it, and who is told.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::block::AllocatedBlocks;
use crate::index::TierObject;
use crate::{FileTier, TierError};

/// Keys of objects that are gone, which are remembered until somebody asks.
const MAX_EVICTED_KEYS: usize = 1 << 20;

impl FileTier {
    /// The keys of objects that made room for others or were damaged, since this was asked the last time. Some may be back.
    #[must_use]
    pub fn take_evicted_keys(&self) -> Vec<Arc<[u8]>> {
        std::mem::take(&mut *self.evicted_keys.lock())
    }

    /// Takes free blocks; objects that were not used longest make room.
    pub(crate) fn reserve_blocks(&self, count: u64) -> Result<AllocatedBlocks, TierError> {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        loop {
            if let Some(taken) = self.free.allocate(count) {
                return Ok(taken);
            }
            let mut gone = Vec::new();
            let mut lacking = count.saturating_sub(self.free.len());
            let mut index = self.index.lock();
            while lacking > 0
                && let Some((key, stored)) = index.pop()
            {
                lacking = lacking.saturating_sub(stored.blocks.blocks.len());
                self.record_evicted_key(&key);
                gone.push(stored);
            }
            drop(index);
            if gone.is_empty() && self.free.len() < count {
                return Err(TierError::Busy);
            }
            self.evicted.fetch_add(gone.len() as u64, Ordering::Relaxed);
            self.drop_all(gone)?;
        }
    }

    /// Objects that are not in the index any more: their pages go before their blocks are free.
    pub(crate) fn drop_all(&self, gone: Vec<Arc<TierObject>>) -> Result<(), TierError> {
        let pages: Vec<u32> = gone.iter().filter_map(|stored| stored.first()).collect();
        let wiped = self.wipe(&pages);
        if wiped.is_err() {
            // A page that stays tells of blocks that must not get other bytes. They are lost until the tier is opened again.
            gone.into_iter().for_each(std::mem::forget);
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
            tracing::warn!("the page of a damaged object cannot be wiped: {problem}");
        }
    }

    fn record_evicted_key(&self, key: &[u8]) {
        let mut gone = self.evicted_keys.lock();
        if gone.len() < MAX_EVICTED_KEYS {
            gone.push(key.into());
        }
    }
}
