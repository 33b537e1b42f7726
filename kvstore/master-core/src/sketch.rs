//! Approximate read counts of keys in a fixed amount of memory.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering::Relaxed};

use crate::split_mix::mix;

const ROWS: usize = 4;
const WIDTH: usize = 4096;

/// A count-min sketch with decay: it never counts too few reads, except that all counters are halved after as many reads as
/// there are counters (16 384).
#[derive(Debug)]
pub(crate) struct CountMinSketch {
    /// Counters row by row; empty if the sketch is disabled.
    counters: Box<[AtomicU8]>,
    counted: AtomicUsize,
}

impl CountMinSketch {
    pub(crate) fn new(enabled: bool) -> Self {
        let counters = if enabled { ROWS * WIDTH } else { 0 };
        Self { counters: (0..counters).map(|_| AtomicU8::new(0)).collect(), counted: AtomicUsize::new(0) }
    }

    /// Counts a read of the key with this hash and returns the estimated number of its reads.
    pub(crate) fn count(&self, hash: u64) -> u8 {
        let mut estimate = u8::MAX;
        let mut random = hash;
        for row in self.counters.chunks(WIDTH) {
            random = mix(random);
            let Some(counter) = row.get(random as usize % WIDTH) else { return 0 };
            let add = |count: u8| count.checked_add(1);
            let before = counter.fetch_update(Relaxed, Relaxed, add).unwrap_or(u8::MAX);
            estimate = estimate.min(before.saturating_add(1));
        }
        if self.counted.fetch_add(1, Relaxed) + 1 == ROWS * WIDTH {
            self.counted.store(0, Relaxed);
            for counter in &self.counters {
                let _ = counter.fetch_update(Relaxed, Relaxed, |count| Some(count / 2));
            }
        }
        estimate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "tens of thousands of reads take minutes")]
    fn reads_are_counted_and_decay() {
        let sketch = CountMinSketch::new(true);
        assert_eq!([sketch.count(7), sketch.count(7), sketch.count(7), sketch.count(8)], [1, 2, 3, 1]);
        (0..300).for_each(|_| _ = sketch.count(9));
        assert_eq!(sketch.count(9), u8::MAX);
        (305..ROWS * WIDTH).for_each(|_| _ = sketch.count(10));
        assert_eq!(sketch.count(9), 128);
        assert_eq!(sketch.count(7), 2);
    }
}
