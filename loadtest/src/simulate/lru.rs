//! LRU over blocks. Blocks are numbers below a known bound, so that membership is one table access and nothing is
//! hashed.

/// Marks a block that is not cached.
const NOT_CACHED: u32 = u32::MAX;
/// Marks the end of the list.
const LIST_END: u32 = u32::MAX - 1;

/// Effect of an insertion on a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockChange {
    Added(u32),
    Evicted(u32),
}

/// A bounded set of blocks in LRU order.
#[derive(Debug, Clone)]
pub(crate) struct BlockLru {
    /// Capacity in tokens.
    capacity: u64,
    /// Used tokens.
    used: u64,
    newer: Vec<u32>,
    older: Vec<u32>,
    newest: u32,
    oldest: u32,
}

impl BlockLru {
    /// Creates a cache for block numbers below `blocks`.
    pub(crate) fn new(capacity: u64, blocks: usize) -> Self {
        // A cache without capacity needs no tables.
        let blocks = if capacity == 0 { 0 } else { blocks };
        Self {
            capacity,
            used: 0,
            newer: vec![NOT_CACHED; blocks],
            older: vec![NOT_CACHED; blocks],
            newest: LIST_END,
            oldest: LIST_END,
        }
    }

    pub(crate) fn contains(&self, block: u32) -> bool {
        self.newer.get(block as usize).is_some_and(|&newer| newer != NOT_CACHED)
    }

    /// Number of leading `blocks` that are cached without a gap.
    pub(crate) fn leading(&self, blocks: &[u32]) -> usize {
        blocks.iter().take_while(|&&block| self.contains(block)).count()
    }

    /// Marks cached `blocks` as most recently used, the first one last: a prefix loses its end first.
    pub(crate) fn touch(&mut self, blocks: &[u32]) {
        for &block in blocks.iter().rev() {
            if self.contains(block) {
                self.unlink(block);
                self.link_newest(block);
            }
        }
    }

    /// Marks `blocks` as most recently used, the first one last, and adds missing ones as far as they fit.
    pub(crate) fn put(&mut self, blocks: &[u32], tokens: &[u32], mut on_change: impl FnMut(BlockChange)) {
        let mut fitting = 0;
        let mut sum = 0_u64;
        let mut missing = 0_u64;
        for &block in blocks {
            let weight = u64::from(tokens[block as usize]);
            sum += weight;
            if sum > self.capacity {
                break;
            }
            fitting += 1;
            if !self.contains(block) {
                missing += weight;
            }
        }
        let blocks = &blocks[..fitting];
        if self.used + missing > self.capacity {
            // Touch first, so that other prefixes are evicted.
            self.touch(blocks);
        }
        for &block in blocks.iter().rev() {
            if self.contains(block) {
                self.unlink(block);
            } else {
                let weight = u64::from(tokens[block as usize]);
                while self.used + weight > self.capacity && self.oldest != LIST_END {
                    let evicted = self.oldest;
                    self.remove(evicted, tokens);
                    on_change(BlockChange::Evicted(evicted));
                }
                self.used += weight;
                on_change(BlockChange::Added(block));
            }
            self.link_newest(block);
        }
    }

    /// Removes all blocks and reports each removal.
    pub(crate) fn clear(&mut self, tokens: &[u32], mut on_change: impl FnMut(BlockChange)) {
        while self.oldest != LIST_END {
            let block = self.oldest;
            self.remove(block, tokens);
            on_change(BlockChange::Evicted(block));
        }
    }

    fn remove(&mut self, block: u32, tokens: &[u32]) {
        self.unlink(block);
        self.newer[block as usize] = NOT_CACHED;
        self.used -= u64::from(tokens[block as usize]);
    }

    fn unlink(&mut self, block: u32) {
        let (newer, older) = (self.newer[block as usize], self.older[block as usize]);
        match newer {
            LIST_END => self.newest = older,
            newer => self.older[newer as usize] = older,
        }
        match older {
            LIST_END => self.oldest = newer,
            older => self.newer[older as usize] = newer,
        }
    }

    fn link_newest(&mut self, block: u32) {
        let older = self.newest;
        self.newer[block as usize] = LIST_END;
        self.older[block as usize] = older;
        match older {
            LIST_END => self.oldest = block,
            older => self.newer[older as usize] = block,
        }
        self.newest = block;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_prefix_loses_its_end_first_and_does_not_evict_itself() {
        let tokens = vec![10; 20];
        let mut lru = BlockLru::new(40, 20);
        lru.put(&[1, 2, 3, 4], &tokens, |_| {});
        lru.put(&[9], &tokens, |_| {});
        assert_eq!(lru.leading(&[1, 2, 3, 4]), 3);
        // 1, 2 and 3 are the oldest; inserting 4 and 5 must evict 9.
        lru.put(&[1, 2, 3, 4, 5], &tokens, |_| {});
        assert_eq!(lru.leading(&[1, 2, 3, 4, 5]), 4);
        assert!(!lru.contains(9));
    }

    #[test]
    fn nothing_is_cached_without_capacity() {
        let mut lru = BlockLru::new(0, 5);
        lru.put(&[1, 2], &[1; 5], |_| panic!("nothing may change"));
        assert!(!lru.contains(1) && lru.leading(&[1]) == 0);
    }

    proptest! {
        #[test]
        fn changes_add_up_to_the_content(capacity in 0_u64..200, weights in prop::collection::vec(1_u32..40, 30),
            prefixes in prop::collection::vec((any::<bool>(), prop::sample::subsequence((0_u32..30).collect::<Vec<_>>(), 0..20)), 0..40)) {
            let mut lru = BlockLru::new(capacity, 30);
            let mut content = std::collections::BTreeSet::new();
            for (touch, blocks) in prefixes {
                if touch {
                    lru.touch(&blocks);
                    continue;
                }
                lru.put(&blocks, &weights, |change| assert!(match change {
                    BlockChange::Added(block) => content.insert(block),
                    BlockChange::Evicted(block) => content.remove(&block),
                }));
                prop_assert!((0..30).all(|block| lru.contains(block) == content.contains(&block)));
                let sum: u64 = content.iter().map(|&block| u64::from(weights[block as usize])).sum();
                prop_assert_eq!(sum, lru.used);
                prop_assert!(sum <= capacity);
            }
            lru.clear(&weights, |change| if let BlockChange::Evicted(block) = change { content.remove(&block); });
            prop_assert!(content.is_empty() && lru.used == 0);
        }
    }
}
