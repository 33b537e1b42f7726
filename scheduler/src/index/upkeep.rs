//! Sweeping pages that count no more, and displacing pages when the index is full.

use super::PageIndex;
use super::table::Position;

/// Columns that may wait for a sweep before the engines that cause them pay for it.
const MAX_LEFT_COLUMNS: usize = 64;
/// Pages that are looked at to find one to displace.
const CANDIDATES: usize = 32;

/// How much an entry is worth, lowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Worth {
    Nothing,
    /// Only the shared store has it, and nobody asked for it lately.
    UnusedShared,
    /// An engine has it, and nobody asked for it lately.
    Unused,
    Used,
}

impl PageIndex {
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
            let at = self.broom;
            let Some(id) = self.table.value(at) else {
                self.broom = self.table.after(at);
                continue;
            };
            if clean != Some(id) {
                let (l1, l2) = self.placements.sets(id);
                let shared = self.placements.shared(id);
                if self.columns.is_unswept(l1, l2) || self.store.current(shared) != shared {
                    self.load_tidy(id);
                    clean = None;
                    if self.replace(at, id) {
                        // Another entry may have moved here.
                        continue;
                    }
                } else {
                    clean = Some(id);
                }
            }
            self.broom = self.table.after(at);
        }
    }

    /// Without this, an engine that clears itself over and over would make sets ever wider.
    pub(super) fn bound_leftovers(&mut self) {
        if self.columns.reclaimable() > MAX_LEFT_COLUMNS {
            // So that a round is complete before as many columns have been added again.
            self.sweep_slots(self.table.slots() * 2 / MAX_LEFT_COLUMNS + 1);
        }
    }

    /// Removes one page: the worst of the next few that the hand passes. Marks of use are taken off on the way, so a page
    /// that nobody asks for is found the next time round.
    pub(super) fn displace_one(&mut self) {
        let mut worst: Option<(Worth, u64)> = None;
        let mut seen = 0;
        // Even an almost empty part of the table is passed within this many steps.
        for _ in 0..self.table.slots() {
            if seen == CANDIDATES {
                break;
            }
            let at = self.hand;
            self.hand = self.table.after(at);
            let Some(key) = self.table.key(at) else { continue };
            seen += 1;
            let worth = self.worth(at);
            if worst.is_none_or(|(least, _)| worth < least) {
                worst = Some((worth, key));
            }
            if worth <= Worth::UnusedShared {
                break;
            }
        }
        let Some(at) = worst.and_then(|(_, key)| self.table.find(key)) else { return };
        if let Some(id) = self.table.value(at) {
            self.count_whole(id, false);
            self.table.remove(at);
            self.placements.release(id);
        }
        if self.hand == self.table.after(at) {
            // Another entry may have moved here.
            self.hand = at;
        }
    }

    fn worth(&mut self, at: Position) -> Worth {
        let used = self.table.untouch(at);
        let Some(id) = self.table.value(at) else { return Worth::Nothing };
        let (l1, l2) = self.placements.sets(id);
        let counting = self.columns.counting();
        let held = l1.iter().zip(l2).zip(counting).any(|((l1, l2), counting)| (l1 | l2) & counting != 0);
        let shared = !self.store.current(self.placements.shared(id)).is_none();
        match (held, shared, used) {
            (false, false, _) => Worth::Nothing,
            (_, _, true) => Worth::Used,
            (false, true, false) => Worth::UnusedShared,
            (true, _, false) => Worth::Unused,
        }
    }

    /// Checks what must hold between operations.
    #[cfg(test)]
    pub(super) fn check(&self) {
        use super::Tier;
        use std::collections::BTreeMap;
        let mut pages: BTreeMap<u32, u32> = BTreeMap::new();
        let mut bits: BTreeMap<(bool, u32), u64> = BTreeMap::new();
        for (_, id) in self.table.iter() {
            *pages.entry(id).or_default() += 1;
            let (l1, l2) = self.placements.sets(id);
            for (tier, set) in [(Tier::L1, l1), (Tier::L2, l2)] {
                for (word, &set) in set.iter().enumerate() {
                    for column in super::columns::members(set, word) {
                        *bits.entry((tier == Tier::L2, column)).or_default() += 1;
                    }
                }
            }
        }
        assert_eq!(self.placements.counts(), pages, "each placement counts its pages");
        assert_eq!(self.placements.in_use(), pages.len());
        self.columns.check(&bits);
        self.store.check(self.table.iter().map(|(_, id)| self.placements.shared(id)));
        assert!(self.table.len() <= self.max_pages);
    }
}
