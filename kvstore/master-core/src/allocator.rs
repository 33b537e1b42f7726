//! Space in one segment: ranges of offsets, in bins by size with three bits of mantissa.
//!
//! Sizes are rounded up to a bin's edge as Mooncake's master does it (100 becomes 104, 70 000 becomes 73 728), which
//! wastes at most an eighth and makes every block of a bin fit every request for it: no search, no walk.

use std::collections::BTreeMap;

use crate::slab::{NIL, Slab};

/// Bins for all sizes of 64 bits: seven exact ones, then eight per power of two.
const BINS: usize = 496;
const WORDS: usize = BINS.div_ceil(64);
/// In place of a neighbour in a bin: the block is in use.
const IN_USE: u32 = NIL - 1;

/// A block; it reaches to where the next one begins. While it is in use, `bin_after` is the number of bytes by which
/// it was rounded up.
#[derive(Clone, Copy, Debug, Default)]
struct AllocatorBlock {
    offset: u64,
    left: u32,
    right: u32,
    bin_before: u32,
    bin_after: u32,
}

/// Space that was given away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AllocatedRange {
    /// Where it begins in the segment.
    pub(crate) offset: u64,
    /// By which it is given back.
    pub(crate) block: u32,
    /// Bytes that it takes up.
    pub(crate) size: u64,
}

/// The allocator of one segment.
#[derive(Debug)]
pub(crate) struct SegmentAllocator {
    capacity: u64,
    used: u64,
    /// Of those, bytes that nobody asked for.
    rounding_bytes: u64,
    blocks: Slab<AllocatorBlock>,
    bin_heads: Box<[u32]>,
    nonempty_bins: [u64; WORDS],
    /// Free blocks by offset; only kept after space was asked for at a certain offset.
    by_offset: Option<BTreeMap<u64, u32>>,
    closed: bool,
}

/// What a size is rounded up to, if that fits 64 bits.
pub(crate) fn rounded(size: u64) -> Option<u64> {
    if size < 8 {
        return Some(size);
    }
    let step = 1_u64 << (size.ilog2() - 3);
    size.checked_add(step - 1).map(|size| size & !(step - 1))
}

/// The bin whose blocks have at least the bin's size: for a rounded size, its own.
fn bin(size: u64) -> usize {
    if size < 8 {
        return size as usize;
    }
    let power = size.ilog2();
    ((power - 2) * 8) as usize + ((size >> (power - 3)) & 7) as usize
}

/// The smallest size in a bin.
fn bin_min_size(bin: usize) -> u64 {
    if bin < 8 { bin as u64 } else { (8 + (bin as u64 & 7)) << (bin / 8 - 1) }
}

impl SegmentAllocator {
    pub(crate) fn new(capacity: u64) -> Self {
        let mut new = Self {
            capacity,
            used: 0,
            rounding_bytes: 0,
            blocks: Slab::default(),
            bin_heads: vec![NIL; BINS].into(),
            nonempty_bins: [0; WORDS],
            by_offset: None,
            closed: false,
        };
        if capacity > 0 {
            let whole = AllocatorBlock { left: NIL, right: NIL, ..AllocatorBlock::default() };
            let block = new.blocks.insert(whole);
            new.insert_into_bin(block);
        }
        new
    }

    /// Bytes in use, rounded as they were given away.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Bytes in use, as they were asked for.
    pub(crate) fn requested(&self) -> u64 {
        self.used - self.rounding_bytes
    }

    /// The largest size that can be had now.
    pub(crate) fn largest_free(&self) -> u64 {
        self.nonempty_bins
            .iter()
            .enumerate()
            .rev()
            .find(|(_, word)| **word != 0)
            .map_or(0, |(at, word)| bin_min_size(at * 64 + word.ilog2() as usize))
    }

    /// Gives nothing away from now on.
    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    /// Forgets what only [`Self::allocate_at`] needs.
    pub(crate) fn drop_offset_index(&mut self) {
        self.by_offset = None;
    }

    fn size(&self, block: u32) -> u64 {
        let AllocatorBlock { offset, right, .. } = self.blocks[block];
        let end = if right == NIL { self.capacity } else { self.blocks[right].offset };
        end - offset
    }

