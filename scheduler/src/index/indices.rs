//! Indices of the tables behind the index: a type for each table, so that one is not used for the other.

/// An engine's bit in the sets of columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ColumnIndex(u32);

impl ColumnIndex {
    pub(super) fn new(column: usize) -> Self {
        Self(column as u32)
    }

    /// The column of a bit in the word of a bit set at position `word`.
    pub(super) fn from_bit(word: usize, bit: u32) -> Self {
        Self(word as u32 * 64 + bit)
    }

    pub(super) fn get(self) -> usize {
        self.0 as usize
    }

    /// Position of the word in a bit set.
    pub(super) fn word(self) -> usize {
        self.get() / 64
    }

    /// The bit in that word.
    pub(super) fn mask(self) -> u64 {
        1 << (self.0 % 64)
    }
}

/// A placement in the table of placements: at most 31 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PlacementIndex(u32);

impl PlacementIndex {
    pub(super) const MAX: Self = Self((1 << 31) - 2);
    /// Stands for no placement.
    pub(super) const NONE: Self = Self(u32::MAX);

    pub(super) const fn from_raw(raw: u32) -> Self {
        Self(raw)
    }

    pub(super) fn raw(self) -> u32 {
        self.0
    }
}
