//! Allocator of one segment: ranges of offsets, in bins by size with three bits of mantissa.
//!
//! Sizes are rounded up to a bin's edge as in Mooncake's master (100 becomes 104, 70 000 becomes 73 728). This wastes at most
//! an eighth and makes every block of a bin fit every request for that bin, so allocation needs no search.

use std::collections::BTreeMap;

use crate::indices::{AllocatorBlockIndex, SlabIndex};
use crate::slab::Slab;

/// Bins for all 64-bit sizes: seven exact ones, then eight per power of two.
const BINS: usize = 496;
const WORDS: usize = BINS.div_ceil(64);

/// A block, which ends where its right neighbour begins. While it is in use, `bin_before` is
/// [`AllocatorBlockIndex::IN_USE`], and `bin_after` has the number of bytes by which its size was rounded up.
#[derive(Clone, Copy, Debug, Default)]
struct AllocatorBlock {
    offset: u64,
    left: AllocatorBlockIndex,
    right: AllocatorBlockIndex,
    bin_before: AllocatorBlockIndex,
    bin_after: AllocatorBlockIndex,
}

impl AllocatorBlock {
    fn set_in_use(&mut self, slack: u32) {
        (self.bin_before, self.bin_after) =
            (AllocatorBlockIndex::IN_USE, AllocatorBlockIndex::from_slot(slack));
    }

    fn is_in_use(self) -> bool {
        self.bin_before == AllocatorBlockIndex::IN_USE
    }

    fn slack(self) -> u32 {
        self.bin_after.slot()
    }
}

/// A range allocated in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AllocatedRange {
    /// Offset in the segment, in bytes.
    pub(crate) offset: u64,
    pub(crate) block: AllocatorBlockIndex,
    /// Size in bytes, after rounding up.
    pub(crate) size: u64,
}

/// The allocator of one segment.
#[derive(Debug)]
pub(crate) struct SegmentAllocator {
    capacity: u64,
    used: u64,
    /// The part of `used` that is due to rounding.
    rounding_bytes: u64,
    blocks: Slab<AllocatorBlockIndex, AllocatorBlock>,
    bin_heads: Box<[AllocatorBlockIndex]>,
    nonempty_bins: [u64; WORDS],
    /// Free blocks by offset; built by the first [`Self::allocate_at`].
    by_offset: Option<BTreeMap<u64, AllocatorBlockIndex>>,
    closed: bool,
}

/// Rounds a size up to a bin's edge; `None` if that exceeds 64 bits.
pub(crate) fn rounded(size: u64) -> Option<u64> {
    if size < 8 {
        return Some(size);
    }
    let step = 1_u64 << (size.ilog2() - 3);
    size.checked_add(step - 1).map(|size| size & !(step - 1))
}

/// The bin of a size. For a rounded size, every block of the bin fits.
fn bin(size: u64) -> usize {
    if size < 8 {
        return size as usize;
    }
    let power = size.ilog2();
    ((power - 2) * 8) as usize + ((size >> (power - 3)) & 7) as usize
}

/// The smallest block size in a bin.
fn bin_min_size(bin: usize) -> u64 {
    if bin < 8 { bin as u64 } else { (8 + (bin as u64 & 7)) << (bin / 8 - 1) }
}

/// A replayed range that has no block in its segment's allocator yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplayedRange {
    /// Offset in the segment, in bytes.
    pub(crate) offset: u64,
    /// Size in bytes, before rounding up.
    pub(crate) size: u64,
    /// Its position in the order of collection.
    pub(crate) position: usize,
}

impl ReplayedRange {
    /// Offset of the byte after the block.
    pub(crate) fn end(&self) -> u64 {
        self.offset.saturating_add(rounded(self.size).unwrap_or(u64::MAX))
    }
}

impl SegmentAllocator {
    pub(crate) fn new(capacity: u64) -> Self {
        Self::with_ranges(capacity, &[], |_, _| {})
    }

