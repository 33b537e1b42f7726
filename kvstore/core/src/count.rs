//! What a master has done, in numbers.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters. They only grow.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) evicted_keys: AtomicU64,
    pub(crate) evicted_bytes: AtomicU64,
    pub(crate) eviction_rounds: AtomicU64,
    pub(crate) allocation_failures: AtomicU64,
    pub(crate) discarded_puts: AtomicU64,
    pub(crate) lost_keys: AtomicU64,
    pub(crate) hot_keys: AtomicU64,
}

/// What a master has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Objects that were evicted.
    pub evicted_keys: u64,
    /// Bytes of those.
    pub evicted_bytes: u64,
    /// Rounds of eviction that evicted something.
    pub eviction_rounds: u64,
    /// Requests for space that were refused.
    pub allocation_failures: u64,
    /// Puts that were not ended in time.
    pub discarded_puts: u64,
    /// Objects that were lost with their segments.
    pub lost_keys: u64,
    /// Objects that were found to be read often.
    pub hot_keys: u64,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, number: u64) {
        counter.fetch_add(number, Relaxed);
    }

    pub(crate) fn read(&self) -> Counts {
        Counts {
            evicted_keys: self.evicted_keys.load(Relaxed),
            evicted_bytes: self.evicted_bytes.load(Relaxed),
            eviction_rounds: self.eviction_rounds.load(Relaxed),
            allocation_failures: self.allocation_failures.load(Relaxed),
            discarded_puts: self.discarded_puts.load(Relaxed),
            lost_keys: self.lost_keys.load(Relaxed),
            hot_keys: self.hot_keys.load(Relaxed),
        }
    }
}
