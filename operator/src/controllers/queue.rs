//! Objects whose plan is due: each at most once at a time, and later ones at their time.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::observed::Key;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// A queue of keys. It holds each key once, so it is no longer than there are objects.
#[derive(Debug, Default)]
pub(super) struct Queue {
    inner: Mutex<Inner>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    ready: VecDeque<Key>,
    queued: HashSet<Key>,
    running: HashSet<Key>,
    later: BTreeSet<(Instant, Key)>,
    failures: HashMap<Key, u32>,
}

impl Queue {
    /// Asks for a plan soon.
    pub(super) fn push(&self, key: Key) {
        let mut inner = self.inner.lock();
        if inner.queued.insert(key.clone()) && !inner.running.contains(&key) {
            inner.ready.push_back(key);
            drop(inner);
            self.changed.notify_one();
        }
    }

    /// Keys that could be worked on now.
    pub(super) fn waiting(&self) -> usize {
        self.inner.lock().ready.len()
    }

    /// Asks for a plan at a time.
    pub(super) fn push_at(&self, at: Instant, key: Key) {
        self.inner.lock().later.insert((at, key));
        self.changed.notify_one();
    }

    /// The next key. Nobody else gets it before [`Self::done`].
    pub(super) async fn next(&self) -> Key {
        loop {
            let changed = self.changed.notified();
            let due = {
                let mut inner = self.inner.lock();
                inner.wake(Instant::now());
                if let Some(key) = inner.ready.pop_front() {
                    inner.queued.remove(&key);
                    inner.running.insert(key.clone());
                    if !inner.ready.is_empty() {
                        self.changed.notify_one();
                    }
                    return key;
                }
                inner.later.first().map(|(at, _)| *at)
            };
            match due {
                Some(due) => tokio::select! {
                    () = changed => {}
                    () = tokio::time::sleep_until(due) => {}
                },
                None => changed.await,
            }
        }
    }

    /// The plan for the key was carried out, or failed: then it is tried again, ever more patiently.
    pub(super) fn done(&self, key: &Key, success: bool) {
        let mut inner = self.inner.lock();
        inner.running.remove(key);
        if success {
            inner.failures.remove(key);
        } else {
            let failures = inner.failures.entry(key.clone()).or_default();
            *failures = failures.saturating_add(1);
            let pause = FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1)));
            let at = Instant::now() + pause.min(LONGEST_PAUSE);
            inner.later.insert((at, key.clone()));
        }
        if inner.queued.contains(key) {
            inner.ready.push_back(key.clone());
        }
        drop(inner);
        self.changed.notify_one();
    }
}

impl Inner {
    fn wake(&mut self, now: Instant) {
        while let Some((at, _)) = self.later.first()
            && *at <= now
            && let Some((_, key)) = self.later.pop_first()
        {
            if self.queued.insert(key.clone()) && !self.running.contains(&key) {
                self.ready.push_back(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;

    fn key(name: &str) -> Key {
        Key { kind: Kind::Group, namespace: "n".into(), name: name.into() }
    }

    #[tokio::test]
    async fn nobody_works_twice_on_one_key_at_a_time() {
        let queue = Queue::default();
        queue.push(key("a"));
        queue.push(key("a"));
        queue.push(key("b"));
        assert_eq!(queue.next().await, key("a"));
        queue.push(key("a"));
        assert_eq!(queue.next().await, key("b"));
        assert!(queue.inner.lock().ready.is_empty());
        queue.done(&key("a"), true);
        assert_eq!(queue.next().await, key("a"), "it was asked for meanwhile");
        queue.done(&key("a"), false);
        assert_eq!(queue.next().await, key("a"), "it is tried again");
    }
}
