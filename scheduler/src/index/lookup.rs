//! Lookup of the cached prefix of a prompt in every engine, in one pass over its blocks.

use super::column_table::{EngineSlot, contains, members, set_bit};
use super::indices::PlacementIndex;
use super::placement_table::PlacementSets;
use super::{BATCH, KvBlockIndex, StoredBlockLocation};

/// Blocks per step: about two microseconds.
const BLOCKS_PER_STEP: usize = 64;
/// Restarts of a stepwise lookup after concurrent changes of the index; after that it finishes in one step.
const MAX_RESTARTS: u32 = 2;

/// Contiguous prefix of a prompt in one engine, in blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineHits {
    pub l1: u32,
    /// In device or host memory; never less than `l1`.
    pub local: u32,
    /// Complete in the shared store, directly after the engine's own blocks.
    pub shared: u32,
}

/// Consecutive complete blocks of a prompt at one location of the shared store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreBlockRun {
    /// Number of the first block, from 0.
    pub first: u32,
    pub blocks: u32,
    pub location: StoredBlockLocation,
}

impl StoreBlockRun {
    fn end(&self) -> u32 {
        self.first + self.blocks
    }
}

/// Result of a lookup. Reuse it for the next one to reuse its memory.
#[derive(Debug, Clone, Default)]
pub struct IndexLookup {
    /// Hits per engine, indexed by [`EngineSlot::as_usize`].
    pub engines: Vec<EngineHits>,
    /// Runs in the shared store, in prompt order, as far as an engine could use them.
    pub shared: Vec<StoreBlockRun>,
    scan: LookupScan,
}

#[derive(Debug, Clone, Default)]
pub(super) struct LookupScan {
    /// Columns of engines whose L1 has all blocks so far.
    in_l1: Vec<u64>,
    /// Columns of engines that have all blocks so far.
    in_local: Vec<u64>,
    /// Columns of engines with the current block in L1.
    l1: Vec<u64>,
    /// Columns of engines with the current block.
    local: Vec<u64>,
    /// End of the contiguous blocks around each run.
    ends: Vec<u32>,
    /// End of the longest prefix in any engine.
    longest: Option<u32>,
    /// Blocks that earlier steps have processed.
    scanned: u32,
    /// Revision of the columns in the sets; `None` before the first step.
    revision: Option<u64>,
    restarts: u32,
}

impl KvBlockIndex {
    /// Finds how much of a prompt every engine has, and where the store has the rest. Marks the blocks as used.
    ///
    /// `pages` are keys in prompt order, as [`BlockHashNamespace::key`](super::BlockHashNamespace::key) makes them.
    /// Stops at the first block that extends no prefix and no run.
    pub fn lookup(&self, pages: &[u64], out: &mut IndexLookup) {
        out.restart();
        while !self.lookup_step(pages, out) {}
    }

    /// One step of a lookup, some microseconds long, for callers that share the index behind a lock and release it
    /// between steps. Starts after [`IndexLookup::restart`]; returns whether the result is complete. Changes between
    /// two steps may or may not be included.
    pub fn lookup_step(&self, pages: &[u64], out: &mut IndexLookup) -> bool {
        let revision = self.columns.revision();
        if out.scan.revision != Some(revision) {
            out.scan.restarts += u32::from(out.scan.revision.is_some());
            out.scan.revision = Some(revision);
            self.begin(out);
        }
        let from = out.scan.scanned as usize;
        let limit = if out.scan.restarts > MAX_RESTARTS { usize::MAX } else { BLOCKS_PER_STEP };
        let remaining = pages.get(from..).unwrap_or_default();
        let some = remaining.get(..limit).unwrap_or(remaining);
        let position = self.extend(some, out);
        out.scan.scanned = position;
        let complete = (position as usize) < from + some.len() || some.len() == remaining.len();
        if complete {
            self.finish(position, out);
        }
        complete
    }

    /// Processes more blocks. Returns how many were processed before.
    fn extend(&self, pages: &[u64], out: &mut IndexLookup) -> u32 {
        let mut last = None;
        let mut location = None;
        let mut position = out.scan.scanned;
        for batch in pages.chunks(BATCH) {
            let ids: [PlacementIndex; BATCH] = self.table.touch_all(batch);
            for alike in ids[..batch.len()].chunk_by(PartialEq::eq) {
                if last != Some(alike[0]) {
                    last = Some(alike[0]);
                    location = self.enter(alike[0], position, out);
                }
                if !out.scan.extend_runs(position, alike.len() as u32, location, &mut out.shared) {
                    return position;
                }
                position += alike.len() as u32;
            }
        }
        position
    }

    /// How many of these blocks are in the index. Marks none as used. A caller that is about to change them gets their
    /// entries into the processor's cache and so holds the write lock for less time.
    #[must_use]
    pub fn count_known(&self, pages: &[u64]) -> usize {
        pages.iter().filter(|&&key| self.table.find(key).is_some()).count()
    }

    /// Length of the complete prefix of `pages` in the store. Marks none as used.
    #[must_use]
    pub fn shared_prefix(&self, pages: &[u64]) -> usize {
        let complete = |key: &&u64| {
            let id = self.table.find(**key).and_then(|position| self.table.value(position));
            id.is_some_and(|id| self.store.current(self.placements.shared(id)).complete().is_some())
        };
        pages.iter().take_while(complete).count()
    }

