//! The shared store's blocks, and which of them it evicts.

use std::collections::HashMap;

use clap::ValueEnum;
use moongate_retention::{
    BlockClass, ClassQueues, PromptDescription, PromptLength, RetentionValues, ReturnHint, ReturnTimeLearner,
};

use super::workload::SimulatedWorkload;
use crate::engine::tokens::mix;
use crate::prefix_lru::LruChange;

/// Which blocks a full store evicts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum StoreRetention {
    /// The least recently used, as Mooncake's master does.
    Lru,
    /// The least valuable by learned return times, as Moongate's master does.
    #[default]
    Learned,
    /// Those whose next use is the latest: a bound, because it requires the future.
    Belady,
}

/// Milliseconds between two computations of the values.
const REFRESH_MS: u64 = 20_000;

/// Maximum number of blocks whose uses are learned from.
const MAX_SAMPLED: usize = 65_536;

/// A request's use of blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockUse {
    pub(crate) now_ms: u64,
    pub(crate) length: PromptLength,
    pub(crate) hint: ReturnHint,
}

impl BlockUse {
    fn prompt(self) -> PromptDescription {
        PromptDescription { length: self.length, hint: self.hint, ..PromptDescription::default() }
    }
}

/// A bounded set of blocks.
#[derive(Debug)]
pub(crate) struct StoreCache {
    retention: StoreRetention,
    /// In tokens.
    capacity: u64,
    used: u64,
    /// Tokens of every stored block.
    stored: HashMap<u32, u64>,
    queues: ClassQueues<u32>,
    learner: ReturnTimeLearner,
    values: RetentionValues,
    valued_at_ms: Option<u64>,
    /// For each block its remaining uses, the next one last, as positions of requests in the workload.
    future_uses: Vec<Vec<u32>>,
}

impl StoreCache {
    pub(crate) fn new(retention: StoreRetention, capacity: u64, workload: &SimulatedWorkload) -> Self {
        let future_uses =
            if retention == StoreRetention::Belady { workload.uses_of_blocks() } else { Vec::new() };
        Self {
            retention,
            capacity,
            used: 0,
            stored: HashMap::new(),
            queues: ClassQueues::default(),
            learner: ReturnTimeLearner::new(MAX_SAMPLED),
            values: RetentionValues::default(),
            valued_at_ms: None,
            future_uses,
        }
    }

    /// Number of leading `blocks` that are stored without a gap.
    pub(crate) fn leading(&self, blocks: &[u32]) -> usize {
        blocks.iter().take_while(|block| self.stored.contains_key(block)).count()
    }

    /// Removes the use by a request that has been sent from those of the future.
    pub(crate) fn pass_request(&mut self, blocks: &[u32], request: u32) {
        if self.future_uses.is_empty() {
            return;
        }
        for &block in blocks {
            self.future_uses[block as usize].retain(|&user| user != request);
        }
    }

    /// Records that a request looked these blocks up, whether they are stored or not.
    pub(crate) fn record_use(&mut self, blocks: &[u32], block_use: BlockUse) {
        let (now_ms, prompt) = (block_use.now_ms, block_use.prompt());
        // From the end, so that a prefix is newer than what follows it.
        for &block in blocks.iter().rev() {
            match self.queues.class(block).map(|class| class.used_again(prompt)) {
                Some(class) => {
                    self.learner.record_use(now_ms, block_hash(block), class);
                    self.queues.insert(block, class, now_ms);
                }
                None => self.learner.record_miss(now_ms, block_hash(block)),
            }
        }
    }

    /// Records what is known about a prompt whose request arrived at `arrived_ms`, as a gateway reports it: blocks that were
    /// neither looked up nor written since then count as used now.
    pub(crate) fn describe(&mut self, blocks: &[u32], arrived_ms: u64, block_use: BlockUse) {
        let (now_ms, prompt) = (block_use.now_ms, block_use.prompt());
        for &block in blocks.iter().rev() {
            let (Some(class), Some(used_ms)) = (self.queues.class(block), self.queues.used_ms(block)) else {
                continue;
            };
            let class = if used_ms < arrived_ms {
                let class = class.used_again(prompt);
                self.learner.record_use(now_ms, block_hash(block), class);
                class
            } else {
                let class = class.described(prompt);
                self.learner.record_description(now_ms, block_hash(block), class);
                class
            };
            self.queues.insert(block, class, now_ms);
        }
    }

    /// Adds the missing ones of these blocks as far as they fit. Reports what was added and what was evicted.
    pub(crate) fn put(
        &mut self,
        blocks: &[u32],
        tokens: impl Fn(u32) -> u64,
        block_use: BlockUse,
        mut on_change: impl FnMut(LruChange<u32>),
    ) {
        let mut total = 0_u64;
        let fitting = blocks.iter().take_while(|block| {
            total = total.saturating_add(tokens(**block));
            total <= self.capacity
        });
        let blocks = &blocks[..fitting.count()];
        let (now_ms, prompt) = (block_use.now_ms, block_use.prompt());
        for &block in blocks.iter().rev() {
            if let Some(class) = self.queues.class(block) {
                self.queues.insert(block, class, now_ms);
                continue;
            }
            let class = BlockClass::new(1, prompt);
            self.learner.record_use(now_ms, block_hash(block), class);
            let size = tokens(block);
            self.stored.insert(block, size);
            self.queues.insert(block, class, now_ms);
            self.used += size;
            on_change(LruChange::Added(block));
        }
        self.refresh_values(now_ms);
        while self.used > self.capacity
            && let Some(block) = self.victim(now_ms)
            && let Some(tokens) = self.stored.remove(&block)
        {
            self.queues.remove(block);
            self.used -= tokens;
            on_change(LruChange::Evicted(block));
        }
    }

