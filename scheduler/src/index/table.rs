//! A hash table from 64-bit keys to 31-bit values, divided into many small parts that grow one by one.
//!
//! An entry is 12 bytes. A part holds some hundred entries and is never more than four fifths full; when it is, that
//! part alone is copied, which takes microseconds however large the table is. Keys must be evenly distributed: their
//! high half chooses the part, their low half the slot where a search begins.

use std::sync::atomic::{AtomicU32, Ordering};

/// Largest value that can be kept.
pub(super) const MAX_VALUE: u32 = (1 << 31) - 2;
/// Set on a value by [`Table::touch`], until [`Table::untouch`].
const TOUCHED: u32 = 1 << 31;
const EMPTY: u32 = u32::MAX;
/// Entries that a part has at most on average, when the table is as full as announced.
const ENTRIES_PER_PART: usize = 600;
const SMALLEST_PART: usize = 8;
/// Slots behind the last one where a search can begin. Searches do not wrap around.
const TAIL: usize = 8;

/// Marking a value is the one change that readers make, hence the atomic. It says nothing of other memory.
#[derive(Debug)]
struct Slot {
    low: u32,
    high: u32,
    value: AtomicU32,
}

impl Slot {
    const fn empty() -> Self {
        Self { low: 0, high: 0, value: AtomicU32::new(EMPTY) }
    }

    fn raw(&self) -> u32 {
        self.value.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
struct Part {
    slots: Box<[Slot]>,
    len: u32,
}

/// Where an entry is. Valid until the next insertion or removal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Position {
    part: u32,
    slot: u32,
}

/// The table.
#[derive(Debug)]
pub(super) struct Table {
    parts: Box<[Part]>,
    len: usize,
    slots: usize,
}

fn scale(half: u32, into: usize) -> usize {
    ((u64::from(half) * into as u64) >> 32) as usize
}

fn halves(key: u64) -> (u32, u32) {
    (key as u32, (key >> 32) as u32)
}

impl Table {
    /// A table that is at its best with up to `entries`.
    pub(super) fn new(entries: usize) -> Self {
        let parts = (entries / ENTRIES_PER_PART).clamp(1, 1 << 24);
        Self { parts: (0..parts).map(|_| Part::default()).collect(), len: 0, slots: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Places for entries, used or not.
    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// Bytes of memory that the entries take.
    pub(super) fn bytes(&self) -> usize {
        self.slots * size_of::<Slot>() + self.parts.len() * size_of::<Part>()
    }

    fn part_of(&self, key: u64) -> usize {
        scale(halves(key).1, self.parts.len())
    }

    pub(super) fn find(&self, key: u64) -> Option<Position> {
        let part = self.part_of(key);
        let slot = self.parts[part].find(key)?;
        Some(Position { part: part as u32, slot: slot as u32 })
    }

    /// The value of a key; marks it as used.
    #[inline]
    pub(super) fn touch(&self, key: u64) -> Option<u32> {
        let part = &self.parts[self.part_of(key)];
        let slot = &part.slots[part.find(key)?];
        let value = slot.raw();
        // Writing only once keeps the line shared between cores.
        if value & TOUCHED == 0 {
            slot.value.store(value | TOUCHED, Ordering::Relaxed);
        }
        Some(value & !TOUCHED)
    }

    /// The value at a position that holds an entry.
    pub(super) fn value(&self, at: Position) -> Option<u32> {
        match self.slot(at)?.raw() {
            EMPTY => None,
            value => Some(value & !TOUCHED),
        }
    }

    /// The key at a position that holds an entry.
    pub(super) fn key(&self, at: Position) -> Option<u64> {
        let slot = self.slot(at).filter(|slot| slot.raw() != EMPTY)?;
        Some(u64::from(slot.high) << 32 | u64::from(slot.low))
    }

    /// Whether the entry was used since the last call; forgets it.
    pub(super) fn untouch(&mut self, at: Position) -> bool {
        let Some(slot) = self.slot_mut(at) else { return false };
        let value = slot.value.get_mut();
        let touched = *value != EMPTY && *value & TOUCHED != 0;
        if touched {
            *value &= !TOUCHED;
        }
        touched
    }

    /// Replaces the value of an entry.
    pub(super) fn set(&mut self, at: Position, value: u32) {
        if let Some(slot) = self.slot_mut(at) {
            let raw = slot.value.get_mut();
            *raw = *raw & TOUCHED | value;
        }
    }

    /// Adds a key that is not there yet.
    pub(super) fn insert(&mut self, key: u64, value: u32) {
        let part = self.part_of(key);
        let (low, high) = halves(key);
        self.slots += self.parts[part].add(low, high, value & !TOUCHED);
        self.len += 1;
    }

    /// Removes an entry. Entries behind it in the same part move.
    pub(super) fn remove(&mut self, at: Position) {
        if let Some(part) = self.parts.get_mut(at.part as usize) {
            part.remove(at.slot as usize);
            self.len -= 1;
        }
    }

    /// The position behind `at`, round and round; it need not hold an entry.
    pub(super) fn after(&self, at: Position) -> Position {
        let slots = self.parts.get(at.part as usize).map_or(0, |part| part.slots.len());
        if (at.slot as usize) + 1 < slots {
            return Position { slot: at.slot + 1, ..at };
        }
        let part = if (at.part as usize) + 1 < self.parts.len() { at.part + 1 } else { 0 };
        Position { part, slot: 0 }
    }

    fn slot(&self, at: Position) -> Option<&Slot> {
        self.parts.get(at.part as usize)?.slots.get(at.slot as usize)
    }

    fn slot_mut(&mut self, at: Position) -> Option<&mut Slot> {
        self.parts.get_mut(at.part as usize)?.slots.get_mut(at.slot as usize)
    }

    /// All entries.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u32)> {
        let slots = self.parts.iter().flat_map(|part| part.slots.iter()).filter(|slot| slot.raw() != EMPTY);
        slots.map(|slot| (u64::from(slot.high) << 32 | u64::from(slot.low), slot.raw() & !TOUCHED))
    }
}

impl Part {
    /// Slots where a search can begin.
    fn homes(&self) -> usize {
        self.slots.len().saturating_sub(TAIL)
    }

