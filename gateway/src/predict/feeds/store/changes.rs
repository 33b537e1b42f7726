//! Objects that events have named, until the master is asked for them.

use std::collections::HashMap;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::predict::store_keys::StoredBlockPart;

/// Objects that wait at most: 10 MB of keys, and some tenths of a second of the master's time.
const MAX_PENDING: usize = 1 << 16;

/// An object that has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PendingStoreChange {
    pub(super) stored: StoredBlockPart,
    /// When the master told it, in milliseconds since 1970 by its clock.
    pub(super) event_time_ms: u64,
}

/// Objects that have changed, by key. One that changes often waits once.
#[derive(Debug, Default)]
pub(super) struct StoreChangeQueue {
    waiting: Mutex<HashMap<String, PendingStoreChange>>,
    changed: Notify,
}

impl StoreChangeQueue {
    /// Adds an object. Returns `false`, and does nothing, if too many wait.
    pub(super) fn add(&self, key: &str, change: PendingStoreChange) -> bool {
        let mut waiting = self.waiting.lock();
        if !waiting.contains_key(key) {
            if waiting.len() >= MAX_PENDING {
                return false;
            }
            waiting.insert(key.to_owned(), change);
        }
        self.changed.notify_one();
        true
    }

    /// Takes all objects that wait, at least one.
    pub(super) async fn drain(&self) -> HashMap<String, PendingStoreChange> {
        loop {
            let taken = std::mem::take(&mut *self.waiting.lock());
            if !taken.is_empty() {
                return taken;
            }
            self.changed.notified().await;
        }
    }

    /// Forgets all of them.
    pub(super) fn clear(&self) {
        self.waiting.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use moongate_scheduler::index::BlockPartIndex;

    use super::*;

    #[tokio::test]
    async fn what_waits_is_bounded() {
        let changes = StoreChangeQueue::default();
        let change = |told_ms| PendingStoreChange {
            stored: StoredBlockPart { page: 1, part: BlockPartIndex::new(0, 1).unwrap() },
            event_time_ms: told_ms,
        };
        for number in 0..MAX_PENDING {
            assert!(changes.add(&number.to_string(), change(1)));
        }
        assert!(!changes.add("another", change(1)));
        assert!(changes.add("7", change(2)), "it waits already");
        let taken = changes.drain().await;
        assert_eq!(
            (taken.len(), taken["7"].event_time_ms),
            (MAX_PENDING, 1),
            "the lag counts from the first event"
        );
        assert!(changes.add("another", change(1)));
        assert_eq!(changes.drain().await.len(), 1);
    }
}
