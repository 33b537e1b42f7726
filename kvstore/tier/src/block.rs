//! Where blocks lie in the file, and which are free.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::buffer::ALIGN;
use crate::{TierError, TierOptions};

/// Where data begins is a multiple of this.
const DATA_ALIGN: u64 = 1 << 20;
const PAGE: u64 = ALIGN as u64;

/// A file: the superblock, a page about each block, the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TierLayout {
    pub(crate) block: u32,
    pub(crate) blocks: u32,
}

impl TierLayout {
    pub(crate) fn of(options: &TierOptions) -> Result<Self, TierError> {
        let block = options.block;
        if block == 0 || !u64::from(block).is_multiple_of(PAGE) || block > 64 << 20 {
            return Err(TierError::Options("a block has a multiple of 4096 bytes, at most 64 MiB"));
        }
        let room = options.capacity.saturating_sub(PAGE + DATA_ALIGN);
        match u32::try_from(room / (u64::from(block) + PAGE)) {
            Ok(0) => Err(TierError::Options("the tier's file has no room for a block; make it larger")),
            Ok(blocks) => Ok(Self { block, blocks }),
            Err(_) => Err(TierError::Options("the tier's file has too many blocks; make them larger")),
        }
    }

    /// Where the page about a block lies.
    pub(crate) fn page(&self, block: u32) -> u64 {
        PAGE * (1 + u64::from(block))
    }

    pub(crate) fn data(&self, block: u32) -> u64 {
        self.page(self.blocks).next_multiple_of(DATA_ALIGN) + u64::from(block) * u64::from(self.block)
    }

    pub(crate) fn end(&self) -> u64 {
        self.data(self.blocks)
    }
}

/// Blocks that nobody uses.
#[derive(Debug, Default)]
pub(crate) struct FreeBlocks(Mutex<Vec<u32>>);

impl FreeBlocks {
    pub(crate) fn new(blocks: Vec<u32>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(blocks)))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// So many blocks, or none.
    pub(crate) fn allocate(self: &Arc<Self>, count: usize) -> Option<AllocatedBlocks> {
        let mut free = self.0.lock();
        let rest = free.len().checked_sub(count)?;
        let mut blocks = free.split_off(rest);
        // In the file's order, so that neighbours are read together.
        blocks.sort_unstable();
        Some(AllocatedBlocks { blocks, free: Arc::clone(self), retired: false })
    }
}

/// Blocks that somebody uses; free again when dropped.
#[derive(Debug)]
pub(crate) struct AllocatedBlocks {
    pub(crate) blocks: Vec<u32>,
    free: Arc<FreeBlocks>,
    retired: bool,
}

impl AllocatedBlocks {
    /// These very blocks, which are not free.
    pub(crate) fn from_list(blocks: Vec<u32>, free: &Arc<FreeBlocks>) -> Self {
        Self { blocks, free: Arc::clone(free), retired: false }
    }

    /// They are not used again: the disk did not let them be changed.
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
        assert!(layout.page(layout.blocks) <= layout.data(0));
        assert!(layout.data(0).is_multiple_of(DATA_ALIGN));
        assert_eq!(layout.data(1) - layout.data(0), 256 << 10);
        assert!(layout.end() <= 1 << 30);
        assert!(layout.end() > (1 << 30) - (4 << 20), "little is left over");
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
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
    fn blocks_come_back() {
        let free = FreeBlocks::new((0..10).collect());
        let taken = free.allocate(7).unwrap();
        assert!(free.allocate(4).is_none());
        assert_eq!(free.len(), 3);
        drop(taken);
        assert_eq!(free.len(), 10);
        free.allocate(1).unwrap().retire();
        assert_eq!(free.len(), 9);
    }
}
