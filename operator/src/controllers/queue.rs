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
    /// When each of them is due.
    due: HashMap<Key, Instant>,
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

    /// Asks for a plan at a time, and no longer at the one that was asked for before: the latest plan knows best.
    pub(super) fn push_at(&self, at: Instant, key: Key) {
        self.inner.lock().put_off(at, key);
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
            let earlier = inner.due.get(key).filter(|due| **due < at).copied();
            inner.put_off(earlier.unwrap_or(at), key.clone());
        }
        if inner.queued.contains(key) {
            inner.ready.push_back(key.clone());
        }
        drop(inner);
        self.changed.notify_one();
    }
}

impl Inner {
    fn put_off(&mut self, at: Instant, key: Key) {
        if let Some(before) = self.due.insert(key.clone(), at) {
            self.later.remove(&(before, key.clone()));
        }
        self.later.insert((at, key));
    }

    fn wake(&mut self, now: Instant) {
        while let Some((at, _)) = self.later.first()
            && *at <= now
            && let Some((_, key)) = self.later.pop_first()
        {
            self.due.remove(&key);
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

    #[test]
    fn a_key_waits_for_one_time_only() {
        let queue = Queue::default();
        let now = Instant::now();
        let after = |seconds: u64| now + Duration::from_secs(seconds);
        for seconds in [100, 300, 200] {
            queue.push_at(after(seconds), key("a"));
        }
        queue.push_at(after(250), key("b"));
        let waiting = |queue: &Queue| queue.inner.lock().later.iter().cloned().collect::<Vec<_>>();
        assert_eq!(waiting(&queue), [(after(200), key("a")), (after(250), key("b"))]);
        queue.inner.lock().wake(after(200));
        assert_eq!(waiting(&queue), [(after(250), key("b"))]);
        assert_eq!(queue.waiting(), 1);
        // What failed is tried again, before or when it was to be looked at anyway.
        queue.done(&key("b"), false);
        let retried = waiting(&queue);
        assert!(retried.len() == 1 && retried[0].0 < after(250), "{retried:?}");
        queue.push_at(now, key("c"));
        queue.done(&key("c"), false);
        assert_eq!(waiting(&queue)[0], (now, key("c")));
        queue.inner.lock().wake(after(300));
        assert!(queue.inner.lock().due.is_empty());
    }
}