    /// Takes space of at least this size, anywhere.
    pub(crate) fn allocate(&mut self, size: u64) -> Option<AllocatedRange> {
        let asked = size;
        let size = rounded(size).filter(|size| *size > 0 && !self.closed)?;
        let block = self.find_free_block(bin(size))?;
        self.remove_from_bin(block);
        self.split(block, size);
        Some(self.take_block(block, size, asked))
    }

    /// Takes space at a certain offset, as a former master or a former life of this one gave it away.
    pub(crate) fn allocate_at(&mut self, offset: u64, size: u64) -> Option<AllocatedRange> {
        let asked = size;
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
        let mut wanted = block;
        if start < offset {
            self.split(block, offset - start);
            wanted = self.blocks[block].right;
            self.remove_from_bin(wanted);
            self.insert_into_bin(block);
        }
        self.split(wanted, size);
        Some(self.take_block(wanted, size, asked))
    }

    fn take_block(&mut self, block: u32, size: u64, asked: u64) -> AllocatedRange {
        // For objects of tens of gigabytes the figure may be a little too high.
        let slack = u32::try_from(size - asked).unwrap_or(u32::MAX);
        (self.blocks[block].bin_before, self.blocks[block].bin_after) = (IN_USE, slack);
        self.used += size;
        self.rounding_bytes += u64::from(slack);
        AllocatedRange { offset: self.blocks[block].offset, block, size }
    }