    /// An allocator with these ranges in use, which must be sorted, lie within the segment and not overlap. Calls `each` with the
    /// block of each.
    pub(crate) fn with_ranges(
        capacity: u64,
        ranges: &[ReplayedRange],
        mut each: impl FnMut(&ReplayedRange, AllocatorBlockIndex),
    ) -> Self {
        let mut new = Self {
            capacity,
            used: 0,
            rounding_bytes: 0,
            blocks: Slab::default(),
            bin_heads: vec![AllocatorBlockIndex::NONE; BINS].into(),
            nonempty_bins: [0; WORDS],
            by_offset: None,
            closed: false,
        };
        let (mut end, mut last, mut free) = (0, AllocatorBlockIndex::NONE, Vec::new());
        for range in ranges {
            if range.offset > end {
                last = new.append_block(last, end);
                free.push(last);
            }
            last = new.append_block(last, range.offset);
            end = range.end();
            new.take_block(last, end - range.offset, range.size);
            each(range, last);
        }
        if capacity > end {
            free.push(new.append_block(last, end));
        }
        free.into_iter().for_each(|block| new.insert_into_bin(block));
        new
    }

    /// Appends a block after the last one.
    fn append_block(&mut self, last: AllocatorBlockIndex, offset: u64) -> AllocatorBlockIndex {
        let block = self.blocks.insert(AllocatorBlock { offset, left: last, ..AllocatorBlock::default() });
        if last != AllocatorBlockIndex::NONE {
            self.blocks[last].right = block;
        }
        block
    }

    /// Number of allocated bytes, after rounding up.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Number of allocated bytes, before rounding up.
    pub(crate) fn requested(&self) -> u64 {
        self.used - self.rounding_bytes
    }

    /// The largest size that can be allocated now.
    pub(crate) fn largest_free(&self) -> u64 {
        self.nonempty_bins
            .iter()
            .enumerate()
            .rev()
            .find(|(_, word)| **word != 0)
            .map_or(0, |(index, word)| bin_min_size(index * 64 + word.ilog2() as usize))
    }

    /// Rejects all allocations from now on.
    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    /// Frees the index that only [`Self::allocate_at`] needs.
    pub(crate) fn drop_offset_index(&mut self) {
        self.by_offset = None;
    }

    fn size(&self, block: AllocatorBlockIndex) -> u64 {
        let AllocatorBlock { offset, right, .. } = self.blocks[block];
        let end = if right == AllocatorBlockIndex::NONE { self.capacity } else { self.blocks[right].offset };
        end - offset
    }

    /// Allocates at least `size` bytes at any offset.
    pub(crate) fn allocate(&mut self, size: u64) -> Option<AllocatedRange> {
        let requested = size;
        let size = rounded(size).filter(|size| *size > 0 && !self.closed)?;
        let block = self.find_free_block(bin(size))?;
        self.remove_from_bin(block);
        self.split(block, size);
        Some(self.take_block(block, size, requested))
    }

    /// Allocates at a given offset, to restore an allocation from the log, a snapshot or an inventory.
    pub(crate) fn allocate_at(&mut self, offset: u64, size: u64) -> Option<AllocatedRange> {
        let requested = size;
        let size = rounded(size).filter(|size| *size > 0 && !self.closed)?;
        if self.by_offset.is_none() {
            self.index_offsets();
        }
        let (&start, &block) = self.by_offset.as_ref()?.range(..=offset).next_back()?;
        let end = offset.checked_add(size)?;
        if end > start + self.size(block) {
            return None;
        }
        self.remove_from_bin(block);
        let mut target = block;
        if start < offset {
            self.split(block, offset - start);
            target = self.blocks[block].right;
            self.remove_from_bin(target);
            self.insert_into_bin(block);
        }
        self.split(target, size);
        Some(self.take_block(target, size, requested))
    }

    fn take_block(&mut self, block: AllocatorBlockIndex, size: u64, requested: u64) -> AllocatedRange {
        // Above tens of gigabytes the rounding exceeds 32 bits, and `requested` is slightly too high.
        let slack = u32::try_from(size - requested).unwrap_or(u32::MAX);
        self.blocks[block].set_in_use(slack);
        self.used += size;
        self.rounding_bytes += u64::from(slack);
        AllocatedRange { offset: self.blocks[block].offset, block, size }
    }

