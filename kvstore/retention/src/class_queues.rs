//! Stored blocks by class, for caches that evict by value.

use std::collections::HashMap;
use std::hash::Hash;

use hashlink::LinkedHashMap;

use crate::block_class::BlockClass;
use crate::retention_values::RetentionValues;

/// Blocks in queues by class, the least recently used first. Only the first block of each queue is considered for
/// eviction: in the order of a queue, values decrease with age in nearly all traffic, and a prompt loses its end first
/// if it was inserted from its end.
#[derive(Debug)]
pub struct ClassQueues<Block> {
    classes: HashMap<Block, BlockClass>,
    /// By class; times of the last uses in milliseconds.
    queues: Vec<LinkedHashMap<Block, u64>>,
}

impl<Block> Default for ClassQueues<Block> {
    fn default() -> Self {
        Self {
            classes: HashMap::new(),
            queues: (0..BlockClass::COUNT).map(|_| LinkedHashMap::new()).collect(),
        }
    }
}

impl<Block: Copy + Eq + Hash> ClassQueues<Block> {
    /// The class of a block; `None` if it is not stored.
    pub fn class(&self, block: Block) -> Option<BlockClass> {
        self.classes.get(&block).copied()
    }

    /// When a block was last used; `None` if it is not stored.
    pub fn used_ms(&self, block: Block) -> Option<u64> {
        self.queues[self.class(block)?.index()].get(&block).copied()
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.classes.len()
    }

    /// Whether there are no blocks.
    pub fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }

    /// Inserts a block, or moves it: it is of this class now, and the most recently used.
    pub fn insert(&mut self, block: Block, class: BlockClass, now_ms: u64) {
        if let Some(before) = self.classes.insert(block, class) {
            self.queues[before.index()].remove(&block);
        }
        self.queues[class.index()].insert(block, now_ms);
    }

    /// Removes a block. Returns whether it was stored.
    pub fn remove(&mut self, block: Block) -> bool {
        let class = self.classes.remove(&block);
        class.is_some_and(|class| self.queues[class.index()].remove(&block).is_some())
    }

    /// All blocks.
    pub fn blocks(&self) -> impl Iterator<Item = Block> {
        self.classes.keys().copied()
    }

    /// The block with the smallest value; of equal ones, the least recently used. If all values are zero, this is LRU.
    pub fn least_valuable(&self, values: &RetentionValues, now_ms: u64) -> Option<Block> {
        let classes = BlockClass::all();
        let first = |(class, queue): (BlockClass, &LinkedHashMap<Block, u64>)| {
            let (&block, &used_ms) = queue.front()?;
            Some((values.value(class, now_ms.saturating_sub(used_ms)), used_ms, block))
        };
        let firsts = classes.zip(&self.queues).filter_map(first);
        let least = firsts.min_by(|left, right| left.0.total_cmp(&right.0).then(left.1.cmp(&right.1)));
        least.map(|(_, _, block)| block)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::prompt_description::PromptDescription;

    proptest! {
        #[test]
        fn without_values_the_order_is_lru(uses in prop::collection::vec((0_u8..8, 1_u32..6), 1..60)) {
            let mut queues = ClassQueues::default();
            let mut lru: Vec<u8> = Vec::new();
            for (now_ms, (block, uses)) in (0..).zip(uses) {
                queues.insert(block, BlockClass::new(uses, PromptDescription::default()), now_ms);
                lru.retain(|other| *other != block);
                lru.push(block);
            }
            prop_assert_eq!(queues.len(), lru.len());
            for block in lru {
                prop_assert_eq!(queues.least_valuable(&RetentionValues::default(), 1_000), Some(block));
                prop_assert!(queues.remove(block));
            }
            prop_assert!(queues.is_empty());
        }
    }
}
