//! Whether learned values would have kept more of what was used than LRU.

use hashlink::LinkedHashMap;

use crate::block_class::BlockClass;
use crate::class_queues::ClassQueues;
use crate::retention_values::RetentionValues;

/// Number of uses after which earlier ones count half.
const MAX_USES: u64 = 8_192;

/// Hits of both policies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TrialHits {
    /// Uses of sampled blocks.
    pub uses: u64,
    /// Of these, the blocks that LRU would have stored.
    pub lru: u64,
    /// Of these, the blocks that would have been stored if the least valuable had been evicted.
    pub learned: u64,
}

/// Two caches of the sampled blocks, smaller than the store in proportion to the sample: one evicts by LRU, the other by
/// learned values.
#[derive(Debug, Default)]
pub(crate) struct RetentionTrial {
    capacity: usize,
    lru: LinkedHashMap<u64, ()>,
    valued: ClassQueues<u64>,
    hits: TrialHits,
}

impl RetentionTrial {
    /// Sets the number of blocks that each cache holds, and drops the blocks that `keep` excludes.
    pub(crate) fn resize(&mut self, capacity: usize, keep: impl Fn(u64) -> bool) {
        self.capacity = capacity;
        self.lru.retain(|hash, ()| keep(*hash));
        let dropped: Vec<u64> = self.valued.blocks().filter(|hash| !keep(*hash)).collect();
        dropped.into_iter().for_each(|hash| _ = self.valued.remove(hash));
    }

    /// Records that a block was looked up.
    pub(crate) fn record_lookup(&mut self, hash: u64) {
        self.hits.uses += 1;
        self.hits.lru += u64::from(self.lru.contains_key(&hash));
        self.hits.learned += u64::from(self.valued.class(hash).is_some());
        if self.hits.uses > MAX_USES {
            let TrialHits { uses, lru, learned } = &mut self.hits;
            (*uses, *lru, *learned) = (*uses / 2, *lru / 2, *learned / 2);
        }
    }

    /// Records that a block is stored and of this class from now on.
    pub(crate) fn record_stored(
        &mut self,
        now_ms: u64,
        hash: u64,
        class: BlockClass,
        values: &RetentionValues,
    ) {
        self.lru.insert(hash, ());
        self.lru.to_back(&hash);
        while self.lru.len() > self.capacity && self.lru.pop_front().is_some() {}
        self.valued.insert(hash, class, now_ms);
        while self.valued.len() > self.capacity
            && let Some(least) = self.valued.least_valuable(values, now_ms)
        {
            self.valued.remove(least);
        }
    }

    /// Records that a block, if it is stored, is of this class from now on.
    pub(crate) fn record_description(&mut self, now_ms: u64, hash: u64, class: BlockClass) {
        if self.valued.class(hash).is_some() {
            self.valued.insert(hash, class, now_ms);
        }
    }

    pub(crate) fn hits(&self) -> TrialHits {
        self.hits
    }
}
