//! The buffer in which readers find objects that are on the disk.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use moongate_memory::MappedRegion;
use parking_lot::Mutex;

/// For how long objects stay unless they are released. A reader that takes longer counts its read as failed.
pub(crate) const STAGED_TTL: Duration = Duration::from_secs(5);
/// Objects begin at multiples of this.
const ALIGN: u64 = 4096;

/// A buffer that is given out in parts for a while.
#[derive(Debug)]
pub(crate) struct StagingBuffer {
    region: Arc<MappedRegion>,
    parts: Mutex<StagingTable>,
}

#[derive(Debug, Default)]
struct StagingTable {
    batches: HashMap<u64, StagingBatch>,
    /// Where parts begin that are given out, and where each ends.
    allocated: BTreeMap<u64, u64>,
}

#[derive(Debug)]
struct StagingBatch {
    /// Nothing while bytes are still brought there: they must not come into what has been given to another by then.
    expires_at: Option<Instant>,
    offsets: Vec<u64>,
}

/// Parts that were given out together.
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

    /// Gives out parts of these sizes until they are released. None if there is no room.
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
        // Nobody can release by chance what another reads.
        let batch = fastrand::u64(..);
        parts.batches.insert(batch, StagingBatch { expires_at: None, offsets: offsets.clone() });
        Some(StagingAllocation { batch, offsets })
    }

    /// The bytes are there `now`: the parts stay for `STAY`.
    pub(crate) fn mark_filled(&self, batch: u64, now: Instant) {
        if let Some(batch) = self.parts.lock().batches.get_mut(&batch) {
            batch.expires_at = Some(now + STAGED_TTL);
        }
    }

    /// Takes parts back. Whether there were any.
    pub(crate) fn release(&self, batch: u64) -> bool {
        self.parts.lock().release(batch)
    }
}

impl StagingTable {
    fn expire(&mut self, now: Instant) {
        let over = |(id, batch): (&u64, &StagingBatch)| {
            batch.expires_at.is_some_and(|until| until <= now).then_some(*id)
        };
        let over: Vec<u64> = self.batches.iter().filter_map(over).collect();
        for batch in over {
            self.release(batch);
        }
    }

    fn release(&mut self, batch: u64) -> bool {
        let Some(batch) = self.batches.remove(&batch) else { return false };
        batch.offsets.iter().for_each(|offset| _ = self.allocated.remove(offset));
        true
    }

    /// The first gap that is large enough.
    fn find_gap(&mut self, size: u64, end: u64) -> Option<u64> {
        let size = size.checked_next_multiple_of(ALIGN)?;
        let mut at = 0_u64;
        for (start, over) in &self.allocated {
            if at.checked_add(size)? <= *start {
                break;
            }
            at = *over;
        }
        let over = at.checked_add(size).filter(|over| *over <= end)?;
        self.allocated.insert(at, over);
        Some(at)
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
    fn parts_do_not_overlap_and_come_back() {
        let (staging, now) = (staging(), Instant::now());
        let first = staging.allocate(&[1, ALIGN + 1, ALIGN], now).unwrap();
        assert_eq!(first.offsets, [0, ALIGN, 3 * ALIGN]);
        let second = staging.allocate(&[5 * ALIGN], now).unwrap();
        assert_eq!(second.offsets, [4 * ALIGN]);
        assert_eq!(staging.allocate(&[ALIGN, ALIGN], now), None, "there is room for one only");
        assert_eq!(staging.allocate(&[ALIGN], now).unwrap().offsets, [9 * ALIGN]);
        assert!(staging.release(first.batch) && !staging.release(first.batch));
        assert_eq!(staging.allocate(&[4 * ALIGN], now).unwrap().offsets, [0]);
        assert_eq!(staging.allocate(&[u64::MAX], now), None);
    }

    #[test]
    fn what_nobody_releases_comes_back_too() {
        let (staging, now) = (staging(), Instant::now());
        let first = staging.allocate(&[10 * ALIGN], now).unwrap();
        let filled = now + 2 * STAGED_TTL;
        assert_eq!(staging.allocate(&[1], filled), None, "the disk may be slow");
        staging.mark_filled(first.batch, filled);
        assert_eq!(staging.allocate(&[1], filled + STAGED_TTL / 2), None);
        assert!(staging.allocate(&[1], filled + STAGED_TTL).is_some());
        assert!(!staging.release(first.batch));
    }
}
