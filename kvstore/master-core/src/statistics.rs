//! What a master has done, in numbers.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters. They only grow.
#[derive(Debug, Default)]
pub(crate) struct MasterCounters {
    pub(crate) evicted_keys: AtomicU64,
    pub(crate) evicted_bytes: AtomicU64,
    pub(crate) eviction_rounds: AtomicU64,
    pub(crate) attempted_evictions: AtomicU64,
    pub(crate) allocation_failures: AtomicU64,
    pub(crate) partial_allocations: AtomicU64,
    pub(crate) discarded_puts: AtomicU64,
    pub(crate) upserts_in_place: AtomicU64,
    pub(crate) lost_keys: AtomicU64,
    pub(crate) hot_keys: AtomicU64,
    pub(crate) offloaded_keys: AtomicU64,
    pub(crate) promotions: AtomicU64,
    pub(crate) promoted_keys: AtomicU64,
    pub(crate) promoted_bytes: AtomicU64,
    pub(crate) promotions_failed: AtomicU64,
    pub(crate) promotions_expired: AtomicU64,
    pub(crate) promotions_rejected_frequency: AtomicU64,
    pub(crate) promotions_rejected_watermark: AtomicU64,
    pub(crate) promotions_rejected_cap: AtomicU64,
}

/// What a master has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MasterStatistics {
    /// Objects that were evicted.
    pub evicted_keys: u64,
    /// Bytes of those.
    pub evicted_bytes: u64,
    /// Rounds of eviction that evicted something.
    pub eviction_rounds: u64,
    /// Rounds of eviction that were begun, because of the watermark or for want of space.
    pub attempted_evictions: u64,
    /// Requests for space that were refused.
    pub allocation_failures: u64,
    /// Requests for space that got fewer replicas than they asked for.
    pub partial_allocations: u64,
    /// Bytes of objects whose places in memory were told to readers, each counted once per read.
    pub read_bytes: u64,
    /// Puts that were not ended in time.
    pub discarded_puts: u64,
    /// Upserts that overwrote the present version in place, because there was no space for both: it is lost if they fail.
    pub upserts_in_place: u64,
    /// Objects that were lost with their segments.
    pub lost_keys: u64,
    /// Objects that were found to be read often.
    pub hot_keys: u64,
    /// Reads that were sent to a disk, because the object was in no memory.
    pub disk_reads: u64,
    /// Bytes of those.
    pub disk_read_bytes: u64,
    /// Objects that were put on disks.
    pub offloaded_keys: u64,
    /// Requests to bring an object back from a disk.
    pub promotions: u64,
    /// Objects that were brought back.
    pub promoted_keys: u64,
    /// Bytes of those.
    pub promoted_bytes: u64,
    /// Objects that could not be brought back.
    pub promotions_failed: u64,
    /// Objects that were not brought back in time.
    pub promotions_expired: u64,
    /// Reads of objects on disks that were too few to bring them back.
    pub promotions_rejected_frequency: u64,
    /// Reads of objects on disks that were not brought back because memory was nearly full.
    pub promotions_rejected_watermark: u64,
    /// Reads of objects on disks that were not brought back because too many were on their way.
    pub promotions_rejected_cap: u64,
}

impl MasterCounters {
    pub(crate) fn add(counter: &AtomicU64, number: u64) {
        counter.fetch_add(number, Relaxed);
    }

    /// All but what the shards count.
    pub(crate) fn read(&self) -> MasterStatistics {
        MasterStatistics {
            evicted_keys: self.evicted_keys.load(Relaxed),
            evicted_bytes: self.evicted_bytes.load(Relaxed),
            eviction_rounds: self.eviction_rounds.load(Relaxed),
            attempted_evictions: self.attempted_evictions.load(Relaxed),
            allocation_failures: self.allocation_failures.load(Relaxed),
            partial_allocations: self.partial_allocations.load(Relaxed),
            read_bytes: 0,
            discarded_puts: self.discarded_puts.load(Relaxed),
            upserts_in_place: self.upserts_in_place.load(Relaxed),
            lost_keys: self.lost_keys.load(Relaxed),
            hot_keys: self.hot_keys.load(Relaxed),
            disk_reads: 0,
            disk_read_bytes: 0,
            offloaded_keys: self.offloaded_keys.load(Relaxed),
            promotions: self.promotions.load(Relaxed),
            promoted_keys: self.promoted_keys.load(Relaxed),
            promoted_bytes: self.promoted_bytes.load(Relaxed),
            promotions_failed: self.promotions_failed.load(Relaxed),
            promotions_expired: self.promotions_expired.load(Relaxed),
            promotions_rejected_frequency: self.promotions_rejected_frequency.load(Relaxed),
            promotions_rejected_watermark: self.promotions_rejected_watermark.load(Relaxed),
            promotions_rejected_cap: self.promotions_rejected_cap.load(Relaxed),
        }
    }
}
