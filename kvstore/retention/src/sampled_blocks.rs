//! A bounded sample of all blocks, selected by the hash of their keys: a block is sampled at all of its uses or never.

use std::collections::BTreeMap;

use crate::block_class::BlockClass;

/// Ages beyond this are not observed: about a day, where the bins end.
const MAX_AGE_MS: u64 = 24 * 3_600 * 1_000;

/// The last use of a sampled block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SampledUse {
    pub(crate) class: BlockClass,
    pub(crate) at_ms: u64,
    /// Until when the time since then has been counted.
    pub(crate) counted_until_ms: u64,
    /// Whether the block was not stored. Its return is counted, and the write that follows is the same use.
    pub(crate) is_miss: bool,
}

impl SampledUse {
    /// Ages between which the time has not been counted yet.
    pub(crate) fn uncounted_ages_ms(&self, now_ms: u64) -> (u64, u64) {
        (self.counted_until_ms.saturating_sub(self.at_ms), now_ms.saturating_sub(self.at_ms))
    }
}

/// Last uses of the sampled blocks.
#[derive(Debug)]
pub(crate) struct SampledBlocks {
    max: usize,
    /// Blocks whose hash is at most this one are sampled. It only decreases.
    max_hash: u64,
    /// Ordered, so that sums over it do not depend on a random order.
    last_uses: BTreeMap<u64, SampledUse>,
}

impl SampledBlocks {
    /// An empty sample of at most `max` blocks.
    pub(crate) fn new(max: usize) -> Self {
        Self { max: max.max(1), max_hash: u64::MAX, last_uses: BTreeMap::new() }
    }

    pub(crate) fn max_hash(&self) -> u64 {
        self.max_hash
    }

    /// Share of all blocks that are sampled.
    pub(crate) fn share(&self) -> f64 {
        self.max_hash as f64 / u64::MAX as f64
    }

    pub(crate) fn is_sampled(&self, hash: u64) -> bool {
        hash <= self.max_hash
    }

    pub(crate) fn last_use(&self, hash: u64) -> Option<SampledUse> {
        self.last_uses.get(&hash).copied()
    }

    /// Records a use of a sampled block and returns the one before. If the sample is full, half of the hashes are no
    /// longer sampled.
    pub(crate) fn record(&mut self, hash: u64, last_use: SampledUse) -> Option<SampledUse> {
        let before = self.last_uses.insert(hash, last_use);
        while self.last_uses.len() > self.max {
            self.max_hash /= 2;
            drop(self.last_uses.split_off(&(self.max_hash + 1)));
        }
        before
    }

    /// Calls `count` with every block's last use, marks the time since it as counted, and removes the blocks that have
    /// not been used for a day.
    pub(crate) fn count_times(&mut self, now_ms: u64, mut count: impl FnMut(&SampledUse)) {
        self.last_uses.retain(|_, last| {
            count(last);
            last.counted_until_ms = last.counted_until_ms.max(now_ms);
            now_ms.saturating_sub(last.at_ms) <= MAX_AGE_MS
        });
    }

    pub(crate) fn len(&self) -> usize {
        self.last_uses.len()
    }
}