    /// Frees a block and merges it with free neighbours. A bulk replay's ranges have no block.
    pub(crate) fn free(&mut self, block: AllocatorBlockIndex) {
        if block == AllocatorBlockIndex::NONE || !self.blocks[block].is_in_use() {
            return;
        }
        self.used -= self.size(block);
        self.rounding_bytes -= u64::from(self.blocks[block].slack());
        if self.used == 0 {
            // No block is in use: free the memory of the block list.
            *self = Self { closed: self.closed, ..Self::new(self.capacity) };
            return;
        }
        let right = self.blocks[block].right;
        if self.is_free(right) {
            self.remove_from_bin(right);
            self.merge_right(block);
        }
        let left = self.blocks[block].left;
        if self.is_free(left) {
            self.remove_from_bin(left);
            self.merge_right(left);
            self.insert_into_bin(left);
        } else {
            self.insert_into_bin(block);
        }
    }

    fn is_free(&self, block: AllocatorBlockIndex) -> bool {
        block != AllocatorBlockIndex::NONE && !self.blocks[block].is_in_use()
    }

    /// Splits a block, which is in no bin, and inserts the remainder into a bin.
    fn split(&mut self, block: AllocatorBlockIndex, size: u64) {
        if self.size(block) == size {
            return;
        }
        let AllocatorBlock { offset, right, .. } = self.blocks[block];
        let rest = self.blocks.insert(AllocatorBlock {
            offset: offset + size,
            left: block,
            right,
            bin_before: AllocatorBlockIndex::NONE,
            bin_after: AllocatorBlockIndex::NONE,
        });
        self.blocks[block].right = rest;
        if right != AllocatorBlockIndex::NONE {
            self.blocks[right].left = rest;
        }
        self.insert_into_bin(rest);
    }

    /// Extends a block over its right neighbour, which is in no bin.
    fn merge_right(&mut self, block: AllocatorBlockIndex) {
        let removed = self.blocks[block].right;
        let right = self.blocks[removed].right;
        self.blocks.remove(removed);
        self.blocks[block].right = right;
        if right != AllocatorBlockIndex::NONE {
            self.blocks[right].left = block;
        }
    }

    fn find_free_block(&self, min_bin: usize) -> Option<AllocatorBlockIndex> {
        let (word, bit) = (min_bin / 64, min_bin % 64);
        let candidates = self.nonempty_bins.get(word)? & (u64::MAX << bit);
        let bin = if candidates != 0 {
            word * 64 + candidates.trailing_zeros() as usize
        } else {
            let next = (word + 1..WORDS).find(|word| self.nonempty_bins[*word] != 0)?;
            next * 64 + self.nonempty_bins[next].trailing_zeros() as usize
        };
        Some(self.bin_heads[bin])
    }

    /// Inserts a free block into its bin.
    fn insert_into_bin(&mut self, block: AllocatorBlockIndex) {
        let bin_index = bin(self.size(block));
        let head = std::mem::replace(&mut self.bin_heads[bin_index], block);
        if head != AllocatorBlockIndex::NONE {
            self.blocks[head].bin_before = block;
        }
        let free_block = &mut self.blocks[block];
        (free_block.bin_before, free_block.bin_after) = (AllocatorBlockIndex::NONE, head);
        self.nonempty_bins[bin_index / 64] |= 1 << (bin_index % 64);
        if let Some(by_offset) = &mut self.by_offset {
            by_offset.insert(free_block.offset, block);
        }
    }

    /// Removes a free block from its bin, before its size changes.
    fn remove_from_bin(&mut self, block: AllocatorBlockIndex) {
        let bin_index = bin(self.size(block));
        let AllocatorBlock { offset, bin_before, bin_after, .. } = self.blocks[block];
        if bin_after != AllocatorBlockIndex::NONE {
            self.blocks[bin_after].bin_before = bin_before;
        }
        if bin_before != AllocatorBlockIndex::NONE {
            self.blocks[bin_before].bin_after = bin_after;
        } else {
            self.bin_heads[bin_index] = bin_after;
            if bin_after == AllocatorBlockIndex::NONE {
                self.nonempty_bins[bin_index / 64] &= !(1 << (bin_index % 64));
            }
        }
        if let Some(by_offset) = &mut self.by_offset {
            by_offset.remove(&offset);
        }
    }

