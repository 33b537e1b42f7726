//! Queue of objects to reconcile: each at most once at a time, immediately or at a scheduled time.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Duration;

use moongate_runtime::BackoffPolicy;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::ResourceKey;

/// Pauses before a failed key is reconciled again.
const RETRY: BackoffPolicy =
    BackoffPolicy { initial: Duration::from_millis(50), max: Duration::from_secs(60) };

/// Queue of keys. Each key is in it at most once, so its length is bounded by the number of objects.
#[derive(Debug, Default)]
pub(super) struct ReconcileQueue {
    inner: Mutex<ReconcileQueueState>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct ReconcileQueueState {
    ready: VecDeque<ResourceKey>,
    queued: HashSet<ResourceKey>,
    running: HashSet<ResourceKey>,
    scheduled: BTreeSet<(Instant, ResourceKey)>,
    /// Due time of each scheduled key.
    due_at: HashMap<ResourceKey, Instant>,
    failures: HashMap<ResourceKey, u32>,
}

impl ReconcileQueue {
    /// Queues a key for reconciliation as soon as possible.
    pub(super) fn push(&self, key: ResourceKey) {
        let mut inner = self.inner.lock();
        if inner.queued.insert(key.clone()) && !inner.running.contains(&key) {
            inner.ready.push_back(key);
            drop(inner);
            self.changed.notify_one();
        }
    }

    /// Number of keys that are due.
    pub(super) fn ready_count(&self) -> usize {
        self.inner.lock().ready.len()
    }

    /// Schedules a key, replacing its previous time: the latest plan decides.
    pub(super) fn push_at(&self, at: Instant, key: ResourceKey) {
        self.inner.lock().schedule(at, key);
        self.changed.notify_one();
    }

    /// The next key. No other worker gets it before [`Self::done`].
    pub(super) async fn next(&self) -> ResourceKey {
        loop {
            let changed = self.changed.notified();
            let due = {
                let mut inner = self.inner.lock();
                inner.promote_due(Instant::now());
                if let Some(key) = inner.ready.pop_front() {
                    inner.queued.remove(&key);
                    inner.running.insert(key.clone());
                    if !inner.ready.is_empty() {
                        self.changed.notify_one();
                    }
                    return key;
                }
                inner.scheduled.first().map(|(at, _)| *at)
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

    /// Completes a key. A failed one is retried with exponential back-off.
    pub(super) fn done(&self, key: &ResourceKey, success: bool) {
        let mut inner = self.inner.lock();
        inner.running.remove(key);
        if success {
            inner.failures.remove(key);
        } else {
            let failures = inner.failures.entry(key.clone()).or_default();
            *failures = failures.saturating_add(1);
            let at = Instant::now() + RETRY.pause(*failures);
            let earlier = inner.due_at.get(key).filter(|due| **due < at).copied();
            inner.schedule(earlier.unwrap_or(at), key.clone());
        }
        if inner.queued.contains(key) {
            inner.ready.push_back(key.clone());
        }
        drop(inner);
        self.changed.notify_one();
    }
}

impl ReconcileQueueState {
    fn schedule(&mut self, at: Instant, key: ResourceKey) {
        if let Some(before) = self.due_at.insert(key.clone(), at) {
            self.scheduled.remove(&(before, key.clone()));
        }
        self.scheduled.insert((at, key));
    }

    fn promote_due(&mut self, now: Instant) {
        while let Some((at, _)) = self.scheduled.first()
            && *at <= now
            && let Some((_, key)) = self.scheduled.pop_first()
        {
            self.due_at.remove(&key);
            if self.queued.insert(key.clone()) && !self.running.contains(&key) {
                self.ready.push_back(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ResourceKind;

    fn key(name: &str) -> ResourceKey {
        ResourceKey { kind: ResourceKind::Group, namespace: "n".into(), name: name.into() }
    }

    #[tokio::test]
    async fn each_key_is_processed_by_one_worker_at_a_time() {
        let queue = ReconcileQueue::default();
        queue.push(key("a"));
        queue.push(key("a"));
        queue.push(key("b"));
        assert_eq!(queue.next().await, key("a"));
        queue.push(key("a"));
        assert_eq!(queue.next().await, key("b"));
        assert!(queue.inner.lock().ready.is_empty());
        queue.done(&key("a"), true);
        assert_eq!(queue.next().await, key("a"), "it was queued meanwhile");
        queue.done(&key("a"), false);
        assert_eq!(queue.next().await, key("a"), "it is retried");
    }

    #[test]
    fn each_key_has_one_scheduled_time() {
        let queue = ReconcileQueue::default();
        let now = Instant::now();
        let after = |seconds: u64| now + Duration::from_secs(seconds);
        for seconds in [100, 300, 200] {
            queue.push_at(after(seconds), key("a"));
        }
        queue.push_at(after(250), key("b"));
        let waiting =
            |queue: &ReconcileQueue| queue.inner.lock().scheduled.iter().cloned().collect::<Vec<_>>();
        assert_eq!(waiting(&queue), [(after(200), key("a")), (after(250), key("b"))]);
        queue.inner.lock().promote_due(after(200));
        assert_eq!(waiting(&queue), [(after(250), key("b"))]);
        assert_eq!(queue.ready_count(), 1);
        // A failed key is retried no later than its scheduled time.
        queue.done(&key("b"), false);
        let retried = waiting(&queue);
        assert!(retried.len() == 1 && retried[0].0 < after(250), "{retried:?}");
        queue.push_at(now, key("c"));
        queue.done(&key("c"), false);
        assert_eq!(waiting(&queue)[0], (now, key("c")));
        queue.inner.lock().promote_due(after(300));
        assert!(queue.inner.lock().due_at.is_empty());
    }
}
