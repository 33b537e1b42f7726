//! Room for new objects: who makes it, and who is told.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::block::Taken;
use crate::index::Stored;
use crate::{Error, Tier};

/// Keys of objects that are gone, which are remembered until somebody asks.
const MOST_GONE: usize = 1 << 20;

impl Tier {
    /// The keys of objects that made room for others or were damaged, since this was asked the last time. Some may be back.
    #[must_use]
    pub fn take_gone(&self) -> Vec<Arc<[u8]>> {
        std::mem::take(&mut *self.gone.lock())
    }

    /// Takes free blocks; objects that were not used longest make room.
    pub(crate) fn room(&self, count: u64) -> Result<Taken, Error> {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        loop {
            if let Some(taken) = self.free.take(count) {
                return Ok(taken);
            }
            let mut gone = Vec::new();
            let mut lacking = count.saturating_sub(self.free.len());
            let mut index = self.index.lock();
            while lacking > 0
                && let Some((key, stored)) = index.pop()
            {
                lacking = lacking.saturating_sub(stored.taken.blocks.len());
                self.note_gone(&key);
                gone.push(stored);
            }
            drop(index);
            if gone.is_empty() && self.free.len() < count {
                return Err(Error::Busy);
            }
            self.evicted.fetch_add(gone.len() as u64, Ordering::Relaxed);
            self.drop_all(gone)?;
        }
    }

    /// Objects that are not in the index any more: their pages go before their blocks are free.
    pub(crate) fn drop_all(&self, gone: Vec<Arc<Stored>>) -> Result<(), Error> {
        let pages: Vec<u32> = gone.iter().filter_map(|stored| stored.first()).collect();
        let wiped = self.wipe(&pages);
        if wiped.is_err() {
            // A page that stays tells of blocks that must not get other bytes. They are lost until the tier is opened again.
            gone.into_iter().for_each(std::mem::forget);
        }
        wiped
    }

    pub(crate) fn drop_damaged(&self, key: &[u8], stored: &Arc<Stored>, failure: &Error) {
        if !self.index.lock().remove_this(key, stored) {
            return;
        }
        self.damaged.fetch_add(1, Ordering::Relaxed);
        self.note_gone(key);
        tracing::warn!("{}: {failure}", self.path.display());
        if let Err(problem) = self.drop_all(vec![Arc::clone(stored)]) {
            tracing::warn!("the page of a damaged object cannot be wiped: {problem}");
        }
    }

    fn note_gone(&self, key: &[u8]) {
        let mut gone = self.gone.lock();
        if gone.len() < MOST_GONE {
            gone.push(key.into());
        }
    }
}
