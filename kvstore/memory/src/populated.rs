//! Which parts of a region have pages in this process.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of one part: a huge page.
const PART: u64 = 2 << 20;

/// A bit per part of a region, set when all of its pages are mapped.
#[derive(Debug)]
pub(crate) struct PopulatedParts {
    words: Vec<AtomicU64>,
    len: u64,
}

impl PopulatedParts {
    /// No part of a region of `len` bytes.
    pub(crate) fn none_of(len: u64) -> Self {
        let words = usize::try_from(len.div_ceil(PART).div_ceil(64)).unwrap_or(0);
        Self { words: (0..words).map(|_| AtomicU64::new(0)).collect(), len }
    }

    /// Offsets of the parts of a range that are not populated.
    pub(crate) fn missing(&self, offset: u64, len: u64) -> impl Iterator<Item = Range<u64>> {
        let parts = offset / PART..offset.saturating_add(len).min(self.len).div_ceil(PART);
        let missing = parts.filter(|part| {
            self.word(*part).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit == 0)
        });
        missing.map(|part| part * PART..((part + 1) * PART).min(self.len))
    }

    /// Marks the part that begins at `start`.
    pub(crate) fn mark(&self, start: u64) {
        if let Some((word, bit)) = self.word(start / PART) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    fn word(&self, part: u64) -> Option<(&AtomicU64, u64)> {
        let word = self.words.get(usize::try_from(part / 64).ok()?)?;
        Some((word, 1 << (part % 64)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_missing_until_they_are_marked() {
        let parts = PopulatedParts::none_of(70 * PART + 10);
        let missing = |offset, len| parts.missing(offset, len).collect::<Vec<_>>();
        assert_eq!(missing(PART - 1, 2), [0..PART, PART..2 * PART]);
        parts.mark(0);
        assert_eq!(missing(PART - 1, 2), [Range { start: PART, end: 2 * PART }]);
        assert_eq!(missing(0, PART), []);
        let last = 70 * PART..70 * PART + 10;
        assert_eq!(missing(70 * PART, 1), missing(70 * PART, u64::MAX));
        assert_eq!(missing(70 * PART, u64::MAX), [last]);
        parts.mark(70 * PART);
        assert_eq!(missing(70 * PART, 10), []);
        assert_eq!(missing(80 * PART, 10), []);
        parts.mark(u64::MAX);
    }
}
