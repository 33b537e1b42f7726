//! Layout of the file, and allocation of its blocks.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::buffer::ALIGN;
use crate::{TierError, TierOptions};

/// Alignment of the data area.
const DATA_ALIGN: u64 = 1 << 20;
const PAGE: u64 = ALIGN as u64;

/// Position of a block in the file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BlockIndex(pub(crate) u32);

impl BlockIndex {
    pub(crate) fn position(self) -> usize {
        self.0 as usize
    }
}

/// File layout: the superblock, one page per block, then the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TierLayout {
    /// Bytes of a block.
    pub(crate) block_size: u32,
    pub(crate) blocks: u32,
}

impl TierLayout {
    pub(crate) fn of(options: &TierOptions) -> Result<Self, TierError> {
        let block = options.block;
        if block == 0 || !u64::from(block).is_multiple_of(PAGE) || block > 64 << 20 {
            return Err(TierError::Options(
                "the block size must be a multiple of 4096 bytes, at most 64 MiB",
            ));
        }
        let available = options.capacity.saturating_sub(PAGE + DATA_ALIGN);
        match u32::try_from(available / (u64::from(block) + PAGE)) {
            Ok(0) => Err(TierError::Options("the tier's file is too small for one block; increase its size")),
            Ok(blocks) => Ok(Self { block_size: block, blocks }),
            Err(_) => Err(TierError::Options("the tier's file has too many blocks; increase the block size")),
        }
    }

    pub(crate) fn indices(&self) -> impl DoubleEndedIterator<Item = BlockIndex> + use<> {
        (0..self.blocks).map(BlockIndex)
    }

    /// Offset of the page of a block.
    pub(crate) fn page(&self, block: BlockIndex) -> u64 {
        PAGE * (1 + u64::from(block.0))
    }

    pub(crate) fn data(&self, block: BlockIndex) -> u64 {
        self.data_start() + u64::from(block.0) * u64::from(self.block_size)
    }

    pub(crate) fn end(&self) -> u64 {
        self.data_start() + u64::from(self.blocks) * u64::from(self.block_size)
    }

    fn pages_end(&self) -> u64 {
        PAGE * (1 + u64::from(self.blocks))
    }

    fn data_start(&self) -> u64 {
        self.pages_end().next_multiple_of(DATA_ALIGN)
    }
}

#[derive(Debug, Default)]
pub(crate) struct FreeBlocks(Mutex<Vec<BlockIndex>>);

impl FreeBlocks {
    pub(crate) fn new(blocks: Vec<BlockIndex>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(blocks)))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Allocates exactly `count` blocks, or none.
    pub(crate) fn allocate(self: &Arc<Self>, count: usize) -> Option<AllocatedBlocks> {
        let mut free = self.0.lock();
        let rest = free.len().checked_sub(count)?;
        let mut blocks = free.split_off(rest);
        // Sorted by offset, so that adjacent blocks are read together.
        blocks.sort_unstable();
        Some(AllocatedBlocks { blocks, free: Arc::clone(self), retired: false })
    }
}

/// Allocated blocks, freed on drop.
#[derive(Debug)]
pub(crate) struct AllocatedBlocks {
    pub(crate) blocks: Vec<BlockIndex>,
    free: Arc<FreeBlocks>,
    retired: bool,
}

impl AllocatedBlocks {
    /// Wraps specific blocks that are not in the free pool.
    pub(crate) fn from_list(blocks: Vec<BlockIndex>, free: &Arc<FreeBlocks>) -> Self {
        Self { blocks, free: Arc::clone(free), retired: false }
    }

    /// Never frees the blocks: the disk may still change them.
    pub(crate) fn retire(&mut self) {
        self.retired = true;
    }
}

impl Drop for AllocatedBlocks {
    fn drop(&mut self) {
        if !self.retired {
            self.free.0.lock().append(&mut self.blocks);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_the_file_do_not_overlap() {
        let layout = TierLayout::of(&TierOptions::new("x", 1 << 30)).unwrap();
        assert!(layout.pages_end() <= layout.data(BlockIndex(0)));
        assert!(layout.data(BlockIndex(0)).is_multiple_of(DATA_ALIGN));
        assert_eq!(layout.data(BlockIndex(1)) - layout.data(BlockIndex(0)), 256 << 10);
        assert!(layout.end() <= 1 << 30);
        assert!(layout.end() > (1 << 30) - (4 << 20), "little space is wasted");
    }

    #[test]
    fn impossible_sizes_are_rejected() {
        let with =
            |capacity, block| TierLayout::of(&TierOptions { block, ..TierOptions::new("x", capacity) });
        assert!(with(1 << 30, 0).is_err());
        assert!(with(1 << 30, 5000).is_err());
        assert!(with(1 << 30, 1 << 30).is_err());
        assert!(with(0, 4096).is_err());
        assert!(with(u64::MAX, 4096).is_err());
        assert!(with(2 << 20, 4096).is_ok());
    }

    #[test]
    fn dropped_blocks_are_free_again() {
        let free = FreeBlocks::new((0..10).map(BlockIndex).collect());
        let allocated = free.allocate(7).unwrap();
        assert!(free.allocate(4).is_none());
        assert_eq!(free.len(), 3);
        drop(allocated);
        assert_eq!(free.len(), 10);
        free.allocate(1).unwrap().retire();
        assert_eq!(free.len(), 9);
    }
}
