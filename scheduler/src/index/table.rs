//! A hash table from 64-bit keys to 31-bit values, divided into many small parts that grow one by one.
//!
//! An entry is 12 bytes, and five of them share a cache line, so that a search usually waits for memory once. They are
//! compared without branching on each, because a processor that guesses wrong throws away the searches it has begun
//! meanwhile. A part holds some hundred entries and is never more than four fifths full; when it is, that part alone is
//! copied, which takes microseconds however large the table is. Keys must be evenly distributed: their high half chooses
//! the part, their low half the bucket where a search begins.

use std::sync::atomic::{AtomicU32, Ordering};

/// Largest value that can be kept.
pub(super) const MAX_VALUE: u32 = (1 << 31) - 2;
/// What [`Table::touch_all`] says of a key that is not there.
pub(super) const UNKNOWN: u32 = u32::MAX;
/// Set on a value by [`Table::touch_all`], until [`Table::untouch`].
const TOUCHED: u32 = 1 << 31;
/// Entries that a part has at most on average, when the table is as full as announced.
const ENTRIES_PER_PART: usize = 1000;
/// Entries of a bucket.
const WIDTH: usize = 5;

/// A cache line of entries, the used ones first.
///
/// Marking a value is the one change that readers make, hence the atomics. They say nothing of other memory.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Bucket {
    keys: [u64; WIDTH],
    values: [AtomicU32; WIDTH],
    len: u16,
    /// Entries whose search begins here or before and ends further on, because this bucket was full. At the type's limit the
    /// number is not known any more, and stays.
    passed: u16,
}

/// Stands for the buckets that a part does not have.
static NOWHERE: Bucket =
    Bucket { keys: [0; WIDTH], values: [const { AtomicU32::new(0) }; WIDTH], len: 0, passed: 0 };

#[derive(Debug, Default)]
struct Part {
    buckets: Box<[Bucket]>,
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
    /// Entries by part. Kept apart, because only changes need them, and lookups the memory nearest to the processor.
    lens: Box<[u32]>,
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
        let lens = vec![0; parts].into_boxed_slice();
        Self { parts: (0..parts).map(|_| Part::default()).collect(), lens, len: 0, slots: 0 }
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
        self.slots / WIDTH * size_of::<Bucket>() + self.parts.len() * (size_of::<Part>() + size_of::<u32>())
    }

    fn part_of(&self, key: u64) -> usize {
        scale(halves(key).1, self.parts.len())
    }

    pub(super) fn find(&self, key: u64) -> Option<Position> {
        let number = self.part_of(key);
        let part = &self.parts[number];
        let (bucket, entry) = part.find(key)?;
        Some(Position { part: number as u32, slot: (bucket * WIDTH + entry) as u32 })
    }

    /// The values of keys, or [`UNKNOWN`]; marks them as used.
    pub(super) fn touch_all<const N: usize>(&self, keys: &[u64]) -> [u32; N] {
        let mut values = [UNKNOWN; N];
        let mut homes = [&NOWHERE; N];
        for (&key, home) in keys.iter().zip(&mut homes) {
            let part = &self.parts[self.part_of(key)];
            *home = part.buckets.get(part.home(key)).unwrap_or(&NOWHERE);
        }
        // All memory is asked for before the first search waits for its own: in a loop so short that a processor that looks
        // ahead sees many turns of it at once.
        let passed = homes.map(|bucket| bucket.passed);
        for (((&key, bucket), &passed), value) in keys.iter().zip(&homes).zip(&passed).zip(&mut values) {
            let raw = match bucket.values.get(bucket.find(key)) {
                Some(raw) => raw,
                None if passed == 0 => continue,
                None => match self.parts[self.part_of(key)].value_of(key) {
                    Some(raw) => raw,
                    None => continue,
                },
            };
            *value = raw.load(Ordering::Relaxed);
            // Writing only once keeps the line shared between cores.
            if *value & TOUCHED == 0 {
                raw.store(*value | TOUCHED, Ordering::Relaxed);
            }
            *value &= !TOUCHED;
        }
        values
    }

    /// The value at a position that holds an entry.
    pub(super) fn value(&self, at: Position) -> Option<u32> {
        let (bucket, entry) = self.entry(at)?;
        Some(bucket.values[entry].load(Ordering::Relaxed) & !TOUCHED)
    }

    /// The key at a position that holds an entry.
    pub(super) fn key(&self, at: Position) -> Option<u64> {
        let (bucket, entry) = self.entry(at)?;
        Some(bucket.keys[entry])
    }

    /// Whether the entry was used since the last call; forgets it.
    pub(super) fn untouch(&mut self, at: Position) -> bool {
        let Some(value) = self.value_mut(at) else { return false };
        let touched = *value & TOUCHED != 0;
        *value &= !TOUCHED;
        touched
    }

    /// Replaces the value of an entry.
    pub(super) fn set(&mut self, at: Position, value: u32) {
        if let Some(raw) = self.value_mut(at) {
            *raw = *raw & TOUCHED | value;
        }
    }

    /// Adds a key that is not there yet.
    pub(super) fn insert(&mut self, key: u64, value: u32) {
        let part = self.part_of(key);
        let (part, len) = (&mut self.parts[part], &mut self.lens[part]);
        if (*len as usize + 1) * 5 > part.buckets.len() * WIDTH * 4 {
            self.slots += part.grow() * WIDTH;
        }
        part.place(key, value & !TOUCHED);
        *len += 1;
        self.len += 1;
    }

    /// Removes an entry. The last one of its bucket takes its position.
    pub(super) fn remove(&mut self, at: Position) {
        if self.entry(at).is_some() {
            self.parts[at.part as usize].remove(at.slot as usize);
            self.lens[at.part as usize] -= 1;
            self.len -= 1;
        }
    }

    /// The position behind `at`, round and round; it need not hold an entry.
    pub(super) fn after(&self, at: Position) -> Position {
        let buckets = self.parts.get(at.part as usize).map_or(0, |part| part.buckets.len());
        if (at.slot as usize) + 1 < buckets * WIDTH {
            return Position { slot: at.slot + 1, ..at };
        }
        let part = if (at.part as usize) + 1 < self.parts.len() { at.part + 1 } else { 0 };
        Position { part, slot: 0 }
    }

    fn entry(&self, at: Position) -> Option<(&Bucket, usize)> {
        let (bucket, entry) = (at.slot as usize / WIDTH, at.slot as usize % WIDTH);
        let bucket = self.parts.get(at.part as usize)?.buckets.get(bucket)?;
        (entry < usize::from(bucket.len)).then_some((bucket, entry))
    }

    fn value_mut(&mut self, at: Position) -> Option<&mut u32> {
        let (bucket, entry) = (at.slot as usize / WIDTH, at.slot as usize % WIDTH);
        let bucket = self.parts.get_mut(at.part as usize)?.buckets.get_mut(bucket)?;
        (entry < usize::from(bucket.len)).then(|| bucket.values[entry].get_mut())
    }

    /// All entries.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u32)> {
        let buckets = self.parts.iter().flat_map(|part| &part.buckets);
        buckets.flat_map(Bucket::entries).map(|(key, value)| (key, value & !TOUCHED))
    }
}

