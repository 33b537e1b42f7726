//! How much of a prompt every engine has, in one pass over its pages.

use super::column_table::{EngineSlot, contains, members, set_bit};
use super::hash_table::NOT_FOUND;
use super::{KvBlockIndex, StoredBlockLocation};

/// Pages that are searched before any is looked at, so that their cache misses overlap.
const BATCH: usize = 64;
/// Pages of one step: two microseconds.
const BLOCKS_PER_STEP: usize = 64;
/// How often a lookup in steps begins again, because the index has changed under it, before it does the rest in one step.
const MAX_RESTARTS: u32 = 2;

/// Contiguous prefix of a prompt in one engine, in pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineHits {
    /// In device memory.
    pub l1: u32,
    /// In device or host memory; never less than `l1`.
    pub local: u32,
    /// Complete in the shared store, directly behind the engine's own ones.
    pub shared: u32,
}

/// Consecutive complete pages of a prompt in one place of the shared store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreBlockRun {
    /// The first of them; pages are counted from 0.
    pub first: u32,
    /// How many.
    pub blocks: u32,
    /// Where.
    pub location: StoredBlockLocation,
}

impl StoreBlockRun {
    fn end(&self) -> u32 {
        self.first + self.blocks
    }
}

/// The answer to a lookup. Keep it for the next one: its memory is used again.
#[derive(Debug, Clone, Default)]
pub struct IndexLookup {
    /// By [`EngineSlot::as_usize`].
    pub engines: Vec<EngineHits>,
    /// Runs in the shared store, in prompt order, as far as an engine could use them.
    pub shared: Vec<StoreBlockRun>,
    scan: LookupScan,
}

/// State of one pass.
#[derive(Debug, Clone, Default)]
struct LookupScan {
    /// Columns of engines whose L1 has all pages so far.
    in_l1: Vec<u64>,
    /// Columns of engines that have all pages so far.
    in_local: Vec<u64>,
    /// Columns of engines with the present page in L1.
    l1: Vec<u64>,
    /// Columns of engines with the present page.
    local: Vec<u64>,
    /// End of the contiguous pages around each run.
    ends: Vec<u32>,
    /// Where the longest prefix in an engine has ended.
    longest: Option<u32>,
    /// Pages that earlier steps have looked at.
    scanned: u32,
    /// Of the columns that the sets are made of; `None` before the first step.
    revision: Option<u64>,
    restarts: u32,
}

impl KvBlockIndex {
    /// How much of a prompt every engine has, and where the store has the rest. Marks the pages as used.
    ///
    /// `pages` are keys in prompt order, as [`BlockHashNamespace::key`](super::Namespace::key) makes them. Stops at the first page that
    /// extends nothing.
    pub fn lookup(&self, pages: &[u64], out: &mut IndexLookup) {
        out.restart();
        while !self.lookup_step(pages, out) {}
    }

    /// A step of a lookup, which takes some microseconds: for those who share the index behind a lock, and let others have it
    /// between the steps. Begins with [`IndexLookup::restart`]; returns whether the answer is complete. What changes between two
    /// steps may count or not.
    pub fn lookup_step(&self, pages: &[u64], out: &mut IndexLookup) -> bool {
        let revision = self.columns.revision();
        if out.scan.revision != Some(revision) {
            out.scan.restarts += u32::from(out.scan.revision.is_some());
            out.scan.revision = Some(revision);
            self.begin(out);
        }
        let from = out.scan.scanned as usize;
        let most = if out.scan.restarts > MAX_RESTARTS { usize::MAX } else { BLOCKS_PER_STEP };
        let rest = pages.get(from..).unwrap_or_default();
        let some = rest.get(..most).unwrap_or(rest);
        let at = self.extend(some, out);
        out.scan.scanned = at;
        let complete = (at as usize) < from + some.len() || some.len() == rest.len();
        if complete {
            self.finish(at, out);
        }
        complete
    }

    /// Looks at more pages. Returns how many there were until now.
    fn extend(&self, pages: &[u64], out: &mut IndexLookup) -> u32 {
        let mut last = None;
        let mut place = None;
        let mut at = out.scan.scanned;
        for batch in pages.chunks(BATCH) {
            let ids: [u32; BATCH] = self.table.touch_all(batch);
            for alike in ids[..batch.len()].chunk_by(PartialEq::eq) {
                if last != Some(alike[0]) {
                    last = Some(alike[0]);
                    place = self.enter(alike[0], at, out);
                }
                if !out.scan.extend_runs(at, alike.len() as u32, place, &mut out.shared) {
                    return at;
                }
                at += alike.len() as u32;
            }
        }
        at
    }

