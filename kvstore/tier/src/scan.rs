//! Scan of an existing file when it is opened.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::sync::Arc;

use crate::block::{AllocatedBlocks, BlockIndex, FreeBlocks, TierLayout};
use crate::buffer::ALIGN;
use crate::engine::IoEngine;
use crate::index::{TierIndex, TierObject};
use crate::io_chunk::{IoChunk, IoDirection, IoVisitor};
use crate::page::{ObjectPage, PageContent};

pub(crate) struct TierScanResult {
    pub(crate) index: TierIndex,
    pub(crate) free: Arc<FreeBlocks>,
    /// Highest generation of all pages.
    pub(crate) generation: u64,
    /// Blocks with pages of replaced objects, to be wiped before the blocks are reused.
    pub(crate) stale: Vec<BlockIndex>,
    /// Blocks with corrupt pages, to be wiped too: their objects are lost.
    pub(crate) damaged: Vec<BlockIndex>,
}

/// Reads the pages of all blocks.
///
/// # Errors
/// Errors of the file system.
pub(crate) fn scan(
    file: &File,
    engine: &IoEngine,
    layout: TierLayout,
    instance: u64,
) -> io::Result<TierScanResult> {
    // Several pages per chunk, up to the block size.
    let per_chunk = layout.block_size / ALIGN as u32;
    let chunks: Vec<IoChunk> = (0..layout.blocks)
        .step_by(per_chunk as usize)
        .map(|first| {
            let pages = per_chunk.min(layout.blocks - first);
            IoChunk { offset: layout.page(BlockIndex(first)), len: pages as usize * ALIGN }
        })
        .collect();
    let mut pages =
        PageScanner { layout, instance, per_chunk, found: Vec::new(), damaged: Vec::new(), problem: None };
    engine.transfer(file, IoDirection::Read, &chunks, &mut pages)?;
    if let Some(problem) = pages.problem {
        return Err(problem);
    }
    Ok(TierScanResult { damaged: pages.damaged, ..resolve_conflicts(pages.found, layout) })
}

struct PageScanner {
    layout: TierLayout,
    instance: u64,
    per_chunk: u32,
    found: Vec<ObjectPage>,
    damaged: Vec<BlockIndex>,
    problem: Option<io::Error>,
}

impl IoVisitor for PageScanner {
    fn fill(&mut self, _: usize, _: &mut [u8]) {}

    fn complete(&mut self, chunk: usize, outcome: io::Result<&[u8]>) {
        match outcome {
            Ok(bytes) => {
                let first = chunk as u32 * self.per_chunk;
                for (page, block) in bytes.chunks(ALIGN).zip((first..).map(BlockIndex)) {
                    match ObjectPage::decode(page, self.instance, block, self.layout) {
                        PageContent::Object(page) => self.found.push(page),
                        PageContent::Damaged => self.damaged.push(block),
                        PageContent::Vacant => {}
                    }
                }
            }
            Err(problem) => self.problem = Some(problem),
        }
    }
}

/// Keeps the newest object of each key, if no newer object uses any of its blocks.
fn resolve_conflicts(mut pages: Vec<ObjectPage>, layout: TierLayout) -> TierScanResult {
    pages.sort_unstable_by_key(|page| std::cmp::Reverse(page.generation));
    let generation = pages.first().map_or(0, |page| page.generation);
    let mut used = vec![false; layout.blocks as usize];
    let mut keys: HashSet<Vec<u8>> = HashSet::new();
    let mut stale = Vec::new();
    let mut intact = Vec::new();
    for page in pages {
        let positions: Vec<usize> = page.blocks.iter().map(|block| block.index.position()).collect();
        let distinct = positions.iter().collect::<HashSet<_>>().len() == positions.len();
        let free = distinct && positions.iter().all(|position| used.get(*position) == Some(&false));
        // The key is recorded even if the object is incomplete: an older object of the key must not reappear.
        if keys.insert(page.key.clone()) && free {
            positions.iter().filter_map(|position| used.get_mut(*position).map(|used| *used = true)).count();
            intact.push(page);
        } else {
            stale.extend(page.first());
        }
    }
    let blocks = layout.indices().rev().filter(|block| used.get(block.position()) == Some(&false)).collect();
    let free = FreeBlocks::new(blocks);
    let mut index = TierIndex::default();
    // Oldest first, so that they are evicted first.
    for page in intact.into_iter().rev() {
        let (blocks, crcs) = page.blocks.into_iter().map(|block| (block.index, block.crc)).unzip();
        let allocated = AllocatedBlocks::from_list(blocks, &free);
        index.insert(
            &page.key,
            Arc::new(TierObject { generation: page.generation, len: page.len, crcs, blocks: allocated }),
        );
    }
    TierScanResult { index, free, generation, stale, damaged: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::PageBlock;

    const LAYOUT: TierLayout = TierLayout { block_size: 4096, blocks: 10 };

    fn page(key: &str, generation: u64, blocks: &[u32]) -> ObjectPage {
        ObjectPage {
            generation,
            key: key.into(),
            len: blocks.len() as u64 * 4096,
            blocks: blocks.iter().map(|&block| PageBlock { index: BlockIndex(block), crc: 0 }).collect(),
        }
    }

    fn keys(found: &TierScanResult) -> Vec<String> {
        found.index.keys().iter().map(|key| String::from_utf8(key.to_vec()).unwrap()).collect()
    }

    #[test]
    fn the_newest_object_of_a_key_is_kept() {
        let found =
            resolve_conflicts(vec![page("a", 1, &[0]), page("b", 2, &[1, 2]), page("a", 3, &[3])], LAYOUT);
        assert_eq!(keys(&found), ["b", "a"]);
        assert_eq!(found.stale, [BlockIndex(0)]);
        assert_eq!(found.free.len(), 7);
        assert_eq!(found.generation, 3);
    }

    #[test]
    fn incomplete_object_is_absent_and_hides_older_versions() {
        let pages =
            vec![page("a", 1, &[5]), page("a", 2, &[0, 1]), page("b", 3, &[1]), page("c", 4, &[7, 7])];
        let found = resolve_conflicts(pages, LAYOUT);
        assert_eq!(keys(&found), ["b"]);
        assert_eq!(found.stale, [7, 0, 5].map(BlockIndex));
        assert_eq!(found.free.len(), 9);
    }
}