    #[inline]
    fn find(&self, key: u64) -> Option<usize> {
        let (low, high) = halves(key);
        let home = scale(low, self.homes());
        for (at, slot) in self.slots.iter().enumerate().skip(home) {
            if slot.raw() == EMPTY {
                return None;
            }
            if slot.low == low && slot.high == high {
                return Some(at);
            }
        }
        None
    }

    /// Adds a key that is not there yet; returns the slots gained.
    fn add(&mut self, low: u32, high: u32, value: u32) -> usize {
        let before = self.slots.len();
        if (self.len as usize + 1) * 5 > self.homes() * 4 {
            self.grow();
        }
        while !self.place(low, high, value) {
            self.grow();
        }
        self.len += 1;
        self.slots.len() - before
    }

    /// Fills the first empty slot; `false` where the tail is full.
    fn place(&mut self, low: u32, high: u32, value: u32) -> bool {
        let home = scale(low, self.homes());
        let vacant = self.slots.iter_mut().skip(home).find(|slot| slot.raw() == EMPTY);
        vacant.map(|slot| *slot = Slot { low, high, value: AtomicU32::new(value) }).is_some()
    }

    /// Grows by a quarter, or more where the tail would not hold.
    fn grow(&mut self) {
        let old = std::mem::take(&mut self.slots);
        let mut homes = old.len().saturating_sub(TAIL);
        loop {
            homes = (homes + homes / 4).max(SMALLEST_PART);
            self.slots = (0..homes + TAIL).map(|_| Slot::empty()).collect();
            let mut entries = old.iter().filter(|slot| slot.raw() != EMPTY);
            if entries.all(|slot| self.place(slot.low, slot.high, slot.raw())) {
                return;
            }
        }
    }

    /// Moves entries up that were displaced over the hole, so that searches need no tombstones.
    fn remove(&mut self, hole: usize) {
        let mut hole = hole;
        for at in hole + 1..self.slots.len() {
            if self.slots[at].raw() == EMPTY {
                break;
            }
            if scale(self.slots[at].low, self.homes()) <= hole {
                self.slots[hole] = std::mem::replace(&mut self.slots[at], Slot::empty());
                hole = at;
            }
        }
        self.slots[hole] = Slot::empty();
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_entry_is_twelve_bytes() {
        assert_eq!(size_of::<Slot>(), 12);
    }

    #[test]
    fn touching_is_remembered_once() {
        let mut table = Table::new(10);
        table.insert(5, 7);
        let at = table.find(5).unwrap();
        assert!(!table.untouch(at));
        assert_eq!(table.touch(5), Some(7));
        table.set(at, 9);
        assert!(table.untouch(at), "a new value keeps the mark");
        assert!(!table.untouch(at));
        assert_eq!(table.value(at), Some(9));
        assert_eq!(table.key(at), Some(5));
    }

    #[test]
    fn going_round_meets_every_entry() {
        let mut table = Table::new(5_000);
        let keys: Vec<u64> = (0..5_000u64).map(|key| key.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        keys.iter().for_each(|&key| table.insert(key, 1));
        let (mut at, mut met) = (Position::default(), 0);
        loop {
            met += usize::from(table.value(at).is_some());
            at = table.after(at);
            if at == Position::default() {
                break;
            }
        }
        assert_eq!((met, table.len()), (keys.len(), keys.len()));
    }

    proptest! {
        /// Few distinct keys that crowd at both ends of a part, so that entries are displaced far and reach the tail.
        #[test]
        fn behaves_like_a_map(ops in prop::collection::vec((any::<bool>(), 0u64..60, 0u32..100), 0..400)) {
            let mut table = Table::new(1);
            let mut model = BTreeMap::new();
            for (add, key, value) in ops {
                let key = if key % 2 == 0 { key << 24 } else { u64::from(u32::MAX) - (key << 10) };
                match (add, table.find(key)) {
                    (true, None) => table.insert(key, value),
                    (true, Some(at)) => table.set(at, value),
                    (false, Some(at)) => table.remove(at),
                    (false, None) => {}
                }
                if add { model.insert(key, value); } else { model.remove(&key); }
                prop_assert_eq!(table.len(), model.len());
            }
            prop_assert_eq!(table.iter().collect::<BTreeMap<_, _>>(), model.clone());
            for (key, value) in model {
                prop_assert_eq!(table.touch(key), Some(value));
            }
        }
    }
}
