//! Objects that events have named, until the master is asked for them.

use std::collections::HashMap;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::predict::stored::Stored;

/// Objects that wait at most: 10 MB of keys, and some tenths of a second of the master's time.
const MAX_WAITING: usize = 1 << 16;

/// An object that has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) stored: Stored,
    /// When the master told it, in milliseconds since 1970 by its clock.
    pub(super) told_ms: u64,
}

/// Objects that have changed, by key. One that changes often waits once.
#[derive(Debug, Default)]
pub(super) struct Changes {
    waiting: Mutex<HashMap<String, Change>>,
    more: Notify,
}

impl Changes {
    /// Adds an object. Returns `false`, and does nothing, if too many wait.
    pub(super) fn add(&self, key: &str, change: Change) -> bool {
        let mut waiting = self.waiting.lock();
        if !waiting.contains_key(key) {
            if waiting.len() >= MAX_WAITING {
                return false;
            }
            waiting.insert(key.to_owned(), change);
        }
        self.more.notify_one();
        true
    }

    /// Takes all objects that wait, at least one.
    pub(super) async fn take(&self) -> HashMap<String, Change> {
        loop {
            let taken = std::mem::take(&mut *self.waiting.lock());
            if !taken.is_empty() {
                return taken;
            }
            self.more.notified().await;
        }
    }

    /// Forgets all of them.
    pub(super) fn clear(&self) {
        self.waiting.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use moongate_scheduler::index::Part;

    use super::*;

    #[tokio::test]
    async fn what_waits_is_bounded() {
        let changes = Changes::default();
        let change = |told_ms| Change { stored: Stored { page: 1, part: Part::new(0, 1).unwrap() }, told_ms };
        for number in 0..MAX_WAITING {
            assert!(changes.add(&number.to_string(), change(1)));
        }
        assert!(!changes.add("another", change(1)));
        assert!(changes.add("7", change(2)), "it waits already");
        let taken = changes.take().await;
        assert_eq!(
            (taken.len(), taken["7"].told_ms),
            (MAX_WAITING, 1),
            "the lag counts from the first event"
        );
        assert!(changes.add("another", change(1)));
        assert_eq!(changes.take().await.len(), 1);
    }
}
