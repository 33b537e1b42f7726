//! The oldest entry of every eviction queue in every shard, readable without locking the shards.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::indices::ShardIndex;
use crate::object::EvictionQueue;

/// The entry with the oldest stamp of all shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OldestEntry {
    pub(crate) shard: ShardIndex,
    pub(crate) stamp: u64,
}

/// Stamps of the first entries, by queue and shard; `u64::MAX` for an empty queue.
#[derive(Debug)]
pub(crate) struct OldestEntries {
    shards: usize,
    stamps: Box<[AtomicU64]>,
}

impl OldestEntries {
    pub(crate) fn new(shards: usize) -> Self {
        let stamps = (0..shards * EvictionQueue::COUNT).map(|_| AtomicU64::new(u64::MAX)).collect();
        Self { shards, stamps }
    }

    fn of_queue(&self, queue: EvictionQueue) -> &[AtomicU64] {
        &self.stamps[queue.number() * self.shards..][..self.shards]
    }

    pub(crate) fn set(&self, queue: EvictionQueue, shard: ShardIndex, stamp: u64) {
        self.of_queue(queue)[shard.get()].store(stamp, Relaxed);
    }

    /// The oldest entry of a queue; `None` if it is empty in all shards.
    pub(crate) fn oldest(&self, queue: EvictionQueue) -> Option<OldestEntry> {
        let stamps = self.of_queue(queue).iter().map(|stamp| stamp.load(Relaxed));
        let (shard, stamp) = stamps.enumerate().min_by_key(|(_, stamp)| *stamp)?;
        (stamp != u64::MAX).then(|| OldestEntry { shard: ShardIndex::new(shard), stamp })
    }
}
