//! Locks that allow one write of a key at a time.
//!
//! A master distinguishes writers by client id only. With two concurrent writes of a key by one client, it could end or revoke the
//! wrong one, and so make bytes visible that are still being written.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;

/// The keys that a client is writing, each with a channel that closes when the key is free.
#[derive(Clone, Default)]
pub(crate) struct KeyLocks(Arc<Mutex<HashMap<Arc<str>, watch::Receiver<()>>>>);

/// Holds the lock of a key until all clones are dropped.
#[derive(Clone)]
pub(crate) struct KeyLockGuard {
    _entry: Arc<KeyLockEntry>,
}

struct KeyLockEntry {
    locks: KeyLocks,
    key: Arc<str>,
    /// Dropped after the key was removed from the map, which wakes the waiters.
    _released: watch::Sender<()>,
}

impl Drop for KeyLockEntry {
    fn drop(&mut self) {
        self.locks.0.lock().remove(&self.key);
    }
}

impl KeyLocks {
    /// Locks a key. None if it is locked.
    pub(crate) fn try_lock(&self, key: &str) -> Option<KeyLockGuard> {
        self.lock_or_waiter(key).ok()
    }

    /// Waits until a key is free, and locks it.
    pub(crate) async fn lock(&self, key: &str) -> KeyLockGuard {
        loop {
            match self.lock_or_waiter(key) {
                Ok(guard) => return guard,
                // No value is ever sent: the loop ends when the sender is dropped.
                Err(mut released) => while released.changed().await.is_ok() {},
            }
        }
    }

    fn lock_or_waiter(&self, key: &str) -> Result<KeyLockGuard, watch::Receiver<()>> {
        let mut writing = self.0.lock();
        if let Some(released) = writing.get(key) {
            return Err(released.clone());
        }
        let (key, (sender, released)): (Arc<str>, _) = (key.into(), watch::channel(()));
        writing.insert(Arc::clone(&key), released);
        Ok(KeyLockGuard { _entry: Arc::new(KeyLockEntry { locks: self.clone(), key, _released: sender }) })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn key_stays_locked_until_all_guard_clones_are_dropped() {
        let locks = KeyLocks::default();
        let first = locks.lock("a").await;
        assert!(locks.try_lock("a").is_none() && locks.try_lock("b").is_some());
        let clone = first.clone();
        let mut waiter = std::pin::pin!(locks.lock("a"));
        assert!(waiter.as_mut().now_or_never().is_none());
        drop(first);
        assert!(waiter.as_mut().now_or_never().is_none());
        drop(clone);
        let second = waiter.await;
        assert!(locks.try_lock("a").is_none());
        drop(second);
        assert!(locks.try_lock("a").is_some() && locks.0.lock().is_empty());
    }
}
