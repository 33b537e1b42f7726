//! The KV index: which pages are where, in the engines and in the shared store.
//!
//! One table answers for all engines at once. Its key is the 64-bit form of a page hash, mixed with a [`Namespace`]; its
//! value is the number of a *placement*: the engines that hold the page in L1, those that hold it in L2, and what the
//! shared store has of it. Pages with equal answers share a placement, so an entry takes 12 bytes.
//!
//! The index is a hint. Engines verify pages by their full hash, so a wrong answer costs time and never correctness.
//! It is bounded: when it is full, new pages displace those that are least likely to be asked for.
//!
//! Nothing here takes long. Parts of the table grow one by one; clearing an engine, losing a store node and ending a
//! reconciliation take effect at once and leave the pages to [`PageIndex::sweep`], which the owner calls in small steps
//! while [`PageIndex::needs_sweep`]. A lookup can be taken in steps too, by an owner that shares the index behind a lock.

mod columns;
mod lookup;
mod namespace;
mod placement;
mod shared;
mod table;
mod upkeep;

#[cfg(test)]
mod step_tests;
#[cfg(test)]
mod tests;

pub use columns::{EngineSlot, Tier};
pub use lookup::{EngineHits, Hits, SharedRun};
pub use namespace::Namespace;
pub use shared::{MAX_PARTS, Part, SharedPlace, StoreNode};

use crate::prediction::Medium;
use columns::Columns;
use placement::{Placement, Placements};
use shared::Store;
use table::{Position, Table};

/// Whose pages a reconciliation names again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// One tier of an engine.
    Engine(EngineSlot, Tier),
    /// The shared store, with all its nodes.
    Store,
}

/// Which pages are where. See the module's documentation.
#[derive(Debug)]
pub struct PageIndex {
    table: Table,
    placements: Placements,
    columns: Columns,
    store: Store,
    max_pages: usize,
    /// The placement being changed; kept for its memory.
    draft: Placement,
    /// Where the search for a page to displace goes on.
    hand: Position,
    /// Where the sweep goes on.
    broom: Position,
}

/// How large an index is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Pages, including those that wait for a sweep.
    pub pages: usize,
    /// Distinct placements of pages.
    pub placements: usize,
    /// Bytes of memory, without the allocator's own.
    pub bytes: usize,
}

impl PageIndex {
    /// An empty index for at most `max_pages` pages (at least one).
    #[must_use]
    pub fn new(max_pages: usize) -> Self {
        let columns = Columns::default();
        Self {
            table: Table::new(max_pages),
            placements: Placements::new(columns.words()),
            columns,
            store: Store::new(),
            max_pages: max_pages.max(1),
            draft: Placement::default(),
            hand: Position::default(),
            broom: Position::default(),
        }
    }

    /// How large it is.
    #[must_use]
    pub fn size(&self) -> Size {
        let bytes = self.table.bytes() + self.placements.bytes();
        Size { pages: self.table.len(), placements: self.placements.in_use(), bytes }
    }

    /// A number for one more engine, which has no pages.
    pub fn add_engine(&mut self) -> EngineSlot {
        let engine = self.columns.add_engine();
        self.fit_columns();
        engine
    }

    /// Forgets an engine and its pages.
    pub fn remove_engine(&mut self, engine: EngineSlot) {
        self.columns.remove_engine(engine);
        self.bound_leftovers();
    }

    /// Pages that an engine has in a tier.
    #[must_use]
    pub fn engine_pages(&self, engine: EngineSlot, tier: Tier) -> u64 {
        self.columns.pages(engine, tier)
    }

    /// An engine stored pages.
    pub fn stored(&mut self, engine: EngineSlot, tier: Tier, pages: &[u64]) {
        if self.columns.present(engine).is_some() {
            pages.iter().for_each(|&page| self.assign(engine, tier, page, true));
        }
    }

    /// An engine removed pages.
    pub fn removed(&mut self, engine: EngineSlot, tier: Tier, pages: &[u64]) {
        if self.columns.present(engine).is_some() {
            pages.iter().for_each(|&page| self.assign(engine, tier, page, false));
        }
    }

    /// An engine removed all pages of a tier.
    pub fn cleared(&mut self, engine: EngineSlot, tier: Tier) {
        self.columns.clear(engine, tier);
        self.fit_columns();
        self.bound_leftovers();
    }

    /// A number for one more store node. `None` where all 65,536 are in use.
    pub fn add_store_node(&mut self) -> Option<StoreNode> {
        self.store.add_node()
    }

    /// A store node is lost. Pages whose first part it had do not count any more; of pages that are spread, those whose
    /// first part is elsewhere still do, until the store says otherwise.
    pub fn store_node_lost(&mut self, node: StoreNode) {
        self.store.lose_node(node);
    }

