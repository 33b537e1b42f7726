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
/// What [`CompactHashTable::touch_all`] says of a key that is not there.
pub(super) const NOT_FOUND: u32 = u32::MAX;
/// Set on a value by [`CompactHashTable::touch_all`], until [`CompactHashTable::untouch`].
const TOUCHED: u32 = 1 << 31;
/// Entries that a part has at most on average, when the table is as full as announced.
const ENTRIES_PER_SHARD: usize = 1000;
/// Entries of a bucket.
const BUCKET_WIDTH: usize = 5;

/// A cache line of entries, the used ones first.
///
/// Marking a value is the one change that readers make, hence the atomics. They say nothing of other memory.
#[derive(Debug, Default)]
#[repr(align(64))]
struct HashTableBucket {
    keys: [u64; BUCKET_WIDTH],
    values: [AtomicU32; BUCKET_WIDTH],
    len: u16,
    /// Entries whose search begins here or before and ends further on, because this bucket was full. At the type's limit the
    /// number is not known any more, and stays.
    overflowed: u16,
}

/// Stands for the buckets that a part does not have.
static EMPTY_BUCKET: HashTableBucket = HashTableBucket {
    keys: [0; BUCKET_WIDTH],
    values: [const { AtomicU32::new(0) }; BUCKET_WIDTH],
    len: 0,
    overflowed: 0,
};

#[derive(Debug, Default)]
struct HashTableShard {
    buckets: Box<[HashTableBucket]>,
}

/// Where an entry is. Valid until the next insertion or removal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct TablePosition {
    shard: u32,
    slot: u32,
}

/// The table.
#[derive(Debug)]
pub(super) struct CompactHashTable {
    shards: Box<[HashTableShard]>,
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

impl CompactHashTable {
    /// A table that is at its best with up to `entries`.
    pub(super) fn new(entries: usize) -> Self {
        let parts = (entries / ENTRIES_PER_SHARD).clamp(1, 1 << 24);
        let lens = vec![0; parts].into_boxed_slice();
        Self { shards: (0..parts).map(|_| HashTableShard::default()).collect(), lens, len: 0, slots: 0 }
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
        self.slots / BUCKET_WIDTH * size_of::<HashTableBucket>()
            + self.shards.len() * (size_of::<HashTableShard>() + size_of::<u32>())
    }

    fn shard_of(&self, key: u64) -> usize {
        scale(halves(key).1, self.shards.len())
    }

    pub(super) fn find(&self, key: u64) -> Option<TablePosition> {
        let number = self.shard_of(key);
        let part = &self.shards[number];
        let (bucket, entry) = part.find(key)?;
        Some(TablePosition { shard: number as u32, slot: (bucket * BUCKET_WIDTH + entry) as u32 })
    }

