//! The oldest entry of every eviction queue in every shard, readable without locking the shards.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::indices::ShardIndex;
use crate::object::EvictionQueue;

/// Stamp of an empty queue.
const EMPTY: u64 = u64::MAX;

/// The entry with the oldest stamp of all shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OldestEntry {
    pub(crate) shard: ShardIndex,
    pub(crate) stamp: u64,
}

/// Stamps of the first entries, by queue and shard.
#[derive(Debug)]
pub(crate) struct OldestEntries {
    shards: usize,
    stamps: Box<[AtomicU64]>,
    /// By queue, the number of shards in which it has entries: most queues are empty everywhere.
    occupied: Box<[AtomicU32]>,
}

impl OldestEntries {
    pub(crate) fn new(shards: usize) -> Self {
        let stamps = (0..shards * EvictionQueue::COUNT).map(|_| AtomicU64::new(EMPTY)).collect();
        let occupied = (0..EvictionQueue::COUNT).map(|_| AtomicU32::new(0)).collect();
        Self { shards, stamps, occupied }
    }

    fn of_queue(&self, queue: EvictionQueue) -> &[AtomicU64] {
        &self.stamps[queue.number().get() * self.shards..][..self.shards]
    }

    /// Sets the stamp of a queue's first entry in a shard, which the caller has locked; `u64::MAX` if it is empty.
    pub(crate) fn set(&self, queue: EvictionQueue, shard: ShardIndex, stamp: u64) {
        let before = self.of_queue(queue)[shard.get()].swap(stamp, Relaxed);
        let occupied = &self.occupied[queue.number().get()];
        match (before == EMPTY, stamp == EMPTY) {
            (true, false) => _ = occupied.fetch_add(1, Relaxed),
            (false, true) => _ = occupied.fetch_sub(1, Relaxed),
            (true, true) | (false, false) => {}
        }
    }

    /// The oldest entry of a queue; `None` if it is empty in all shards.
    pub(crate) fn oldest(&self, queue: EvictionQueue) -> Option<OldestEntry> {
        if self.occupied[queue.number().get()].load(Relaxed) == 0 {
            return None;
        }
        let stamps = self.of_queue(queue).iter().map(|stamp| stamp.load(Relaxed));
        let (shard, stamp) = stamps.enumerate().min_by_key(|(_, stamp)| *stamp)?;
        (stamp != EMPTY).then(|| OldestEntry { shard: ShardIndex::new(shard), stamp })
    }
}