    /// Gives space back and joins it with what is free beside it.
    pub(crate) fn free(&mut self, block: u32) {
        if self.blocks[block].bin_before != IN_USE {
            return;
        }
        self.used -= self.size(block);
        self.rounding_bytes -= u64::from(self.blocks[block].bin_after);
        if self.used == 0 {
            // Nobody has a block any more: what was needed to tell them apart goes back.
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

    fn is_free(&self, block: u32) -> bool {
        block != NIL && self.blocks[block].bin_before != IN_USE
    }

    /// Cuts a block, which is in no bin, and puts what remains of it into a bin.
    fn split(&mut self, block: u32, size: u64) {
        if self.size(block) == size {
            return;
        }
        let AllocatorBlock { offset, right, .. } = self.blocks[block];
        let rest = self.blocks.insert(AllocatorBlock {
            offset: offset + size,
            left: block,
            right,
            bin_before: NIL,
            bin_after: NIL,
        });
        self.blocks[block].right = rest;
        if right != NIL {
            self.blocks[right].left = rest;
        }
        self.insert_into_bin(rest);
    }

    /// Makes a block reach over its right neighbour, which is in no bin.
    fn merge_right(&mut self, block: u32) {
        let gone = self.blocks[block].right;
        let right = self.blocks[gone].right;
        self.blocks.remove(gone);
        self.blocks[block].right = right;
        if right != NIL {
            self.blocks[right].left = block;
        }
    }

    fn find_free_block(&self, least: usize) -> Option<u32> {
        let (word, bit) = (least / 64, least % 64);
        let here = self.nonempty_bins.get(word)? & (u64::MAX << bit);
        let at = if here != 0 {
            word * 64 + here.trailing_zeros() as usize
        } else {
            let next = (word + 1..WORDS).find(|word| self.nonempty_bins[*word] != 0)?;
            next * 64 + self.nonempty_bins[next].trailing_zeros() as usize
        };
        Some(self.bin_heads[at])
    }

    /// Puts a free block into its bin.
    fn insert_into_bin(&mut self, block: u32) {
        let at = bin(self.size(block));
        let head = std::mem::replace(&mut self.bin_heads[at], block);
        if head != NIL {
            self.blocks[head].bin_before = block;
        }
        let it = &mut self.blocks[block];
        (it.bin_before, it.bin_after) = (NIL, head);
        self.nonempty_bins[at / 64] |= 1 << (at % 64);
        if let Some(by_offset) = &mut self.by_offset {
            by_offset.insert(it.offset, block);
        }
    }

    /// Takes a free block out of its bin, before its size changes.
    fn remove_from_bin(&mut self, block: u32) {
        let at = bin(self.size(block));
        let AllocatorBlock { offset, bin_before, bin_after, .. } = self.blocks[block];
        if bin_after != NIL {
            self.blocks[bin_after].bin_before = bin_before;
        }
        if bin_before != NIL {
            self.blocks[bin_before].bin_after = bin_after;
        } else {
            self.bin_heads[at] = bin_after;
            if bin_after == NIL {
                self.nonempty_bins[at / 64] &= !(1 << (at % 64));
            }
        }
        if let Some(by_offset) = &mut self.by_offset {
            by_offset.remove(&offset);
        }
    }

    fn index_offsets(&mut self) {
        let mut by_offset = BTreeMap::new();
        for head in self.bin_heads.iter() {
            let mut at = *head;
            while at != NIL {
                by_offset.insert(self.blocks[at].offset, at);
                at = self.blocks[at].bin_after;
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
        for at in 1..BINS {
            assert_eq!((bin(bin_min_size(at)), rounded(bin_min_size(at))), (at, Some(bin_min_size(at))));
            assert_eq!(bin(bin_min_size(at) - 1), at - 1);
        }
    }

    #[test]
    fn a_segment_may_be_as_large_as_a_number() {
        let mut allocator = SegmentAllocator::new(u64::MAX);
        let space = allocator.allocate(1 << 62).unwrap();
        assert_eq!((space.offset, allocator.used()), (0, 1 << 62));
        assert_eq!(SegmentAllocator::new(0).allocate(1), None);
    }

    /// What is in use, by offset; everything else is free.
    fn check(
        allocator: &SegmentAllocator,
        model: &BTreeMap<u64, (AllocatedRange, u64)>,
    ) -> Result<(), TestCaseError> {
        let mut end = 0;
        let mut gap = 0;
        for (space, _) in model.values() {
            prop_assert!(space.offset >= end, "overlap at {}", space.offset);
            gap = gap.max(space.offset - end);
            end = space.offset + space.size;
        }
        prop_assert!(end <= allocator.capacity);
        gap = gap.max(allocator.capacity - end);
        prop_assert_eq!(allocator.largest_free(), bin_min_size(bin(gap)));
        prop_assert_eq!(allocator.used(), model.values().map(|(space, _)| space.size).sum::<u64>());
        prop_assert_eq!(allocator.requested(), model.values().map(|(_, asked)| asked).sum::<u64>());
        Ok(())
    }

    proptest! {
        #[test]
        fn no_overlap_full_merge_nothing_lost(
            capacity in 1..100_000_u64,
            steps in proptest::collection::vec((0..4_u8, 1..20_000_u64, any::<prop::sample::Index>()), 1..200),
        ) {
            let (mut allocator, mut model) = (SegmentAllocator::new(capacity), BTreeMap::new());
            for (what, size, which) in steps {
                let space = match what {
                    0 | 1 => allocator.allocate(size),
                    2 => {
                        let offset = which.index(capacity as usize) as u64;
                        let end = offset + rounded(size).unwrap();
                        let is_free = end <= capacity
                            && model.values().all(|(it, _): &(AllocatedRange, u64)| {
                                it.offset >= end || it.offset + it.size <= offset
                            });
                        let space = allocator.allocate_at(offset, size);
                        prop_assert_eq!(space.is_some(), is_free);
                        prop_assert!(space.is_none_or(|space| space.offset == offset));
                        space
                    }
                    _ if model.is_empty() => None,
                    _ => {
                        let offset = *model.keys().nth(which.index(model.len())).unwrap();
                        allocator.free(model.remove(&offset).unwrap().0.block);
                        None
                    }
                };
                if let Some(space) = space {
                    prop_assert!(space.size >= size);
                    model.insert(space.offset, (space, size));
                } else if what < 2 {
                    prop_assert!(allocator.largest_free() < rounded(size).unwrap());
                }
                check(&allocator, &model)?;
            }
            for (space, _) in model.values() {
                allocator.free(space.block);
            }
            prop_assert_eq!((allocator.used(), allocator.requested(), allocator.blocks.len()), (0, 0, 1));
        }
    }
}