impl Bucket {
    /// The entry of a key, or [`WIDTH`].
    #[inline]
    fn find(&self, key: u64) -> usize {
        let mut found = WIDTH;
        // The first one counts: behind the used entries there may be the key of one that was removed.
        for entry in (0..WIDTH).rev() {
            if self.keys[entry] == key {
                found = entry;
            }
        }
        if found < usize::from(self.len) { found } else { WIDTH }
    }

    /// Adds an entry; `false` where the bucket is full.
    fn push(&mut self, key: u64, value: u32) -> bool {
        let entry = usize::from(self.len);
        if entry == WIDTH {
            return false;
        }
        self.keys[entry] = key;
        *self.values[entry].get_mut() = value;
        self.len += 1;
        true
    }

    /// Keys and raw values.
    fn entries(&self) -> impl Iterator<Item = (u64, u32)> {
        let entries = self.keys.iter().zip(&self.values).take(self.len.into());
        entries.map(|(&key, raw)| (key, raw.load(Ordering::Relaxed)))
    }
}

impl Part {
    /// The bucket where a search begins.
    #[inline]
    fn home(&self, key: u64) -> usize {
        scale(halves(key).0, self.buckets.len())
    }

    fn next(&self, bucket: usize) -> usize {
        if bucket + 1 < self.buckets.len() { bucket + 1 } else { 0 }
    }

    /// The bucket and the entry of a key.
    fn find(&self, key: u64) -> Option<(usize, usize)> {
        let mut at = self.home(key);
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            let entry = bucket.find(key);
            if entry < WIDTH {
                return Some((at, entry));
            }
            if bucket.passed == 0 {
                return None;
            }
            at = self.next(at);
        }
        None
    }

    fn value_of(&self, key: u64) -> Option<&AtomicU32> {
        let (bucket, entry) = self.find(key)?;
        Some(&self.buckets[bucket].values[entry])
    }

    /// Fills the first empty place, of which there is one.
    fn place(&mut self, key: u64, value: u32) {
        let mut at = self.home(key);
        while !self.buckets[at].push(key, value) {
            let passed = &mut self.buckets[at].passed;
            *passed = passed.saturating_add(1);
            at = self.next(at);
        }
    }

    /// Grows by a quarter; returns the buckets gained.
    fn grow(&mut self) -> usize {
        let gained = (self.buckets.len() / 4).max(1);
        let buckets = (0..self.buckets.len() + gained).map(|_| Bucket::default()).collect();
        let old = std::mem::replace(&mut self.buckets, buckets);
        for (key, value) in old.iter().flat_map(Bucket::entries) {
            self.place(key, value);
        }
        gained
    }

    fn remove(&mut self, slot: usize) {
        let (number, entry) = (slot / WIDTH, slot % WIDTH);
        let bucket = &mut self.buckets[number];
        let key = bucket.keys[entry];
        let last = usize::from(bucket.len) - 1;
        bucket.keys.swap(entry, last);
        bucket.values.swap(entry, last);
        bucket.len -= 1;
        let mut at = self.home(key);
        while at != number {
            let passed = &mut self.buckets[at].passed;
            if *passed < u16::MAX {
                *passed -= 1;
            }
            at = self.next(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_bucket_is_a_cache_line() {
        assert_eq!((size_of::<Bucket>(), align_of::<Bucket>()), (64, 64));
    }

    fn touch(table: &Table, key: u64) -> Option<u32> {
        let [value] = table.touch_all(&[key]);
        Some(value).filter(|&value| value != UNKNOWN)
    }

    #[test]
    fn touching_is_remembered_once() {
        let mut table = Table::new(10);
        table.insert(5, 7);
        let at = table.find(5).unwrap();
        assert!(!table.untouch(at));
        assert_eq!(touch(&table, 5), Some(7));
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
                prop_assert_eq!(touch(&table, key), Some(value));
            }
        }
    }
}
