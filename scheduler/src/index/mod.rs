//! The KV index: block locations in the engines and in the shared store.
//!
//! One table serves all engines. Its key is the 64-bit form of a block hash, mixed with a [`BlockHashNamespace`]; its
//! value is the number of a *placement*: the engines that have the block in L1, those that have it in L2, and its state
//! in the shared store. Blocks with equal locations share a placement, so an entry takes 12 bytes.
//!
//! The index is a hint. Engines verify blocks by their full hash, so a wrong result costs time and never correctness.
//! It is bounded: when it is full, new blocks evict those that are least likely to be looked up.
//!
//! No operation takes long. Shards of the table grow one by one; clearing an engine, losing a store node and ending a
//! reconciliation take effect at once and leave the blocks to [`KvBlockIndex::sweep`], which the owner calls in small
//! steps while [`KvBlockIndex::needs_sweep`]. A lookup can also run in steps, for an owner that shares the index behind
//! a lock.

mod cache_groups;
mod column_table;
mod eviction;
mod hash_table;
mod holders;
mod indices;
mod lookup;
mod namespace;
mod placement_table;
mod store_blocks;

#[cfg(test)]
mod step_tests;
#[cfg(test)]
mod tests;

pub use cache_groups::{CacheGroup, GroupReuse, reusable_tokens};
pub use column_table::{EngineCacheTier, EngineSlot};
pub use holders::BlockHolders;
pub use lookup::{EngineHits, IndexLookup, StoreBlockRun};
pub use namespace::BlockHashNamespace;
pub use store_blocks::{BlockPartIndex, MAX_PARTS, StoreNodeSlot, StoredBlockLocation};

use crate::prediction::StoreMedium;
use column_table::ColumnTable;
use hash_table::{CompactHashTable, TablePosition};
use indices::PlacementIndex;
use placement_table::{BlockPlacement, PlacementSets, PlacementTable};
use store_blocks::SharedStoreState;

/// Blocks searched before any result is used, so that their cache misses overlap.
const BATCH: usize = 64;

/// The source of a reconciliation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReconcileSource {
    Engine(EngineSlot, EngineCacheTier),
    /// The shared store, with all its nodes.
    Store,
}

/// The index of block locations; see the module's documentation.
#[derive(Debug)]
pub struct KvBlockIndex {
    table: CompactHashTable,
    placements: PlacementTable,
    columns: ColumnTable,
    store: SharedStoreState,
    max_blocks: usize,
    /// The placement being changed; reused to avoid allocations.
    draft: BlockPlacement,
    /// Position at which the next eviction search continues.
    eviction_hand: TablePosition,
    /// Position at which the sweep continues.
    sweep_position: TablePosition,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexSize {
    /// Blocks, including those that wait for a sweep.
    pub blocks: usize,
    pub placements: usize,
    /// Bytes of memory, without the allocator's overhead.
    pub bytes: usize,
}

impl KvBlockIndex {
    /// Creates an empty index for at most `max_pages` blocks (at least one).
    #[must_use]
    pub fn new(max_pages: usize) -> Self {
        let columns = ColumnTable::default();
        Self {
            table: CompactHashTable::new(max_pages),
            placements: PlacementTable::new(columns.words()),
            columns,
            store: SharedStoreState::new(),
            max_blocks: max_pages.max(1),
            draft: BlockPlacement::default(),
            eviction_hand: TablePosition::default(),
            sweep_position: TablePosition::default(),
        }
    }

    #[must_use]
    pub fn size(&self) -> IndexSize {
        let bytes = self.table.bytes() + self.placements.bytes();
        IndexSize { blocks: self.table.len(), placements: self.placements.in_use(), bytes }
    }

    /// Adds an engine without blocks and returns its number.
    pub fn add_engine(&mut self) -> EngineSlot {
        let engine = self.columns.add_engine();
        self.widen_sets();
        engine
    }

    /// Removes an engine and its blocks.
    pub fn remove_engine(&mut self, engine: EngineSlot) {
        self.columns.remove_engine(engine);
        self.limit_retired_columns();
    }

    /// Number of blocks of an engine in a tier.
    #[must_use]
    pub fn engine_blocks(&self, engine: EngineSlot, tier: EngineCacheTier) -> u64 {
        self.columns.pages(engine, tier)
    }

    /// Records that an engine stored blocks.
    pub fn add_engine_blocks(&mut self, engine: EngineSlot, tier: EngineCacheTier, pages: &[u64]) {
        if self.columns.current(engine).is_some() {
            pages.iter().for_each(|&page| self.assign(engine, tier, page, true));
        }
    }

    /// Records that an engine removed blocks.
    pub fn remove_engine_blocks(&mut self, engine: EngineSlot, tier: EngineCacheTier, pages: &[u64]) {
        if self.columns.current(engine).is_some() {
            pages.iter().for_each(|&page| self.assign(engine, tier, page, false));
        }
    }

    /// Records that an engine removed all blocks of a tier.
    pub fn clear_engine_tier(&mut self, engine: EngineSlot, tier: EngineCacheTier) {
        self.columns.clear(engine, tier);
        self.widen_sets();
        self.limit_retired_columns();
    }

    /// Adds a store node and returns its number. `None` when all 65,536 are in use.
    pub fn add_store_node(&mut self) -> Option<StoreNodeSlot> {
        self.store.add_node()
    }

