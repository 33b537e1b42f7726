//! From a hash to places in a slab: an open table of eight bytes per slot.
//!
//! A slot holds 32 bits of the hash and the place, so that neither growing nor removing looks at the entries.

use crate::slab::NIL;

const EMPTY: u64 = u64::MAX;
/// Slots of the first table.
const FIRST: usize = 8;

/// The table. Whoever uses it compares the keys.
#[derive(Debug, Default)]
pub(crate) struct HashIndex {
    slots: Vec<u64>,
    len: usize,
}

fn tag_of(slot: u64) -> u32 {
    (slot >> 32) as u32
}

impl HashIndex {
    fn home_slot(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.slots.len() as u64) >> 32) as usize
    }

    fn next_slot(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() { 0 } else { at + 1 }
    }

    /// The first place under a tag: nearly always the only one. It brings the table's line into the cache.
    pub(crate) fn candidate(&self, tag: u32) -> u32 {
        self.find(tag, |_| true).unwrap_or(NIL)
    }

    /// The place under this tag that `is_it` accepts.
    pub(crate) fn find(&self, tag: u32, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        if self.slots.is_empty() {
            return None;
        }
        let mut at = self.home_slot(tag);
        loop {
            match self.slots[at] {
                EMPTY => return None,
                slot if tag_of(slot) == tag && is_it(slot as u32) => return Some(slot as u32),
                _ => at = self.next_slot(at),
            }
        }
    }

    /// Adds a place that is not there yet.
    pub(crate) fn insert(&mut self, tag: u32, place: u32) {
        if (self.len + 1) * 8 > self.slots.len() * 7 {
            self.resize((self.slots.len() + self.slots.len() / 2).max(FIRST));
        }
        self.put(u64::from(tag) << 32 | u64::from(place));
        self.len += 1;
    }

    fn put(&mut self, slot: u64) {
        let mut at = self.home_slot(tag_of(slot));
        while self.slots[at] != EMPTY {
            at = self.next_slot(at);
        }
        self.slots[at] = slot;
    }

    fn resize(&mut self, slots: usize) {
        let old = std::mem::replace(&mut self.slots, vec![EMPTY; slots]);
        old.into_iter().filter(|slot| *slot != EMPTY).for_each(|slot| self.put(slot));
    }

    /// Removes a place. When none is left, the memory goes back.
    pub(crate) fn remove(&mut self, tag: u32, place: u32) {
        let wanted = u64::from(tag) << 32 | u64::from(place);
        if self.slots.is_empty() {
            return;
        }
        let mut hole = self.home_slot(tag);
        while self.slots[hole] != wanted {
            if self.slots[hole] == EMPTY {
                return;
            }
            hole = self.next_slot(hole);
        }
        self.len -= 1;
        if self.len == 0 {
            self.slots = Vec::new();
            return;
        }
        self.close_gap(hole);
    }

    /// Moves what follows a hole back, as far as each may go, so that no search ends too early.
    fn close_gap(&mut self, mut hole: usize) {
        let count = self.slots.len();
        let mut at = self.next_slot(hole);
        while self.slots[at] != EMPTY {
            let home = self.home_slot(tag_of(self.slots[at]));
            let (from_home, from_hole) = ((at + count - home) % count, (at + count - hole) % count);
            if from_home >= from_hole {
                self.slots[hole] = self.slots[at];
                hole = at;
            }
            at = self.next_slot(at);
        }
        self.slots[hole] = EMPTY;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Few tags, so that they collide and wrap around.
        #[test]
        fn like_a_set(steps in proptest::collection::vec((any::<bool>(), 0..40_u32), 1..if cfg!(miri) { 40 } else { 400 })) {
            let (mut table, mut model) = (HashIndex::default(), BTreeSet::new());
            let tag = |place: u32| (place / 3).wrapping_mul(0x2500_0000);
            for (add, place) in steps {
                if add && model.insert(place) {
                    table.insert(tag(place), place);
                } else if !add {
                    model.remove(&place);
                    table.remove(tag(place), place);
                }
                for place in 0..40 {
                    let found = table.find(tag(place), |it| it == place).is_some();
                    prop_assert_eq!(found, model.contains(&place));
                }
                prop_assert_eq!(table.len, model.len());
            }
        }
    }
}
