//! Segments that are much emptier than the others, such as those of a node that has just joined a full pool.
//!
//! When all other segments are full, every write would go to them: the node that has cached the least would serve all new traffic. So
//! only a share of the writes may use them in place of a full segment. The others evict old objects.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::segment::SegmentTable;

/// Difference between the used share of the other segments and that of a segment, above which the segment is filling.
const MARGIN: f64 = 0.1;
/// Filling segments get at most their share of the capacity by random choice, and this multiple of it in place of full segments:
/// together less than twice their share.
const FALLBACK_FACTOR: f64 = 0.8;

/// The share of writes that may use a filling segment in place of a full one.
#[derive(Debug)]
pub(crate) struct FallbackShare(
    /// Bits of an `f64` from 0 to 1.
    AtomicU64,
);

impl Default for FallbackShare {
    fn default() -> Self {
        Self(AtomicU64::new(1.0_f64.to_bits()))
    }
}

impl FallbackShare {
    /// 1 if no segment is filling.
    pub(crate) fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }

    /// Determines which segments are filling.
    pub(crate) fn refresh(&self, segments: &SegmentTable) {
        let writable = || segments.iter().map(|(_, segment)| segment).filter(|segment| segment.is_writable());
        let (used, capacity) = writable().fold((0_u64, 0_u64), |(used, capacity), segment| {
            (used.saturating_add(segment.used()), capacity.saturating_add(segment.descriptor.size))
        });
        let mut filling = 0_u64;
        for segment in writable() {
            let size = segment.descriptor.size;
            let other_used = used.saturating_sub(segment.used()) as f64;
            let other_free_ratio = 1.0 - other_used / capacity.saturating_sub(size).max(1) as f64;
            let is_filling = size < capacity && segment.free_ratio() - other_free_ratio > MARGIN;
            segment.set_filling(is_filling);
            filling = filling.saturating_add(if is_filling { size } else { 0 });
        }
        let share = match filling {
            0 => 1.0,
            _ => FALLBACK_FACTOR * filling as f64 / capacity.saturating_sub(filling).max(1) as f64,
        };
        self.0.store(share.min(1.0).to_bits(), Relaxed);
    }
}
