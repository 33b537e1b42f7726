//! The index of the gateway: requests read it concurrently, feeds write it.

use std::sync::Arc;
use std::time::Duration;

use moongate_scheduler::index::{BlockHolders, EngineSlot, IndexLookup, IndexSize, KvBlockIndex};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::cache_groups::EngineCacheGroups;
use super::chunk_rule::EngineChunkRule;
use super::hash_rule::EngineHashRule;
use super::hit_history::HitHistory;
use super::rehashed_blocks::RehashedBlocks;
use super::seen_adapters::SeenAdapters;
use super::special_caches::SpecialCaches;
use super::spin_rw_lock::SpinRwLock;

/// Blocks read per lock acquisition, as in a step of a lookup: two microseconds.
const READ_BATCH: usize = 64;
/// Blocks changed per lock acquisition: one to two microseconds.
const WRITE_BATCH: usize = 8;
/// Index entries swept per lock acquisition: one to two microseconds.
const SWEEP_BATCH: usize = 128;
/// Sweep batches without a pause.
const SWEEP_STEPS: usize = 8;
/// Pause between two steps of a sweep, so that lookups can proceed.
const SWEEP_PAUSE: Duration = Duration::from_millis(1);

/// Locations of blocks. The lock is held for small batches only, so that waits are short.
#[derive(Debug)]
pub(crate) struct KvIndex {
    blocks: SpinRwLock<KvBlockIndex>,
    sweep: Notify,
    special: SpecialCaches,
}

impl KvIndex {
    /// An index of at most `max_blocks` blocks.
    pub(crate) fn new(max_pages: usize) -> Arc<Self> {
        Arc::new(Self {
            blocks: SpinRwLock::new(KvBlockIndex::new(max_pages)),
            sweep: Notify::new(),
            special: SpecialCaches::default(),
        })
    }

    /// Finds how many blocks of a prompt each engine has.
    pub(crate) fn lookup(&self, keys: &[u64], hits: &mut IndexLookup) {
        hits.restart();
        while !self.blocks.read().lookup_step(keys, hits) {}
    }

    /// Finds the engines that have each of these blocks.
    pub(crate) fn holders(&self, keys: &[u64]) -> BlockHolders {
        let mut holders = BlockHolders::default();
        keys.chunks(READ_BATCH).for_each(|keys| self.blocks.read().add_holders(keys, &mut holders));
        holders
    }

    /// Number of these blocks, from the first on, that are complete in the store.
    pub(crate) fn shared_prefix(&self, keys: &[u64]) -> usize {
        let mut prefix = 0;
        for keys in keys.chunks(READ_BATCH) {
            let found = self.blocks.read().shared_prefix(keys);
            prefix += found;
            if found < keys.len() {
                break;
            }
        }
        prefix
    }

    /// Whether any engine has reported cache groups of a hybrid model, or chunks of LMCache.
    pub(crate) fn has_special_caches(&self) -> bool {
        self.special.exist()
    }

    /// Whether any engine or the store has a block, or had it until recently.
    pub(crate) fn is_known(&self, block: u64) -> bool {
        self.blocks.read().count_known(&[block]) > 0
    }

    /// Whether a block is known, or can be added without evicting another.
    pub(crate) fn has_capacity_for(&self, block: u64) -> bool {
        self.blocks.read().has_capacity_for(block)
    }

    pub(crate) fn update<R>(&self, change: impl FnOnce(&mut KvBlockIndex) -> R) -> R {
        let mut blocks = self.blocks.write();
        let result = change(&mut blocks);
        if blocks.needs_sweep() {
            self.sweep.notify_one();
        }
        result
    }

    /// Applies a change to blocks, a few at a time.
    pub(crate) fn update_blocks(&self, blocks: &[u64], change: impl Fn(&mut KvBlockIndex, &[u64])) {
        // Reading the entries first brings them into the CPU cache, which shortens the write lock.
        std::hint::black_box(self.blocks.read().count_known(blocks));
        for blocks in blocks.chunks(WRITE_BATCH) {
            self.update(|index| change(index, blocks));
        }
    }