    /// The store has a part of a page. A part counts once, however many replicas it has.
    pub fn part_stored(&mut self, page: u64, part: Part, node: StoreNode, medium: Medium) {
        if self.store.has_node(node) {
            self.change(page, true, |draft, _, store| {
                if draft.shared.is_none() {
                    draft.shared = store.fresh();
                }
                draft.shared.add(part, node, medium);
            });
        }
    }

    /// The store has a part of a page no longer.
    pub fn part_removed(&mut self, page: u64, part: Part) {
        self.change(page, false, |draft, _, _| draft.shared.remove(part));
    }

    /// A reconciliation begins: the source is about to name all its pages again, by [`PageIndex::stored`] or
    /// [`PageIndex::part_stored`]. Its pages count until [`PageIndex::end_epoch`]. Begun again before that, it starts over.
    pub fn begin_epoch(&mut self, source: Source) {
        match source {
            Source::Engine(engine, tier) => {
                self.columns.begin(engine, tier);
                self.fit_columns();
                self.bound_leftovers();
            }
            Source::Store => {
                // Only after 255 reconciliations without a sweep.
                while self.store.generation_is_taken() {
                    self.sweep_slots(self.table.slots());
                }
                self.store.begin();
            }
        }
    }

    /// A reconciliation ends: what was not named again does not count any more.
    pub fn end_epoch(&mut self, source: Source) {
        match source {
            Source::Engine(engine, tier) => self.columns.end(engine, tier),
            Source::Store => self.store.end(),
        }
    }

    fn assign(&mut self, engine: EngineSlot, tier: Tier, page: u64, stored: bool) {
        self.change(page, stored, |draft, columns, _| {
            let set = match tier {
                Tier::L1 => &mut draft.l1,
                Tier::L2 => &mut draft.l2,
            };
            columns.assign(engine, set, stored);
        });
    }

    /// Changes the placement of a page. A page that is unknown is added, or left alone.
    fn change(&mut self, page: u64, add: bool, edit: impl FnOnce(&mut Placement, &Columns, &Store)) {
        let at = self.table.find(page);
        let before = at.and_then(|at| self.table.value(at));
        match before {
            Some(id) => self.load_tidy(id),
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

    /// Loads a placement without what does not count any more.
    fn load_tidy(&mut self, id: u32) {
        self.placements.load(id, &mut self.draft);
        self.columns.tidy(&mut self.draft.l1, Tier::L1);
        self.columns.tidy(&mut self.draft.l2, Tier::L2);
        self.draft.shared = self.store.current(self.draft.shared);
    }

    /// Gives the page at a position the drafted placement instead of `before`. Returns whether the page was removed, as
    /// one that is nowhere.
    fn replace(&mut self, at: Position, before: u32) -> bool {
        if self.draft.shared.is_none() {
            self.draft.shared = Default::default();
        }
        let after = if self.draft.is_nowhere() { None } else { self.placements.acquire(&self.draft) };
        match after {
            Some(after) => self.table.set(at, after),
            None => self.table.remove(at),
        }
        // Where placements have run out, the page is forgotten.
        if after.is_none() {
            self.draft.clear(self.placements.words());
        }
        if after != Some(before) {
            let (l1, l2) = self.placements.sets(before);
            self.columns.count(Tier::L1, l1, &self.draft.l1);
            self.columns.count(Tier::L2, l2, &self.draft.l2);
            self.store.count(self.placements.shared(before), false);
            self.store.count(self.draft.shared, true);
        }
        self.placements.release(before);
        after.is_none()
    }

    fn insert(&mut self, page: u64) {
        if self.draft.is_nowhere() {
            return;
        }
        let Some(id) = self.placements.acquire(&self.draft) else { return };
        self.count_whole(id, true);
        if self.table.len() >= self.max_pages {
            self.displace_one();
        }
        self.table.insert(page, id);
    }

    /// Counts a page that came or went as a whole.
    fn count_whole(&mut self, id: u32, came: bool) {
        let (l1, l2) = self.placements.sets(id);
        let nothing = &vec![0; l1.len()][..];
        for (tier, set) in [(Tier::L1, l1), (Tier::L2, l2)] {
            let (before, after) = if came { (nothing, set) } else { (set, nothing) };
            self.columns.count(tier, before, after);
        }
        self.store.count(self.placements.shared(id), came);
    }

    /// Makes sets wide enough for all columns.
    fn fit_columns(&mut self) {
        let words = self.columns.words();
        if words > self.placements.words() {
            self.placements.widen(words);
        }
    }
}