    fn index_offsets(&mut self) {
        let mut by_offset = BTreeMap::new();
        for head in self.bin_heads.iter() {
            let mut block = *head;
            while block != AllocatorBlockIndex::NONE {
                by_offset.insert(self.blocks[block].offset, block);
                block = self.blocks[block].bin_after;
            }
        }
        self.by_offset = Some(by_offset);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_rounded_as_mooncake_does() {
        for (size, up) in [(1, 1), (7, 7), (100, 104), (1000, 1024), (70_000, 73_728), (1 << 20, 1 << 20)] {
            assert_eq!(rounded(size), Some(up));
        }
        assert_eq!(rounded(u64::MAX), None);
        for bin_index in 1..BINS {
            assert_eq!(
                (bin(bin_min_size(bin_index)), rounded(bin_min_size(bin_index))),
                (bin_index, Some(bin_min_size(bin_index)))
            );
            assert_eq!(bin(bin_min_size(bin_index) - 1), bin_index - 1);
        }
    }

    #[test]
    fn a_segment_may_have_the_largest_size() {
        let mut allocator = SegmentAllocator::new(u64::MAX);
        let range = allocator.allocate(1 << 62).unwrap();
        assert_eq!((range.offset, allocator.used()), (0, 1 << 62));
        assert_eq!(SegmentAllocator::new(0).allocate(1), None);
    }

    /// Compares the allocator with a model of all allocated ranges by offset.
    fn check(
        allocator: &SegmentAllocator,
        model: &BTreeMap<u64, (AllocatedRange, u64)>,
    ) -> Result<(), TestCaseError> {
        let mut end = 0;
        let mut gap = 0;
        for (range, _) in model.values() {
            prop_assert!(range.offset >= end, "overlap at {}", range.offset);
            gap = gap.max(range.offset - end);
            end = range.offset + range.size;
        }
        prop_assert!(end <= allocator.capacity);
        gap = gap.max(allocator.capacity - end);
        prop_assert_eq!(allocator.largest_free(), bin_min_size(bin(gap)));
        prop_assert_eq!(allocator.used(), model.values().map(|(range, _)| range.size).sum::<u64>());
        prop_assert_eq!(allocator.requested(), model.values().map(|(_, requested)| requested).sum::<u64>());
        Ok(())
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_freed_blocks_merge(
            capacity in 1..100_000_u64,
            steps in proptest::collection::vec((0..4_u8, 1..20_000_u64, any::<prop::sample::Index>()), 1..200),
        ) {
            let (mut allocator, mut model) = (SegmentAllocator::new(capacity), BTreeMap::new());
            for (operation, size, choice) in steps {
                let range = match operation {
                    0 | 1 => allocator.allocate(size),
                    2 => {
                        let offset = choice.index(capacity as usize) as u64;
                        let end = offset + rounded(size).unwrap();
                        let is_free = end <= capacity
                            && model.values().all(|(used, _): &(AllocatedRange, u64)| {
                                used.offset >= end || used.offset + used.size <= offset
                            });
                        let range = allocator.allocate_at(offset, size);
                        prop_assert_eq!(range.is_some(), is_free);
                        prop_assert!(range.is_none_or(|range| range.offset == offset));
                        range
                    }
                    _ if model.is_empty() => None,
                    _ => {
                        let offset = *model.keys().nth(choice.index(model.len())).unwrap();
                        allocator.free(model.remove(&offset).unwrap().0.block);
                        None
                    }
                };
                if let Some(range) = range {
                    prop_assert!(range.size >= size);
                    model.insert(range.offset, (range, size));
                } else if operation < 2 {
                    prop_assert!(allocator.largest_free() < rounded(size).unwrap());
                }
                check(&allocator, &model)?;
            }
            // Another allocator with the same ranges.
            let ranges = model.values().enumerate();
            let ranges: Vec<ReplayedRange> = ranges
                .map(|(position, (range, size))| ReplayedRange { offset: range.offset, size: *size, position })
                .collect();
            let mut blocks = Vec::new();
            let rebuilt =
                SegmentAllocator::with_ranges(capacity, &ranges, |range, block| blocks.push((range.position, block)));
            check(&rebuilt, &model)?;
            for (mut allocator, blocks) in [
                (allocator, model.values().map(|(range, _)| range.block).collect::<Vec<_>>()),
                (rebuilt, blocks.into_iter().map(|(_, block)| block).collect()),
            ] {
                prop_assert_eq!(blocks.len(), model.len());
                blocks.into_iter().for_each(|block| allocator.free(block));
                prop_assert_eq!((allocator.used(), allocator.requested(), allocator.blocks.len()), (0, 0, 1));
            }
        }
    }
}