    /// Applies a change for each item, a few at a time. `block` returns the block that it changes.
    pub(crate) fn update_each<T>(
        &self,
        items: &[T],
        block: impl Fn(&T) -> u64,
        mut change: impl FnMut(&mut KvBlockIndex, &T),
    ) {
        for items in items.chunks(READ_BATCH) {
            let mut blocks = [0; READ_BATCH];
            blocks.iter_mut().zip(items).for_each(|(target, item)| *target = block(item));
            // As in `update_blocks`.
            std::hint::black_box(self.blocks.read().count_known(&blocks[..items.len()]));
            for items in items.chunks(WRITE_BATCH) {
                self.update(|index| items.iter().for_each(|item| change(index, item)));
            }
        }
    }

    pub(crate) fn size(&self) -> IndexSize {
        self.blocks.read().size()
    }

    /// Removes stale entries in small steps, whenever there are some.
    pub(crate) async fn run_sweeper(self: Arc<Self>, stop: CancellationToken) {
        while stop.run_until_cancelled(self.sweep.notified()).await.is_some() {
            while (0..SWEEP_STEPS).all(|_| self.blocks.write().sweep(SWEEP_BATCH)) {
                tokio::time::sleep(SWEEP_PAUSE).await;
            }
        }
    }
}

/// The slot in the index of one rank of an engine. Dropping it removes the rank's blocks.
#[derive(Debug)]
pub(crate) struct EngineSlotGuard {
    index: Arc<KvIndex>,
    slot: EngineSlot,
    groups: Arc<EngineCacheGroups>,
    hash_rule: Arc<EngineHashRule>,
    rehashed: RehashedBlocks,
    chunk_rule: Arc<EngineChunkRule>,
    hit_history: Arc<HitHistory>,
    adapters: SeenAdapters,
}

impl EngineSlotGuard {
    pub(crate) fn new(index: Arc<KvIndex>) -> Self {
        let slot = index.update(KvBlockIndex::add_engine);
        let special = index.special.clone();
        Self {
            index,
            slot,
            groups: Arc::new(EngineCacheGroups::new(special.clone())),
            hash_rule: Arc::default(),
            rehashed: RehashedBlocks::default(),
            chunk_rule: Arc::new(EngineChunkRule::new(special)),
            hit_history: Arc::default(),
            adapters: SeenAdapters::default(),
        }
    }

    pub(crate) fn index(&self) -> &Arc<KvIndex> {
        &self.index
    }

    pub(crate) fn slot(&self) -> EngineSlot {
        self.slot
    }

    /// Whether the engine's hashes are those that predictions assume.
    pub(crate) fn hash_rule(&self) -> &Arc<EngineHashRule> {
        &self.hash_rule
    }

    /// The engine's blocks, if its hashes are other ones.
    pub(crate) fn rehashed(&self) -> &RehashedBlocks {
        &self.rehashed
    }

    /// How the engine's LMCache hashes chunks.
    pub(crate) fn chunk_rule(&self) -> &Arc<EngineChunkRule> {
        &self.chunk_rule
    }

    /// What the engine's responses say about predictions.
    pub(crate) fn hit_history(&self) -> &Arc<HitHistory> {
        &self.hit_history
    }

    /// LoRA adapters in the engine's events.
    pub(crate) fn adapters(&self) -> &SeenAdapters {
        &self.adapters
    }

    /// Groups of the engine's KV cache.
    pub(crate) fn groups(&self) -> &Arc<EngineCacheGroups> {
        &self.groups
    }
}

impl Drop for EngineSlotGuard {
    fn drop(&mut self) {
        self.index.update(|blocks| blocks.remove_engine(self.slot));
    }
}

#[cfg(test)]
mod tests {
    use moongate_scheduler::index::EngineCacheTier;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_dropped_engine_is_removed_and_swept() {
        let index = KvIndex::new(1000);
        let stop = CancellationToken::new();
        let sweeper = index.clone().run_sweeper(stop.clone());
        let engine = EngineSlotGuard::new(index.clone());
        index.update(|blocks| blocks.add_engine_blocks(engine.slot(), EngineCacheTier::L1, &[1, 2, 3]));
        let mut hits = IndexLookup::default();
        index.lookup(&[1, 2, 9], &mut hits);
        assert_eq!(hits.engine(engine.slot()).l1, 2);
        drop(engine);
        let test = async {
            while index.size().blocks > 0 {
                tokio::time::sleep(SWEEP_PAUSE).await;
            }
            stop.cancel();
        };
        tokio::join!(sweeper, test);
    }
}