    fn refresh_values(&mut self, now_ms: u64) {
        let is_due = self.valued_at_ms.is_none_or(|at_ms| now_ms >= at_ms + REFRESH_MS);
        if self.retention == StoreRetention::Learned && is_due {
            self.values = self.learner.values(now_ms, self.stored.len() as u64);
            self.valued_at_ms = Some(now_ms);
        }
    }

    /// The block to evict.
    fn victim(&self, now_ms: u64) -> Option<u32> {
        if self.retention == StoreRetention::Belady {
            let next_use =
                |block: &u32| self.future_uses[*block as usize].last().copied().unwrap_or(u32::MAX);
            return self.stored.keys().copied().max_by_key(|block| (next_use(block), *block));
        }
        // With LRU all values are zero.
        self.queues.least_valuable(&self.values, now_ms)
    }
}

fn block_hash(block: u32) -> u64 {
    mix(u64::from(block), 7)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::trace::TraceRow;
    use std::time::Duration;

    fn workload(prompts: &[&[u64]]) -> SimulatedWorkload {
        let row = |(second, blocks): (u64, &&[u64])| TraceRow {
            at: Duration::from_secs(second),
            input_tokens: blocks.len() * 512,
            output_tokens: 1,
            blocks: blocks.to_vec(),
            block_tokens: 512,
        };
        SimulatedWorkload::of_rows(&(0..).zip(prompts).map(row).collect::<Vec<_>>(), false)
    }

    fn put(cache: &mut StoreCache, second: u64, blocks: &[u32]) {
        let block_use = BlockUse {
            now_ms: second * 1_000,
            length: PromptLength::of_tokens(blocks.len() as u64 * 512),
            hint: ReturnHint::Unknown,
        };
        cache.record_use(blocks, block_use);
        cache.put(blocks, |_| 512, block_use, |_| {});
    }

    fn stored(cache: &StoreCache, blocks: impl IntoIterator<Item = u32>) -> Vec<u32> {
        blocks.into_iter().filter(|&block| cache.leading(&[block]) == 1).collect()
    }

    #[test]
    fn a_described_prompt_is_evicted_by_its_hint() {
        let load = workload(&[&[0], &[1], &[2]]);
        let mut cache = StoreCache::new(StoreRetention::Learned, 100 * 512, &load);
        let mut random = fastrand::Rng::with_seed(1);
        let mut hits = 0;
        for second in 0..2_000_u32 {
            let describe = |cache: &mut StoreCache, block, hint| {
                let now_ms = u64::from(second) * 1_000;
                let block_use = BlockUse { now_ms, length: PromptLength::Short, hint };
                cache.describe(&[block], now_ms.saturating_sub(500), block_use);
            };
            // One block returns once, after a minute or more; the other does not.
            for (block, hint) in [(2 * second, ReturnHint::Expected), (2 * second + 1, ReturnHint::Never)] {
                put(&mut cache, second.into(), &[block]);
                describe(&mut cache, block, hint);
            }
            if let Some(before) = second.checked_sub(60 + random.u32(..20)) {
                hits += cache.leading(&[2 * before]);
                put(&mut cache, second.into(), &[2 * before]);
                describe(&mut cache, 2 * before, ReturnHint::Never);
            }
        }
        // LRU has space for the blocks of 40 seconds.
        assert!(hits > 1_500, "{hits}");
    }

    #[test]
    fn lru_evicts_the_end_of_the_oldest_prompt() {
        let load = workload(&[&[0, 1, 2], &[3, 4]]);
        let mut cache = StoreCache::new(StoreRetention::Lru, 4 * 512, &load);
        put(&mut cache, 0, &[0, 1, 2]);
        put(&mut cache, 1, &[3, 4]);
        assert_eq!(stored(&cache, 0..5), [0, 1, 3, 4]);
    }

    #[test]
    fn belady_keeps_what_is_used_next() {
        let load = workload(&[&[0], &[1], &[2], &[0]]);
        let mut cache = StoreCache::new(StoreRetention::Belady, 2 * 512, &load);
        for request in 0..3 {
            cache.pass_request(&[request], request);
            put(&mut cache, request.into(), &[request]);
        }
        assert!(stored(&cache, 0..3).contains(&0));
    }

    #[test]
    fn learned_retention_keeps_prompts_that_return() {
        let ids: Vec<u64> = (0..4_000).collect();
        let prompts: Vec<&[u64]> = ids.chunks(1).collect();
        let load = workload(&prompts);
        let hits_with = |retention| {
            let mut cache = StoreCache::new(retention, 100 * 512, &load);
            let mut random = fastrand::Rng::with_seed(1);
            let mut hits = 0;
            // Of three prompts one is of 50 that return, after 150 others on average: LRU has evicted most by then.
            for number in 0..4_000_u32 {
                let (returning, once) = (random.u32(..50), 150 + number);
                if number % 3 == 0 {
                    hits += cache.leading(&[returning]);
                    put(&mut cache, number.into(), &[returning]);
                } else if once < 4_000 {
                    put(&mut cache, number.into(), &[once]);
                }
            }
            hits
        };
        let [lru, learned] = [StoreRetention::Lru, StoreRetention::Learned].map(hits_with);
        assert!(learned > lru + 200, "LRU {lru}, learned {learned}");
    }
}
