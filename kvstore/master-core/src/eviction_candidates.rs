//! The next candidates for eviction: of every queue the oldest entry of all shards, ordered by the value of keeping it.

use std::sync::Arc;

use moongate_retention::RetentionValues;

use crate::eviction_decision::EvictionPass;
use crate::object::EvictionQueue;
use crate::object_table::ObjectTable;
use crate::oldest_entries::OldestEntry;
use crate::recent_writes::WriteProtection;

/// The oldest entry of one queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EvictionCandidate {
    pub(crate) queue: EvictionQueue,
    pub(crate) oldest: OldestEntry,
    value: f32,
}

/// Candidates of one pass. Queues change in the meantime, so a candidate must be checked under the lock of its shard.
#[derive(Debug)]
pub(crate) struct EvictionCandidates {
    pass: EvictionPass,
    values: Arc<RetentionValues>,
    candidates: Vec<EvictionCandidate>,
}

impl EvictionCandidates {
    pub(crate) fn new(
        objects: &ObjectTable,
        pass: EvictionPass,
        protected: WriteProtection,
        now_ms: u64,
    ) -> Self {
        let mut candidates = Self { pass, values: objects.retention.values(), candidates: Vec::new() };
        candidates.collect(objects, protected, now_ms);
        candidates
    }

    /// Searches all queues.
    pub(crate) fn collect(&mut self, objects: &ObjectTable, protected: WriteProtection, now_ms: u64) {
        self.candidates.clear();
        match self.pass {
            EvictionPass::Unpinned => {
                for queue in EvictionQueue::unpinned() {
                    self.add(objects, queue, protected, now_ms);
                }
            }
            EvictionPass::SoftPinned => self.add(objects, EvictionQueue::SoftPinned, protected, now_ms),
        }
    }

    /// The candidate with the smallest value; of equal ones, the oldest.
    pub(crate) fn first(&self) -> Option<EvictionCandidate> {
        let order = |left: &&EvictionCandidate, right: &&EvictionCandidate| {
            let (left_stamp, right_stamp) = (left.oldest.stamp, right.oldest.stamp);
            left.value.total_cmp(&right.value).then(left_stamp.cmp(&right_stamp))
        };
        self.candidates.iter().min_by(order).copied()
    }

    /// Searches one queue again, after its candidate has left it.
    pub(crate) fn replace(
        &mut self,
        objects: &ObjectTable,
        queue: EvictionQueue,
        protected: WriteProtection,
        now_ms: u64,
    ) {
        self.candidates.retain(|candidate| candidate.queue != queue);
        self.add(objects, queue, protected, now_ms);
    }

    fn add(&mut self, objects: &ObjectTable, queue: EvictionQueue, protected: WriteProtection, now_ms: u64) {
        let Some(oldest) = objects.oldest_entries.oldest(queue) else { return };
        let is_protected = matches!(queue, EvictionQueue::Unread(_)) && protected.contains(oldest.stamp);
        if oldest.stamp <= now_ms && !is_protected {
            let value = self.values.value(queue.class(), objects.unused_ms(queue, oldest.stamp, now_ms));
            self.candidates.push(EvictionCandidate { queue, oldest, value });
        }
    }
}

impl ObjectTable {
    /// Milliseconds since the last use of an entry with this stamp: leases end after it.
    fn unused_ms(&self, queue: EvictionQueue, stamp: u64, now_ms: u64) -> u64 {
        let since = now_ms.saturating_sub(stamp);
        match queue {
            EvictionQueue::Leased(_) => since.saturating_add(self.settings.lease_ttl_ms),
            _ => since,
        }
    }

    /// Unpinned queues that have entries in this shard, by the value of keeping their oldest entry.
    pub(crate) fn unpinned_queues_by_value(
        &self,
        oldest_stamp: impl Fn(EvictionQueue) -> Option<u64>,
        now_ms: u64,
    ) -> Vec<EvictionQueue> {
        let values = self.retention.values();
        let mut queues: Vec<(f32, u64, EvictionQueue)> = EvictionQueue::unpinned()
            .filter_map(|queue| {
                let stamp = oldest_stamp(queue)?;
                Some((values.value(queue.class(), self.unused_ms(queue, stamp, now_ms)), stamp, queue))
            })
            .collect();
        queues.sort_by(|left, right| left.0.total_cmp(&right.0).then(left.1.cmp(&right.1)));
        queues.into_iter().map(|(_, _, queue)| queue).collect()
    }
}
