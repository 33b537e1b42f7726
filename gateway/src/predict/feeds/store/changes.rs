//! Objects named in events, until their locations are queried.

use std::collections::HashMap;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::kv_index::StoredBlockPart;

/// Most pending objects: 10 MB of keys, and a few tenths of a second of the master's time.
const MAX_PENDING: usize = 1 << 16;

/// An object that has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PendingStoreChange {
    pub(super) stored: StoredBlockPart,
    /// Time of the master's event, in milliseconds since 1970 by its clock.
    pub(super) event_time_ms: u64,
}

/// Changed objects by key. An object that changes repeatedly is queued once.
#[derive(Debug, Default)]
pub(super) struct StoreChangeQueue {
    pending: Mutex<HashMap<String, PendingStoreChange>>,
    changed: Notify,
}

impl StoreChangeQueue {
    /// Adds an object. Returns `false`, without adding it, if the queue is full.
    pub(super) fn add(&self, key: &str, change: PendingStoreChange) -> bool {
        let mut pending = self.pending.lock();
        if !pending.contains_key(key) {
            if pending.len() >= MAX_PENDING {
                return false;
            }
            pending.insert(key.to_owned(), change);
        }
        self.changed.notify_one();
        true
    }

    /// Takes all pending objects, waiting for at least one.
    pub(super) async fn drain(&self) -> HashMap<String, PendingStoreChange> {
        loop {
            let pending = std::mem::take(&mut *self.pending.lock());
            if !pending.is_empty() {
                return pending;
            }
            self.changed.notified().await;
        }
    }

    pub(super) fn clear(&self) {
        self.pending.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use moongate_scheduler::index::BlockPartIndex;

    use super::*;

    #[tokio::test]
    async fn the_queue_is_bounded() {
        let changes = StoreChangeQueue::default();
        let change = |event_time_ms| PendingStoreChange {
            stored: StoredBlockPart { block: 1, part: BlockPartIndex::new(0, 1).unwrap() },
            event_time_ms,
        };
        for number in 0..MAX_PENDING {
            assert!(changes.add(&number.to_string(), change(1)));
        }
        assert!(!changes.add("another", change(1)));
        assert!(changes.add("7", change(2)), "it waits already");
        let pending = changes.drain().await;
        assert_eq!(
            (pending.len(), pending["7"].event_time_ms),
            (MAX_PENDING, 1),
            "the lag counts from the first event"
        );
        assert!(changes.add("another", change(1)));
        assert_eq!(changes.drain().await.len(), 1);
    }
}
