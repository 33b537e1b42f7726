//! Which engines have each of a list of blocks, for models whose reusable prefixes have gaps.

use super::column_table::{EngineSlot, members};
use super::indices::PlacementIndex;
use super::lookup::LookupScan;
use super::{BATCH, KvBlockIndex};

/// Engines that have each of a list of blocks in device or host memory.
#[derive(Debug, Clone, Default)]
pub struct BlockHolders {
    /// Words of one block's set of engines.
    words: usize,
    /// The sets of all blocks, one after the other, by [`EngineSlot`].
    sets: Vec<u64>,
    scan: LookupScan,
}

impl BlockHolders {
    /// Whether an engine has the block at a position of the list; `false` beyond its end.
    #[must_use]
    pub fn has(&self, engine: EngineSlot, block: usize) -> bool {
        let (word, bit) = (engine.as_usize() / 64, engine.as_usize() % 64);
        let set = self.sets.get(block.saturating_mul(self.words)..).unwrap_or_default();
        word < self.words && set.get(word).is_some_and(|word| word >> bit & 1 == 1)
    }
}

impl KvBlockIndex {
    /// Appends blocks to the list, and marks them as used. Engines that were added after the first block are ignored.
    pub fn add_holders(&self, pages: &[u64], out: &mut BlockHolders) {
        if out.sets.is_empty() {
            out.words = self.columns.engines().div_ceil(64);
        }
        let BlockHolders { words, sets, scan } = out;
        scan.resize(self.columns.serving().len());
        for batch in pages.chunks(BATCH) {
            let ids: [PlacementIndex; BATCH] = self.table.touch_all(batch);
            for &id in &ids[..batch.len()] {
                let start = sets.len();
                sets.resize(start + *words, 0);
                if id == PlacementIndex::NONE {
                    continue;
                }
                self.load(id, scan);
                for (word, (bits, serving)) in scan.local().iter().zip(self.columns.serving()).enumerate() {
                    for column in members(bits & serving, word) {
                        let engine = self.columns.engine_of(column).as_usize();
                        if engine / 64 < *words {
                            sets[start + engine / 64] |= 1 << (engine % 64);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::EngineCacheTier;

    #[test]
    fn holders_are_found_across_gaps_and_cleared_engines() {
        let mut index = KvBlockIndex::new(1000);
        let engines: Vec<EngineSlot> = (0..70).map(|_| index.add_engine()).collect();
        let (first, last) = (engines[0], engines[69]);
        index.add_engine_blocks(first, EngineCacheTier::L1, &[1, 3]);
        index.add_engine_blocks(last, EngineCacheTier::L2, &[3, 4]);
        let mut holders = BlockHolders::default();
        index.add_holders(&[1, 2], &mut holders);
        index.add_holders(&[3, 4], &mut holders);
        let found = |holders: &BlockHolders, engine| {
            (0..5).map(|block| holders.has(engine, block)).collect::<Vec<_>>()
        };
        assert_eq!(found(&holders, first), [true, false, true, false, false]);
        assert_eq!(found(&holders, last), [false, false, true, true, false]);
        assert_eq!(found(&holders, engines[30]), [false; 5]);
        index.clear_engine_tier(last, EngineCacheTier::L2);
        index.add_engine_blocks(last, EngineCacheTier::L1, &[1]);
        let mut holders = BlockHolders::default();
        index.add_holders(&[1, 2, 3, 4], &mut holders);
        assert_eq!(found(&holders, last), [true, false, false, false, false]);
    }
}