    /// How many of these pages are known. Marks none as used. Whoever is about to change them has their entries at hand then,
    /// and takes less time.
    #[must_use]
    pub fn count_known(&self, pages: &[u64]) -> usize {
        pages.iter().filter(|&&key| self.table.find(key).is_some()).count()
    }

    /// How many pages at the beginning of `pages` are complete in the store. Marks none as used.
    #[must_use]
    pub fn shared_prefix(&self, pages: &[u64]) -> usize {
        let complete = |key: &&u64| {
            let id = self.table.find(**key).and_then(|at| self.table.value(at));
            id.is_some_and(|id| self.store.current(self.placements.shared(id)).complete().is_some())
        };
        pages.iter().take_while(complete).count()
    }

    /// Whether a page is known, or can be added without displacing another.
    #[must_use]
    pub fn has_capacity_for(&self, page: u64) -> bool {
        self.table.len() < self.max_blocks || self.table.find(page).is_some()
    }

    fn begin(&self, out: &mut IndexLookup) {
        out.engines.clear();
        out.engines.resize(self.columns.engines(), EngineHits::default());
        out.shared.clear();
        let words = self.columns.serving().len();
        let scan = &mut out.scan;
        for set in [&mut scan.in_l1, &mut scan.in_local] {
            set.clear();
            set.extend_from_slice(self.columns.serving());
        }
        for set in [&mut scan.l1, &mut scan.local] {
            set.clear();
            set.resize(words, 0);
        }
        scan.scanned = 0;
        scan.longest = scan.in_local.iter().all(|&word| word == 0).then_some(0);
    }

    /// Goes on to a page that is placed otherwise than the one before: engines without it drop out. Returns where the store
    /// has it.
    fn enter(&self, id: u32, at: u32, out: &mut IndexLookup) -> Option<StoredBlockLocation> {
        if id == NOT_FOUND {
            out.scan.l1.fill(0);
            out.scan.local.fill(0);
        } else {
            self.load(id, &mut out.scan);
        }
        let IndexLookup { engines, scan, .. } = out;
        let mut any = 0;
        for word in 0..scan.in_local.len() {
            let (l1, own) = (scan.l1[word], scan.local[word]);
            self.drop_out(word, scan.in_l1[word] & !l1, |engine| engines[engine.as_usize()].l1 = at);
            self.drop_out(word, scan.in_local[word] & !own, |engine| engines[engine.as_usize()].local = at);
            scan.in_l1[word] &= l1;
            scan.in_local[word] &= own;
            any |= scan.in_local[word];
        }
        if any == 0 && scan.longest.is_none() {
            scan.longest = Some(at);
        }
        if id == NOT_FOUND { None } else { self.store.current(self.placements.shared(id)).complete() }
    }

    /// Who has the page, as sets of present columns.
    fn load(&self, id: u32, scan: &mut LookupScan) {
        let (l1, l2) = self.placements.sets(id);
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

    /// All pages before `at` were looked at.
    fn finish(&self, at: u32, out: &mut IndexLookup) {
        let scan = &mut out.scan;
        for word in 0..scan.in_local.len() {
            self.drop_out(word, scan.in_l1[word], |engine| out.engines[engine.as_usize()].l1 = at);
            self.drop_out(word, scan.in_local[word], |engine| out.engines[engine.as_usize()].local = at);
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
    /// Adds pages that are placed alike to the runs of the store. Returns whether they extend anything.
    fn extend_runs(
        &self,
        at: u32,
        pages: u32,
        place: Option<StoredBlockLocation>,
        runs: &mut Vec<StoreBlockRun>,
    ) -> bool {
        // Behind every engine's prefix, a page that the store lacks makes all further ones useless.
        let Some(place) = place else { return self.longest.is_none() };
        match runs.last_mut().filter(|run| run.end() == at && run.location == place) {
            Some(run) => run.blocks += pages,
            None => runs.push(StoreBlockRun { first: at, blocks: pages, location: place }),
        }
        true
    }
}

impl IndexLookup {
    /// Before the first step of a lookup.
    pub fn restart(&mut self) {
        (self.scan.revision, self.scan.restarts) = (None, 0);
    }

    /// The hits of one engine.
    #[must_use]
    pub fn engine(&self, engine: EngineSlot) -> EngineHits {
        self.engines.get(engine.as_usize()).copied().unwrap_or_default()
    }
}