    /// The values of keys, or [`NOT_FOUND`]; marks them as used.
    pub(super) fn touch_all<const N: usize>(&self, keys: &[u64]) -> [u32; N] {
        let mut values = [NOT_FOUND; N];
        let mut homes = [&EMPTY_BUCKET; N];
        for (&key, home) in keys.iter().zip(&mut homes) {
            let part = &self.shards[self.shard_of(key)];
            *home = part.buckets.get(part.home(key)).unwrap_or(&EMPTY_BUCKET);
        }
        // All memory is asked for before the first search waits for its own: in a loop so short that a processor that looks
        // ahead sees many turns of it at once.
        let passed = homes.map(|bucket| bucket.overflowed);
        for (((&key, bucket), &passed), value) in keys.iter().zip(&homes).zip(&passed).zip(&mut values) {
            let raw = match bucket.values.get(bucket.find(key)) {
                Some(raw) => raw,
                None if passed == 0 => continue,
                None => match self.shards[self.shard_of(key)].value_of(key) {
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
    pub(super) fn value(&self, at: TablePosition) -> Option<u32> {
        let (bucket, entry) = self.entry(at)?;
        Some(bucket.values[entry].load(Ordering::Relaxed) & !TOUCHED)
    }

    /// The key at a position that holds an entry.
    pub(super) fn key(&self, at: TablePosition) -> Option<u64> {
        let (bucket, entry) = self.entry(at)?;
        Some(bucket.keys[entry])
    }

    /// Whether the entry was used since the last call; forgets it.
    pub(super) fn untouch(&mut self, at: TablePosition) -> bool {
        let Some(value) = self.value_mut(at) else { return false };
        let touched = *value & TOUCHED != 0;
        *value &= !TOUCHED;
        touched
    }

    /// Replaces the value of an entry.
    pub(super) fn set(&mut self, at: TablePosition, value: u32) {
        if let Some(raw) = self.value_mut(at) {
            *raw = *raw & TOUCHED | value;
        }
    }

    /// Adds a key that is not there yet.
    pub(super) fn insert(&mut self, key: u64, value: u32) {
        let part = self.shard_of(key);
        let (part, len) = (&mut self.shards[part], &mut self.lens[part]);
        if (*len as usize + 1) * 5 > part.buckets.len() * BUCKET_WIDTH * 4 {
            self.slots += part.grow() * BUCKET_WIDTH;
        }
        part.place(key, value & !TOUCHED);
        *len += 1;
        self.len += 1;
    }

    /// Removes an entry. The last one of its bucket takes its position.
    pub(super) fn remove(&mut self, at: TablePosition) {
        if self.entry(at).is_some() {
            self.shards[at.shard as usize].remove(at.slot as usize);
            self.lens[at.shard as usize] -= 1;
            self.len -= 1;
        }
    }

    /// The position behind `at`, round and round; it need not hold an entry.
    pub(super) fn after(&self, at: TablePosition) -> TablePosition {
        let buckets = self.shards.get(at.shard as usize).map_or(0, |part| part.buckets.len());
        if (at.slot as usize) + 1 < buckets * BUCKET_WIDTH {
            return TablePosition { slot: at.slot + 1, ..at };
        }
        let part = if (at.shard as usize) + 1 < self.shards.len() { at.shard + 1 } else { 0 };
        TablePosition { shard: part, slot: 0 }
    }

    fn entry(&self, at: TablePosition) -> Option<(&HashTableBucket, usize)> {
        let (bucket, entry) = (at.slot as usize / BUCKET_WIDTH, at.slot as usize % BUCKET_WIDTH);
        let bucket = self.shards.get(at.shard as usize)?.buckets.get(bucket)?;
        (entry < usize::from(bucket.len)).then_some((bucket, entry))
    }

    fn value_mut(&mut self, at: TablePosition) -> Option<&mut u32> {
        let (bucket, entry) = (at.slot as usize / BUCKET_WIDTH, at.slot as usize % BUCKET_WIDTH);
        let bucket = self.shards.get_mut(at.shard as usize)?.buckets.get_mut(bucket)?;
        (entry < usize::from(bucket.len)).then(|| bucket.values[entry].get_mut())
    }

    /// All entries.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u32)> {
        let buckets = self.shards.iter().flat_map(|part| &part.buckets);
        buckets.flat_map(HashTableBucket::entries).map(|(key, value)| (key, value & !TOUCHED))
    }
}

impl HashTableBucket {
    /// The entry of a key, or [`BUCKET_WIDTH`].
    #[inline]
    fn find(&self, key: u64) -> usize {
        let mut found = BUCKET_WIDTH;
        // The first one counts: behind the used entries there may be the key of one that was removed.
        for entry in (0..BUCKET_WIDTH).rev() {
            if self.keys[entry] == key {
                found = entry;
            }
        }
        if found < usize::from(self.len) { found } else { BUCKET_WIDTH }
    }

    /// Adds an entry; `false` where the bucket is full.
    fn push(&mut self, key: u64, value: u32) -> bool {
        let entry = usize::from(self.len);
        if entry == BUCKET_WIDTH {
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

impl HashTableShard {
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
            if entry < BUCKET_WIDTH {
                return Some((at, entry));
            }
            if bucket.overflowed == 0 {
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
            let passed = &mut self.buckets[at].overflowed;
            *passed = passed.saturating_add(1);
            at = self.next(at);
        }
    }

    /// Grows by a quarter; returns the buckets gained.
    fn grow(&mut self) -> usize {
        let gained = (self.buckets.len() / 4).max(1);
        let buckets = (0..self.buckets.len() + gained).map(|_| HashTableBucket::default()).collect();
        let old = std::mem::replace(&mut self.buckets, buckets);
        for (key, value) in old.iter().flat_map(HashTableBucket::entries) {
            self.place(key, value);
        }
        gained
    }

    fn remove(&mut self, slot: usize) {
        let (number, entry) = (slot / BUCKET_WIDTH, slot % BUCKET_WIDTH);
        let bucket = &mut self.buckets[number];
        let key = bucket.keys[entry];
        let last = usize::from(bucket.len) - 1;
        bucket.keys.swap(entry, last);
        bucket.values.swap(entry, last);
        bucket.len -= 1;
        let mut at = self.home(key);
        while at != number {
            let passed = &mut self.buckets[at].overflowed;
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
        assert_eq!((size_of::<HashTableBucket>(), align_of::<HashTableBucket>()), (64, 64));
    }

    fn touch(table: &CompactHashTable, key: u64) -> Option<u32> {
        let [value] = table.touch_all(&[key]);
        Some(value).filter(|&value| value != NOT_FOUND)
    }

    #[test]
    fn touching_is_remembered_once() {
        let mut table = CompactHashTable::new(10);
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
        let mut table = CompactHashTable::new(5_000);
        let keys: Vec<u64> = (0..5_000u64).map(|key| key.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        keys.iter().for_each(|&key| table.insert(key, 1));
        let (mut at, mut met) = (TablePosition::default(), 0);
        loop {
            met += usize::from(table.value(at).is_some());
            at = table.after(at);
            if at == TablePosition::default() {
                break;
            }
        }
        assert_eq!((met, table.len()), (keys.len(), keys.len()));
    }

    proptest! {
        /// Few distinct keys that crowd at both ends of a part, so that entries are displaced far and reach the tail.
        #[test]
        fn behaves_like_a_map(ops in prop::collection::vec((any::<bool>(), 0u64..60, 0u32..100), 0..400)) {
            let mut table = CompactHashTable::new(1);
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
