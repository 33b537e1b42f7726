//! LRU over the blocks of prompts. A prefix loses its end first, because a block without those before it is useless.

use std::hash::Hash;

use hashlink::LinkedHashMap;

/// Effect of an insertion on a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LruChange<Block> {
    Added(Block),
    Evicted(Block),
}

/// A bounded set of blocks in LRU order. Evictions depend only on the calls, never on hashes or time.
#[derive(Debug, Default)]
pub(crate) struct PrefixLru<Block> {
    /// Capacity in tokens.
    capacity: u64,
    /// Used tokens.
    used: u64,
    /// Tokens of every block, the least recently used block first.
    tokens: LinkedHashMap<Block, u64>,
}

impl<Block: Copy + Eq + Hash> PrefixLru<Block> {
    pub(crate) fn new(capacity: u64) -> Self {
        Self { capacity, used: 0, tokens: LinkedHashMap::new() }
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Changes the capacity in tokens; the next insertion evicts what does not fit any more.
    pub(crate) fn set_capacity(&mut self, capacity: u64) {
        self.capacity = capacity;
    }

    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    pub(crate) fn contains(&self, block: Block) -> bool {
        self.tokens.contains_key(&block)
    }

    /// Number of leading `blocks` that are cached without a gap.
    pub(crate) fn leading(&self, blocks: &[Block]) -> usize {
        blocks.iter().take_while(|block| self.contains(**block)).count()
    }

    /// Marks cached `blocks` as most recently used, the first one last.
    pub(crate) fn touch(&mut self, blocks: &[Block]) {
        for block in blocks.iter().rev() {
            self.tokens.to_back(block);
        }
    }

    /// Marks every block of a prefix as most recently used, the first one last, and adds missing ones as far as they
    /// fit. Reports what was added, in that order, and then what was evicted.
    pub(crate) fn put(
        &mut self,
        prefix: &[Block],
        tokens: impl Fn(Block) -> u64,
        mut on_change: impl FnMut(LruChange<Block>),
    ) {
        // Blocks beyond the capacity would only evict each other.
        let mut total = 0_u64;
        let fitting = prefix.iter().take_while(|block| {
            total = total.saturating_add(tokens(**block));
            total <= self.capacity
        });
        let prefix = &prefix[..fitting.count()];
        for &block in prefix.iter().rev() {
            let size = tokens(block);
            if self.tokens.insert(block, size).is_none() {
                self.used += size;
                on_change(LruChange::Added(block));
            }
        }
        // The prefix fits and is the newest, so it does not evict itself.
        while self.used > self.capacity
            && let Some((evicted, size)) = self.tokens.pop_front()
        {
            self.used -= size;
            on_change(LruChange::Evicted(evicted));
        }
    }

    /// Removes all blocks and reports each removal.
    pub(crate) fn clear(&mut self, mut on_evicted: impl FnMut(Block)) {
        self.used = 0;
        while let Some((block, _)) = self.tokens.pop_front() {
            on_evicted(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn put(lru: &mut PrefixLru<u32>, blocks: &[u32]) {
        lru.put(blocks, |_| 10, |_| {});
    }

    #[test]
    fn a_prefix_loses_its_end_first() {
        let mut lru = PrefixLru::new(40);
        put(&mut lru, &[1, 2, 3, 4]);
        put(&mut lru, &[9]);
        assert_eq!(lru.leading(&[1, 2, 3, 4]), 3);
    }

    #[test]
    fn most_recently_used_block_stays() {
        let mut lru = PrefixLru::new(30);
        for block in [1, 2, 3, 1, 4] {
            put(&mut lru, &[block]);
        }
        assert!(lru.contains(1) && !lru.contains(2) && lru.contains(3) && lru.contains(4));
    }

    #[test]
    fn a_prefix_does_not_evict_itself() {
        let mut lru = PrefixLru::new(40);
        put(&mut lru, &[1, 2, 3]);
        put(&mut lru, &[9]);
        // 1, 2 and 3 are the oldest; inserting 4 and 5 must evict 9.
        put(&mut lru, &[1, 2, 3, 4, 5]);
        assert_eq!(lru.leading(&[1, 2, 3, 4, 5]), 4);
        assert!(!lru.contains(9));
    }

    #[test]
    fn nothing_is_cached_without_capacity() {
        let mut lru = PrefixLru::new(0);
        lru.put(&[1, 2], |_| 1, |_| panic!("nothing may change"));
        assert!(!lru.contains(1) && lru.leading(&[1]) == 0);
    }

    proptest! {
        #[test]
        fn changes_add_up_to_the_content(capacity in 0_u64..200, weights in prop::collection::vec(1_u64..40, 30),
            prefixes in prop::collection::vec((any::<bool>(), prop::sample::subsequence((0_usize..30).collect::<Vec<_>>(), 0..20)), 0..40)) {
            let mut lru = PrefixLru::new(capacity);
            let mut content = BTreeSet::new();
            for (touch, blocks) in prefixes {
                if touch {
                    lru.touch(&blocks);
                    continue;
                }
                lru.put(&blocks, |block| weights[block], |change| assert!(match change {
                    LruChange::Added(block) => content.insert(block),
                    LruChange::Evicted(block) => content.remove(&block),
                }));
                prop_assert!((0..30).all(|block| lru.contains(block) == content.contains(&block)));
                let sum: u64 = content.iter().map(|block| weights[*block]).sum();
                prop_assert_eq!(sum, lru.used());
                prop_assert!(sum <= capacity);
            }
            lru.clear(|block| assert!(content.remove(&block)));
            prop_assert!(content.is_empty() && lru.used() == 0);
        }
    }
}
