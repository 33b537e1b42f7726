//! Counters of a master's operations.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Monotonic counters, except those that the shards keep.
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

/// Totals of a master's operations since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MasterStatistics {
    pub evicted_keys: u64,
    pub evicted_bytes: u64,
    /// Rounds of eviction that evicted something.
    pub eviction_rounds: u64,
    /// Rounds of eviction started, because of the watermark or a failed allocation.
    pub attempted_evictions: u64,
    /// Allocations that failed for lack of space.
    pub allocation_failures: u64,
    /// Allocations that got fewer replicas than requested.
    pub partial_allocations: u64,
    /// Bytes of objects whose memory replicas were returned to readers, once per read.
    pub read_bytes: u64,
    /// Puts that were not ended in time.
    pub discarded_puts: u64,
    /// Upserts that overwrote the present version in place, because there was no space for both: it is lost if they fail.
    pub upserts_in_place: u64,
    /// Objects lost with their segments or disks.
    pub lost_keys: u64,
    /// Number of times that an object was detected as hot.
    pub hot_keys: u64,
    /// Reads answered with a disk copy because no memory replica was readable.
    pub disk_reads: u64,
    /// Bytes of objects in `disk_reads`.
    pub disk_read_bytes: u64,
    pub offloaded_keys: u64,
    pub promotions: u64,
    /// Number of objects promoted to memory.
    pub promoted_keys: u64,
    pub promoted_bytes: u64,
    /// Promotions that nodes reported as failed.
    pub promotions_failed: u64,
    pub promotions_expired: u64,
    /// Promotions rejected because the object has too few reads.
    pub promotions_rejected_frequency: u64,
    /// Promotions rejected because memory is above the high watermark.
    pub promotions_rejected_watermark: u64,
    /// Promotions rejected because too many are active.
    pub promotions_rejected_cap: u64,
}

impl MasterCounters {
    pub(crate) fn add(counter: &AtomicU64, number: u64) {
        counter.fetch_add(number, Relaxed);
    }

    /// Reads all counters except those that the shards keep.
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
