//! Hash index from keys to slab indices: open addressing with eight bytes per slot.
//!
//! A slot contains 32 bits of the hash and the index, so that neither growing nor removing reads the entries.

use std::marker::PhantomData;

use crate::indices::SlabIndex;

const EMPTY: u64 = u64::MAX;
/// Number of slots of the smallest table.
const MIN_SLOTS: usize = 8;

/// The hash index. Callers compare the keys.
#[derive(Debug)]
pub(crate) struct HashIndex<I> {
    slots: Vec<u64>,
    len: usize,
    index: PhantomData<I>,
}

impl<I> Default for HashIndex<I> {
    fn default() -> Self {
        Self { slots: Vec::new(), len: 0, index: PhantomData }
    }
}

/// Number of slots after growth: four to seven times a power of two, as the allocator's sizes are, so that nothing is wasted and at
/// least seven tenths of the slots are used.
fn next_size(slots: usize) -> usize {
    if slots < MIN_SLOTS {
        return MIN_SLOTS;
    }
    slots + (1 << (slots.ilog2() - 2))
}

fn tag_of(slot: u64) -> u32 {
    (slot >> 32) as u32
}

fn slot_of<I: SlabIndex>(tag: u32, index: I) -> u64 {
    u64::from(tag) << 32 | u64::from(index.slot())
}

fn index_of<I: SlabIndex>(slot: u64) -> I {
    I::from_slot(slot as u32)
}

impl<I: SlabIndex> HashIndex<I> {
    fn home_slot(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.slots.len() as u64) >> 32) as usize
    }

    fn next_slot(&self, slot: usize) -> usize {
        if slot + 1 == self.slots.len() { 0 } else { slot + 1 }
    }

    /// The first index with this tag, usually the only one. Also loads the slot's cache line.
    pub(crate) fn candidate(&self, tag: u32) -> Option<I> {
        self.find(tag, |_| true)
    }

    /// The index with this tag that `matches` accepts.
    pub(crate) fn find(&self, tag: u32, mut matches: impl FnMut(I) -> bool) -> Option<I> {
        if self.slots.is_empty() {
            return None;
        }
        let mut position = self.home_slot(tag);
        loop {
            match self.slots[position] {
                EMPTY => return None,
                slot if tag_of(slot) == tag && matches(index_of(slot)) => return Some(index_of(slot)),
                _ => position = self.next_slot(position),
            }
        }
    }

    /// Adds an index that is not present.
    pub(crate) fn insert(&mut self, tag: u32, index: I) {
        if (self.len + 1) * 8 > self.slots.len() * 7 {
            self.resize(next_size(self.slots.len()));
        }
        self.put(slot_of(tag, index));
        self.len += 1;
    }

    fn put(&mut self, slot: u64) {
        let mut position = self.home_slot(tag_of(slot));
        while self.slots[position] != EMPTY {
            position = self.next_slot(position);
        }
        self.slots[position] = slot;
    }

    fn resize(&mut self, slots: usize) {
        let old = std::mem::replace(&mut self.slots, vec![EMPTY; slots]);
        old.into_iter().filter(|slot| *slot != EMPTY).for_each(|slot| self.put(slot));
    }

    /// Removes an index. When the table becomes empty, its memory is freed.
    pub(crate) fn remove(&mut self, tag: u32, index: I) {
        let target = slot_of(tag, index);
        if self.slots.is_empty() {
            return;
        }
        let mut hole = self.home_slot(tag);
        while self.slots[hole] != target {
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

    /// Moves slots after a hole back towards their home, so that no lookup ends early (backward shift deletion).
    fn close_gap(&mut self, mut hole: usize) {
        let count = self.slots.len();
        let mut position = self.next_slot(hole);
        while self.slots[position] != EMPTY {
            let home = self.home_slot(tag_of(self.slots[position]));
            let (from_home, from_hole) =
                ((position + count - home) % count, (position + count - hole) % count);
            if from_home >= from_hole {
                self.slots[hole] = self.slots[position];
                hole = position;
            }
            position = self.next_slot(position);
        }
        self.slots[hole] = EMPTY;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::indices::EntryIndex;

    proptest! {
        /// Uses few tags, so that they collide and wrap around.
        #[test]
        fn behaves_like_a_set(steps in proptest::collection::vec((any::<bool>(), 0..40_u32), 1..if cfg!(miri) { 40 } else { 400 })) {
            let (mut table, mut model) = (HashIndex::default(), BTreeSet::new());
            let tag = |index: u32| (index / 3).wrapping_mul(0x2500_0000);
            for (add, index) in steps {
                let entry = EntryIndex::from_slot(index);
                if add && model.insert(index) {
                    table.insert(tag(index), entry);
                } else if !add {
                    model.remove(&index);
                    table.remove(tag(index), entry);
                }
                for index in 0..40 {
                    let entry = EntryIndex::from_slot(index);
                    let found = table.find(tag(index), |candidate| candidate == entry).is_some();
                    prop_assert_eq!(found, model.contains(&index));
                }
                prop_assert_eq!(table.len, model.len());
            }
        }
    }
}