    /// Whether a block is in the index, or can be added without evicting another.
    #[must_use]
    pub fn has_capacity_for(&self, page: u64) -> bool {
        self.table.len() < self.max_blocks || self.table.find(page).is_some()
    }

    fn begin(&self, out: &mut IndexLookup) {
        out.engines.clear();
        out.engines.resize(self.columns.engines(), EngineHits::default());
        out.shared.clear();
        let scan = &mut out.scan;
        for set in [&mut scan.in_l1, &mut scan.in_local] {
            set.clear();
            set.extend_from_slice(self.columns.serving());
        }
        scan.resize(self.columns.serving().len());
        scan.scanned = 0;
        scan.longest = scan.in_local.iter().all(|&word| word == 0).then_some(0);
    }

    /// Continues with a block of another placement than the previous one: engines without it drop out. Returns its
    /// location in the store.
    fn enter(&self, id: PlacementIndex, position: u32, out: &mut IndexLookup) -> Option<StoredBlockLocation> {
        if id == PlacementIndex::NONE {
            out.scan.l1.fill(0);
            out.scan.local.fill(0);
        } else {
            self.load(id, &mut out.scan);
        }
        let IndexLookup { engines, scan, .. } = out;
        let mut any = 0;
        for word in 0..scan.in_local.len() {
            let (l1, own) = (scan.l1[word], scan.local[word]);
            self.drop_out(word, scan.in_l1[word] & !l1, |engine| engines[engine.as_usize()].l1 = position);
            self.drop_out(word, scan.in_local[word] & !own, |engine| {
                engines[engine.as_usize()].local = position;
            });
            scan.in_l1[word] &= l1;
            scan.in_local[word] &= own;
            any |= scan.in_local[word];
        }
        if any == 0 && scan.longest.is_none() {
            scan.longest = Some(position);
        }
        if id == PlacementIndex::NONE {
            None
        } else {
            self.store.current(self.placements.shared(id)).complete()
        }
    }

    /// Engines that have the block, as sets of current columns.
    pub(super) fn load(&self, id: PlacementIndex, scan: &mut LookupScan) {
        let PlacementSets { l1, l2 } = self.placements.sets(id);
        for ((l1, l2), (to_l1, to_own)) in l1.iter().zip(l2).zip(scan.l1.iter_mut().zip(&mut scan.local)) {
            *to_l1 = *l1;
            *to_own = l1 | l2;
        }
        for alias in self.columns.aliases() {
            let in_l1 = alias.counts[0] && contains(l1, alias.from);
            let in_l2 = alias.counts[1] && contains(l2, alias.from);
            if in_l1 {
                set_bit(&mut scan.l1, alias.to, true);
            }
            if in_l1 || in_l2 {
                set_bit(&mut scan.local, alias.to, true);
            }
        }
    }

    fn drop_out(&self, word: usize, columns: u64, mut each: impl FnMut(EngineSlot)) {
        members(columns, word).for_each(|column| each(self.columns.engine_of(column)));
    }

    /// Ends the pass: all blocks before `position` were processed.
    fn finish(&self, position: u32, out: &mut IndexLookup) {
        let scan = &mut out.scan;
        for word in 0..scan.in_local.len() {
            self.drop_out(word, scan.in_l1[word], |engine| out.engines[engine.as_usize()].l1 = position);
            self.drop_out(word, scan.in_local[word], |engine| {
                out.engines[engine.as_usize()].local = position;
            });
        }
        scan.ends.clear();
        scan.ends.resize(out.shared.len(), 0);
        for (run, this) in out.shared.iter().enumerate().rev() {
            let next = out.shared.get(run + 1).filter(|next| next.first == this.end());
            scan.ends[run] = next.map_or(this.end(), |_| scan.ends[run + 1]);
        }
        for engine in &mut out.engines {
            let run = out.shared.partition_point(|run| run.end() <= engine.local);
            if out.shared.get(run).is_some_and(|run| run.first <= engine.local) {
                engine.shared = scan.ends[run] - engine.local;
            }
        }
    }
}

impl LookupScan {
    /// Sets the size of the sets of one block's columns, in words.
    pub(super) fn resize(&mut self, words: usize) {
        for set in [&mut self.l1, &mut self.local] {
            set.clear();
            set.resize(words, 0);
        }
    }

    /// Columns of engines with the loaded block.
    pub(super) fn local(&self) -> &[u64] {
        &self.local
    }

    /// Adds blocks of one placement to the store's runs. Returns whether they extend anything.
    fn extend_runs(
        &self,
        position: u32,
        pages: u32,
        location: Option<StoredBlockLocation>,
        runs: &mut Vec<StoreBlockRun>,
    ) -> bool {
        // After the end of every engine's prefix, a block missing in the store makes all later ones useless.
        let Some(location) = location else { return self.longest.is_none() };
        match runs.last_mut().filter(|run| run.end() == position && run.location == location) {
            Some(run) => run.blocks += pages,
            None => runs.push(StoreBlockRun { first: position, blocks: pages, location }),
        }
        true
    }
}

impl IndexLookup {
    /// Resets the state before the first step of a lookup.
    pub fn restart(&mut self) {
        (self.scan.revision, self.scan.restarts) = (None, 0);
    }

    #[must_use]
    pub fn engine(&self, engine: EngineSlot) -> EngineHits {
        self.engines.get(engine.as_usize()).copied().unwrap_or_default()
    }
}
