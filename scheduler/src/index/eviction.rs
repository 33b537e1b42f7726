//! Sweeping stale blocks, and evicting blocks when the index is full.

use super::KvBlockIndex;
use super::hash_table::TablePosition;
use super::placement_table::PlacementSets;

/// Retired columns that may wait for a sweep before the operations that add more pay for it.
const MAX_RETIRED_COLUMNS: usize = 64;
/// Blocks examined to find one to evict.
const EVICTION_CANDIDATES: usize = 32;

/// Value of an entry for eviction, lowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum EvictionPriority {
    Stale,
    /// Only in the shared store, and not looked up recently.
    UnusedStoreOnly,
    /// In an engine, and not looked up recently.
    Unused,
    Used,
}

impl KvBlockIndex {
    /// Whether blocks wait for a sweep. They do not count any more, but occupy memory.
    #[must_use]
    pub fn needs_sweep(&self) -> bool {
        self.columns.unswept() + self.store.unswept() > 0
    }

    /// Sweeps up to about `slots` entries, at some nanoseconds each. Returns whether more wait.
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
            let position = self.sweep_position;
            let Some(id) = self.table.value(position) else {
                self.sweep_position = self.table.after(position);
                continue;
            };
            if clean != Some(id) {
                let PlacementSets { l1, l2 } = self.placements.sets(id);
                let shared = self.placements.shared(id);
                if self.columns.is_unswept(l1, l2) || self.store.current(shared) != shared {
                    self.load_current(id);
                    clean = None;
                    if self.replace(position, id) {
                        // Another entry may have moved here.
                        continue;
                    }
                } else {
                    clean = Some(id);
                }
            }
            self.sweep_position = self.table.after(position);
        }
    }

    /// Without this, an engine that clears itself repeatedly would widen the sets without limit.
    pub(super) fn limit_retired_columns(&mut self) {
        if self.columns.reclaimable() > MAX_RETIRED_COLUMNS {
            // A round then completes before as many columns have been added again.
            self.sweep_slots(self.table.slots() * 2 / MAX_RETIRED_COLUMNS + 1);
        }
    }

    /// Evicts one block: the least valuable of the next few at the eviction hand. Use marks are cleared on the way, so
    /// that a block without lookups is found in the next round.
    pub(super) fn evict_one(&mut self) {
        let mut worst: Option<(EvictionPriority, u64)> = None;
        let mut examined = 0;
        // Even an almost empty part of the table is passed within this many steps.
        for _ in 0..self.table.slots() {
            if examined == EVICTION_CANDIDATES {
                break;
            }
            let position = self.eviction_hand;
            self.eviction_hand = self.table.after(position);
            let Some(key) = self.table.key(position) else { continue };
            examined += 1;
            let priority = self.eviction_priority(position);
            if worst.is_none_or(|(least, _)| priority < least) {
                worst = Some((priority, key));
            }
            if priority <= EvictionPriority::UnusedStoreOnly {
                break;
            }
        }
        let Some(position) = worst.and_then(|(_, key)| self.table.find(key)) else { return };
        if let Some(id) = self.table.value(position) {
            self.count_block(id, false);
            self.table.remove(position);
            self.placements.release(id);
        }
        if self.eviction_hand == self.table.after(position) {
            // Another entry may have moved here.
            self.eviction_hand = position;
        }
    }

    fn eviction_priority(&mut self, position: TablePosition) -> EvictionPriority {
        let used = self.table.untouch(position);
        let Some(id) = self.table.value(position) else { return EvictionPriority::Stale };
        let PlacementSets { l1, l2 } = self.placements.sets(id);
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

    /// Checks the invariants between operations.
    #[cfg(test)]
    pub(super) fn check(&self) {
        use super::EngineCacheTier;
        use std::collections::BTreeMap;

        use super::indices::{ColumnIndex, PlacementIndex};
        let mut pages: BTreeMap<PlacementIndex, u32> = BTreeMap::new();
        let mut bits: BTreeMap<(bool, ColumnIndex), u64> = BTreeMap::new();
        for (_, id) in self.table.iter() {
            *pages.entry(id).or_default() += 1;
            let PlacementSets { l1, l2 } = self.placements.sets(id);
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
