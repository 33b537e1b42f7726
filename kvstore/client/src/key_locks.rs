//! One write of a key at a time.
//!
//! A master tells writers apart by the ids of their clients. Of two writes of the same key by one client it would end, or take back,
//! whichever it has, and so make bytes visible that are still being written.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;

/// The keys that a client is writing, and who waits for each.
#[derive(Clone, Default)]
pub(crate) struct KeyLocks(Arc<Mutex<HashMap<Arc<str>, watch::Receiver<()>>>>);

/// A write of a key, until all clones are dropped.
#[derive(Clone)]
pub(crate) struct KeyLockGuard {
    _entry: Arc<KeyLockEntry>,
}

struct KeyLockEntry {
    locks: KeyLocks,
    key: Arc<str>,
    /// Dropped after the key is free, which those notice who wait.
    _released: watch::Sender<()>,
}

impl Drop for KeyLockEntry {
    fn drop(&mut self) {
        self.locks.0.lock().remove(&self.key);
    }
}

impl KeyLocks {
    /// The turn to write a key, unless it is being written.
    pub(crate) fn try_lock(&self, key: &str) -> Option<KeyLockGuard> {
        self.lock_or_waiter(key).ok()
    }

    /// The turn to write a key, when those before are over.
    pub(crate) async fn lock(&self, key: &str) -> KeyLockGuard {
        loop {
            match self.lock_or_waiter(key) {
                Ok(turn) => return turn,
                // Nothing is ever sent: this ends with the sender.
                Err(mut over) => while over.changed().await.is_ok() {},
            }
        }
    }

    fn lock_or_waiter(&self, key: &str) -> Result<KeyLockGuard, watch::Receiver<()>> {
        let mut writing = self.0.lock();
        if let Some(over) = writing.get(key) {
            return Err(over.clone());
        }
        let (key, (sender, over)): (Arc<str>, _) = (key.into(), watch::channel(()));
        writing.insert(Arc::clone(&key), over);
        Ok(KeyLockGuard { _entry: Arc::new(KeyLockEntry { locks: self.clone(), key, _released: sender }) })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_key_is_written_by_one_at_a_time() {
        let turns = KeyLocks::default();
        let first = turns.lock("a").await;
        assert!(turns.try_lock("a").is_none() && turns.try_lock("b").is_some());
        let also = first.clone();
        let mut waits = std::pin::pin!(turns.lock("a"));
        assert!(waits.as_mut().now_or_never().is_none());
        drop(first);
        assert!(waits.as_mut().now_or_never().is_none());
        drop(also);
        let second = waits.await;
        assert!(turns.try_lock("a").is_none());
        drop(second);
        assert!(turns.try_lock("a").is_some() && turns.0.lock().is_empty());
    }
}
