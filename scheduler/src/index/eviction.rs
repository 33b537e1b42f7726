//! Sweeping pages that count no more, and displacing pages when the index is full.

use super::KvBlockIndex;
use super::hash_table::TablePosition;

/// Columns that may wait for a sweep before the engines that cause them pay for it.
const MAX_RETIRED_COLUMNS: usize = 64;
/// Pages that are looked at to find one to displace.
const EVICTION_CANDIDATES: usize = 32;

/// How much an entry is worth, lowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum EvictionPriority {
    Stale,
    /// Only the shared store has it, and nobody asked for it lately.
    UnusedStoreOnly,
    /// An engine has it, and nobody asked for it lately.
    Unused,
    Used,
}

impl KvBlockIndex {
    /// Whether pages wait for a sweep. They do not count any more, but take up room.
    #[must_use]
    pub fn needs_sweep(&self) -> bool {
        self.columns.unswept() + self.store.unswept() > 0
    }

    /// Sweeps up to about `slots` entries; some nanoseconds each. Returns whether more wait.
    pub fn sweep(&mut self, slots: usize) -> bool {
        if self.needs_sweep() {
            self.sweep_slots(slots);
        }
        self.needs_sweep()
    }

    pub(super) fn sweep_slots(&mut self, slots: usize) {
        // Neighbours often share a placement.
        let mut clean = None;
        for _ in 0..slots {
            let at = self.sweep_position;
            let Some(id) = self.table.value(at) else {
                self.sweep_position = self.table.after(at);
                continue;
            };
            if clean != Some(id) {
                let (l1, l2) = self.placements.sets(id);
                let shared = self.placements.shared(id);
                if self.columns.is_unswept(l1, l2) || self.store.current(shared) != shared {
                    self.load_current(id);
                    clean = None;
                    if self.replace(at, id) {
                        // Another entry may have moved here.
                        continue;
                    }
                } else {
                    clean = Some(id);
                }
            }
            self.sweep_position = self.table.after(at);
        }
    }

    /// Without this, an engine that clears itself over and over would make sets ever wider.
    pub(super) fn limit_retired_columns(&mut self) {
        if self.columns.reclaimable() > MAX_RETIRED_COLUMNS {
            // So that a round is complete before as many columns have been added again.
            self.sweep_slots(self.table.slots() * 2 / MAX_RETIRED_COLUMNS + 1);
        }
    }

    /// Removes one page: the worst of the next few that the hand passes. Marks of use are taken off on the way, so a page
    /// that nobody asks for is found the next time round.
    pub(super) fn evict_one(&mut self) {
        let mut worst: Option<(EvictionPriority, u64)> = None;
        let mut seen = 0;
        // Even an almost empty part of the table is passed within this many steps.
        for _ in 0..self.table.slots() {
            if seen == EVICTION_CANDIDATES {
                break;
            }
            let at = self.eviction_hand;
            self.eviction_hand = self.table.after(at);
            let Some(key) = self.table.key(at) else { continue };
            seen += 1;
            let worth = self.eviction_priority(at);
            if worst.is_none_or(|(least, _)| worth < least) {
                worst = Some((worth, key));
            }
            if worth <= EvictionPriority::UnusedStoreOnly {
                break;
            }
        }
        let Some(at) = worst.and_then(|(_, key)| self.table.find(key)) else { return };
        if let Some(id) = self.table.value(at) {
            self.count_block(id, false);
            self.table.remove(at);
            self.placements.release(id);
        }
        if self.eviction_hand == self.table.after(at) {
            // Another entry may have moved here.
            self.eviction_hand = at;
        }
    }

    fn eviction_priority(&mut self, at: TablePosition) -> EvictionPriority {
        let used = self.table.untouch(at);
        let Some(id) = self.table.value(at) else { return EvictionPriority::Stale };
        let (l1, l2) = self.placements.sets(id);
        let counting = self.columns.counting();
        let held = l1.iter().zip(l2).zip(counting).any(|((l1, l2), counting)| (l1 | l2) & counting != 0);
        let shared = !self.store.current(self.placements.shared(id)).is_none();
        match (held, shared, used) {
            (false, false, _) => EvictionPriority::Stale,
            (_, _, true) => EvictionPriority::Used,
            (false, true, false) => EvictionPriority::UnusedStoreOnly,
            (true, _, false) => EvictionPriority::Unused,
        }
    }

    /// Checks what must hold between operations.
    #[cfg(test)]
    pub(super) fn check(&self) {
        use super::EngineCacheTier;
        use std::collections::BTreeMap;
        let mut pages: BTreeMap<u32, u32> = BTreeMap::new();
        let mut bits: BTreeMap<(bool, u32), u64> = BTreeMap::new();
        for (_, id) in self.table.iter() {
            *pages.entry(id).or_default() += 1;
            let (l1, l2) = self.placements.sets(id);
            for (tier, set) in [(EngineCacheTier::L1, l1), (EngineCacheTier::L2, l2)] {
                for (word, &set) in set.iter().enumerate() {
                    for column in super::column_table::members(set, word) {
                        *bits.entry((tier == EngineCacheTier::L2, column)).or_default() += 1;
                    }
                }
            }
        }
        assert_eq!(self.placements.counts(), pages, "each placement counts its pages");
        assert_eq!(self.placements.in_use(), pages.len());
        self.columns.check(&bits);
        self.store.check(self.table.iter().map(|(_, id)| self.placements.shared(id)));
        assert!(self.table.len() <= self.max_blocks);
    }
}
