//! The staging buffer, into which objects on disk are loaded for readers.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use moongate_memory::MappedRegion;
use parking_lot::Mutex;

/// How long staged objects stay unless they are released. A reader that takes longer must treat its read as failed.
pub(crate) const STAGED_TTL: Duration = Duration::from_secs(5);
/// Alignment of objects in the buffer, in bytes.
const ALIGN: u64 = 4096;

/// A buffer whose parts are allocated to readers for a limited time.
#[derive(Debug)]
pub(crate) struct StagingBuffer {
    region: Arc<MappedRegion>,
    parts: Mutex<StagingTable>,
}

#[derive(Debug, Default)]
struct StagingTable {
    batches: HashMap<u64, StagingBatch>,
    /// Start and end offset of each allocated part.
    allocated: BTreeMap<u64, u64>,
}

#[derive(Debug)]
struct StagingBatch {
    /// `None` while objects are loaded: an expired part could be allocated again while bytes are still written to it.
    expires_at: Option<Instant>,
    offsets: Vec<u64>,
}

/// Parts that were allocated, and are released, together.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StagingAllocation {
    pub(crate) batch: u64,
    pub(crate) offsets: Vec<u64>,
}

impl StagingBuffer {
    pub(crate) fn new(region: Arc<MappedRegion>) -> Self {
        Self { region, parts: Mutex::default() }
    }

    pub(crate) fn region(&self) -> &Arc<MappedRegion> {
        &self.region
    }

    /// Allocates parts of these sizes. None if the free space is too small.
    pub(crate) fn allocate(&self, sizes: &[u64], now: Instant) -> Option<StagingAllocation> {
        let mut parts = self.parts.lock();
        parts.expire(now);
        let mut offsets = Vec::with_capacity(sizes.len());
        for size in sizes {
            let Some(offset) = parts.find_gap(*size, self.region.len()) else {
                offsets.iter().for_each(|offset| _ = parts.allocated.remove(offset));
                return None;
            };
            offsets.push(offset);
        }
        // Random, so that a reader cannot guess and release another reader's batch.
        let batch = fastrand::u64(..);
        parts.batches.insert(batch, StagingBatch { expires_at: None, offsets: offsets.clone() });
        Some(StagingAllocation { batch, offsets })
    }

    /// Marks a batch as loaded at `now`: it expires after [`STAGED_TTL`].
    pub(crate) fn mark_filled(&self, batch: u64, now: Instant) {
        if let Some(batch) = self.parts.lock().batches.get_mut(&batch) {
            batch.expires_at = Some(now + STAGED_TTL);
        }
    }

    /// Frees a batch. Returns whether it existed.
    pub(crate) fn release(&self, batch: u64) -> bool {
        self.parts.lock().release(batch)
    }
}

impl StagingTable {
    fn expire(&mut self, now: Instant) {
        let is_expired = |(id, batch): (&u64, &StagingBatch)| {
            batch.expires_at.is_some_and(|until| until <= now).then_some(*id)
        };
        let expired: Vec<u64> = self.batches.iter().filter_map(is_expired).collect();
        for batch in expired {
            self.release(batch);
        }
    }

    fn release(&mut self, batch: u64) -> bool {
        let Some(batch) = self.batches.remove(&batch) else { return false };
        batch.offsets.iter().for_each(|offset| _ = self.allocated.remove(offset));
        true
    }

    /// Allocates the first free gap that is large enough, and returns its offset.
    fn find_gap(&mut self, size: u64, end: u64) -> Option<u64> {
        let size = size.checked_next_multiple_of(ALIGN)?;
        let mut offset = 0_u64;
        for (part_start, part_end) in &self.allocated {
            if offset.checked_add(size)? <= *part_start {
                break;
            }
            offset = *part_end;
        }
        let part_end = offset.checked_add(size).filter(|part_end| *part_end <= end)?;
        self.allocated.insert(offset, part_end);
        Some(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moongate_memory::PageMode;

    fn staging() -> StagingBuffer {
        StagingBuffer::new(Arc::new(MappedRegion::anonymous(10 * ALIGN, PageMode::Normal).unwrap()))
    }

    #[test]
    fn parts_do_not_overlap_and_are_reused_after_release() {
        let (staging, now) = (staging(), Instant::now());
        let first = staging.allocate(&[1, ALIGN + 1, ALIGN], now).unwrap();
        assert_eq!(first.offsets, [0, ALIGN, 3 * ALIGN]);
        let second = staging.allocate(&[5 * ALIGN], now).unwrap();
        assert_eq!(second.offsets, [4 * ALIGN]);
        assert_eq!(staging.allocate(&[ALIGN, ALIGN], now), None, "only one more part fits");
        assert_eq!(staging.allocate(&[ALIGN], now).unwrap().offsets, [9 * ALIGN]);
        assert!(staging.release(first.batch) && !staging.release(first.batch));
        assert_eq!(staging.allocate(&[4 * ALIGN], now).unwrap().offsets, [0]);
        assert_eq!(staging.allocate(&[u64::MAX], now), None);
    }

    #[test]
    fn unreleased_parts_expire_after_their_ttl() {
        let (staging, now) = (staging(), Instant::now());
        let first = staging.allocate(&[10 * ALIGN], now).unwrap();
        let loaded_at = now + 2 * STAGED_TTL;
        assert_eq!(staging.allocate(&[1], loaded_at), None, "a batch that is being loaded does not expire");
        staging.mark_filled(first.batch, loaded_at);
        assert_eq!(staging.allocate(&[1], loaded_at + STAGED_TTL / 2), None);
        assert!(staging.allocate(&[1], loaded_at + STAGED_TTL).is_some());
        assert!(!staging.release(first.batch));
    }
}