    /// Records the loss of a store node. Blocks whose first part was on it do not count any more; spread blocks whose
    /// first part is elsewhere still count until the store reports otherwise.
    pub fn remove_store_node(&mut self, node: StoreNodeSlot) {
        self.store.remove_node(node);
    }

    /// Records that the store has a part of a block. A part counts once, however many replicas it has.
    pub fn add_store_part(
        &mut self,
        page: u64,
        part: BlockPartIndex,
        node: StoreNodeSlot,
        medium: StoreMedium,
    ) {
        if self.store.has_node(node) {
            self.change(page, true, |draft, _, store| {
                if draft.stored.is_none() {
                    draft.stored = store.new_block();
                }
                draft.stored.add(part, node, medium);
            });
        }
    }

    /// Records that the store no longer has a part of a block.
    pub fn remove_store_part(&mut self, page: u64, part: BlockPartIndex) {
        self.change(page, false, |draft, _, _| draft.stored.remove(part));
    }

    /// Starts a reconciliation: the source reports all its blocks again, by [`KvBlockIndex::add_engine_blocks`] or
    /// [`KvBlockIndex::add_store_part`]. Its old blocks count until [`KvBlockIndex::end_reconcile`]. A second call
    /// before that starts over.
    pub fn begin_reconcile(&mut self, source: ReconcileSource) {
        match source {
            ReconcileSource::Engine(engine, tier) => {
                self.columns.begin(engine, tier);
                self.widen_sets();
                self.limit_retired_columns();
            }
            ReconcileSource::Store => {
                // Happens only after 255 reconciliations without a sweep.
                while self.store.is_next_generation_used() {
                    self.sweep_slots(self.table.slots());
                }
                self.store.begin();
            }
        }
    }

    /// Ends a reconciliation: blocks that were not reported again stop counting.
    pub fn end_reconcile(&mut self, source: ReconcileSource) {
        match source {
            ReconcileSource::Engine(engine, tier) => self.columns.end(engine, tier),
            ReconcileSource::Store => self.store.end(),
        }
    }

    fn assign(&mut self, engine: EngineSlot, tier: EngineCacheTier, page: u64, stored: bool) {
        self.change(page, stored, |draft, columns, _| {
            let set = match tier {
                EngineCacheTier::L1 => &mut draft.l1,
                EngineCacheTier::L2 => &mut draft.l2,
            };
            columns.assign(engine, set, stored);
        });
    }

    /// Changes the placement of a block. An unknown block is added or ignored, as `change` says.
    fn change(
        &mut self,
        page: u64,
        add: bool,
        edit: impl FnOnce(&mut BlockPlacement, &ColumnTable, &SharedStoreState),
    ) {
        let at = self.table.find(page);
        let before = at.and_then(|at| self.table.value(at));
        match before {
            Some(id) => self.load_current(id),
            None if add => self.draft.clear(self.placements.words()),
            None => return,
        }
        edit(&mut self.draft, &self.columns, &self.store);
        match at.zip(before) {
            Some((at, id)) => {
                self.replace(at, id);
            }
            None => self.insert(page),
        }
    }

    /// Loads a placement without its stale bits.
    fn load_current(&mut self, id: PlacementIndex) {
        self.placements.load(id, &mut self.draft);
        self.columns.drop_stale(&mut self.draft.l1, EngineCacheTier::L1);
        self.columns.drop_stale(&mut self.draft.l2, EngineCacheTier::L2);
        self.draft.stored = self.store.current(self.draft.stored);
    }

    /// Assigns the drafted placement to the block at a position, instead of `before`. Returns whether the block was
    /// removed because it has no location left.
    fn replace(&mut self, at: TablePosition, before: PlacementIndex) -> bool {
        if self.draft.stored.is_none() {
            self.draft.stored = Default::default();
        }
        let after = if self.draft.is_empty() { None } else { self.placements.acquire(&self.draft) };
        match after {
            Some(after) => self.table.set(at, after),
            None => self.table.remove(at),
        }
        // When placement numbers are exhausted, the block is dropped.
        if after.is_none() {
            self.draft.clear(self.placements.words());
        }
        if after != Some(before) {
            let PlacementSets { l1, l2 } = self.placements.sets(before);
            self.columns.count(EngineCacheTier::L1, l1, &self.draft.l1);
            self.columns.count(EngineCacheTier::L2, l2, &self.draft.l2);
            self.store.count(self.placements.shared(before), false);
            self.store.count(self.draft.stored, true);
        }
        self.placements.release(before);
        after.is_none()
    }

    fn insert(&mut self, page: u64) {
        if self.draft.is_empty() {
            return;
        }
        let Some(id) = self.placements.acquire(&self.draft) else { return };
        self.count_block(id, true);
        if self.table.len() >= self.max_blocks {
            self.evict_one();
        }
        self.table.insert(page, id);
    }

    /// Counts a block that was added or removed entirely.
    fn count_block(&mut self, id: PlacementIndex, came: bool) {
        let PlacementSets { l1, l2 } = self.placements.sets(id);
        let nothing = &vec![0; l1.len()][..];
        for (tier, set) in [(EngineCacheTier::L1, l1), (EngineCacheTier::L2, l2)] {
            let (before, after) = if came { (nothing, set) } else { (set, nothing) };
            self.columns.count(tier, before, after);
        }
        self.store.count(self.placements.shared(id), came);
    }

    /// Widens the sets to fit all columns.
    fn widen_sets(&mut self) {
        let words = self.columns.words();
        if words > self.placements.words() {
            self.placements.widen(words);
        }
    }
}
