//! The buffer in which readers find objects that are on the disk.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use moongate_memory::Region;
use parking_lot::Mutex;

/// For how long objects stay unless they are released. A reader that takes longer counts its read as failed.
pub(crate) const STAY: Duration = Duration::from_secs(5);
/// Objects begin at multiples of this.
const ALIGN: u64 = 4096;

/// A buffer that is given out in parts for a while.
#[derive(Debug)]
pub(crate) struct Staging {
    region: Arc<Region>,
    parts: Mutex<Parts>,
}

#[derive(Debug, Default)]
struct Parts {
    batches: HashMap<u64, Batch>,
    /// Where parts begin that are given out, and where each ends.
    taken: BTreeMap<u64, u64>,
}

#[derive(Debug)]
struct Batch {
    /// Nothing while bytes are still brought there: they must not come into what has been given to another by then.
    until: Option<Instant>,
    offsets: Vec<u64>,
}

/// Parts that were given out together.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Given {
    pub(crate) batch: u64,
    pub(crate) offsets: Vec<u64>,
}

impl Staging {
    pub(crate) fn new(region: Arc<Region>) -> Self {
        Self { region, parts: Mutex::default() }
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Gives out parts of these sizes until they are released. None if there is no room.
    pub(crate) fn give(&self, sizes: &[u64], now: Instant) -> Option<Given> {
        let mut parts = self.parts.lock();
        parts.expire(now);
        let mut offsets = Vec::with_capacity(sizes.len());
        for size in sizes {
            let Some(offset) = parts.place(*size, self.region.len()) else {
                offsets.iter().for_each(|offset| _ = parts.taken.remove(offset));
                return None;
            };
            offsets.push(offset);
        }
        // Nobody can release by chance what another reads.
        let batch = fastrand::u64(..);
        parts.batches.insert(batch, Batch { until: None, offsets: offsets.clone() });
        Some(Given { batch, offsets })
    }

    /// The bytes are there `now`: the parts stay for `STAY`.
    pub(crate) fn filled(&self, batch: u64, now: Instant) {
        if let Some(batch) = self.parts.lock().batches.get_mut(&batch) {
            batch.until = Some(now + STAY);
        }
    }

    /// Takes parts back. Whether there were any.
    pub(crate) fn release(&self, batch: u64) -> bool {
        self.parts.lock().release(batch)
    }
}

impl Parts {
    fn expire(&mut self, now: Instant) {
        let over = |(id, batch): (&u64, &Batch)| batch.until.is_some_and(|until| until <= now).then_some(*id);
        let over: Vec<u64> = self.batches.iter().filter_map(over).collect();
        for batch in over {
            self.release(batch);
        }
    }

    fn release(&mut self, batch: u64) -> bool {
        let Some(batch) = self.batches.remove(&batch) else { return false };
        batch.offsets.iter().for_each(|offset| _ = self.taken.remove(offset));
        true
    }

    /// The first gap that is large enough.
    fn place(&mut self, size: u64, end: u64) -> Option<u64> {
        let size = size.checked_next_multiple_of(ALIGN)?;
        let mut at = 0_u64;
        for (start, over) in &self.taken {
            if at.checked_add(size)? <= *start {
                break;
            }
            at = *over;
        }
        let over = at.checked_add(size).filter(|over| *over <= end)?;
        self.taken.insert(at, over);
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moongate_memory::Pages;

    fn staging() -> Staging {
        Staging::new(Arc::new(Region::anonymous(10 * ALIGN, Pages::Normal).unwrap()))
    }

    #[test]
    fn parts_do_not_overlap_and_come_back() {
        let (staging, now) = (staging(), Instant::now());
        let first = staging.give(&[1, ALIGN + 1, ALIGN], now).unwrap();
        assert_eq!(first.offsets, [0, ALIGN, 3 * ALIGN]);
        let second = staging.give(&[5 * ALIGN], now).unwrap();
        assert_eq!(second.offsets, [4 * ALIGN]);
        assert_eq!(staging.give(&[ALIGN, ALIGN], now), None, "there is room for one only");
        assert_eq!(staging.give(&[ALIGN], now).unwrap().offsets, [9 * ALIGN]);
        assert!(staging.release(first.batch) && !staging.release(first.batch));
        assert_eq!(staging.give(&[4 * ALIGN], now).unwrap().offsets, [0]);
        assert_eq!(staging.give(&[u64::MAX], now), None);
    }

    #[test]
    fn what_nobody_releases_comes_back_too() {
        let (staging, now) = (staging(), Instant::now());
        let first = staging.give(&[10 * ALIGN], now).unwrap();
        let filled = now + 2 * STAY;
        assert_eq!(staging.give(&[1], filled), None, "the disk may be slow");
        staging.filled(first.batch, filled);
        assert_eq!(staging.give(&[1], filled + STAY / 2), None);
        assert!(staging.give(&[1], filled + STAY).is_some());
        assert!(!staging.release(first.batch));
    }
}
