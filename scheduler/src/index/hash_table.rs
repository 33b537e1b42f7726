//! A hash table from 64-bit keys to placements (31 bits), divided into many small shards that grow independently.
//!
//! An entry is 12 bytes, and five of them share a cache line, so that a search usually waits for memory once. They are
//! compared without a branch per entry, because a mispredicted branch discards the searches that the processor has
//! started speculatively. A shard holds some hundred entries and is at most four fifths full; then only that shard is
//! copied, which takes microseconds whatever the table's size. Keys must be evenly distributed: their high half selects
//! the shard, their low half the bucket where a search starts.

use std::sync::atomic::{AtomicU32, Ordering};

use super::indices::PlacementIndex;

/// Set on a value by [`CompactHashTable::touch_all`], until [`CompactHashTable::untouch`].
const TOUCHED: u32 = 1 << 31;
/// Average number of entries in a shard when the table has its announced size.
const ENTRIES_PER_SHARD: usize = 1000;
const BUCKET_WIDTH: usize = 5;

/// A cache line of entries, used entries first.
///
/// Marking a value is the only change that readers make, hence the atomics. They order no other memory.
#[derive(Debug, Default)]
#[repr(align(64))]
struct HashTableBucket {
    keys: [u64; BUCKET_WIDTH],
    values: [AtomicU32; BUCKET_WIDTH],
    len: u16,
    /// Entries whose search starts at or before this bucket and ends after it, because this bucket was full. At the
    /// type's maximum the count is unknown and no longer changes.
    overflowed: u16,
}

/// Stands for buckets that a shard does not have.
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

/// Position of an entry. Valid until the next insertion or removal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct TablePosition {
    shard: u32,
    slot: u32,
}

#[derive(Debug)]
pub(super) struct CompactHashTable {
    shards: Box<[HashTableShard]>,
    /// Entries per shard. Stored separately, because only changes need them and lookups need the cache.
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
    /// A table sized for up to `entries`.
    pub(super) fn new(entries: usize) -> Self {
        let parts = (entries / ENTRIES_PER_SHARD).clamp(1, 1 << 24);
        let lens = vec![0; parts].into_boxed_slice();
        Self { shards: (0..parts).map(|_| HashTableShard::default()).collect(), lens, len: 0, slots: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Slots for entries, used or not.
    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// Bytes allocated for the entries.
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

    /// The values of keys, or [`PlacementIndex::NONE`]; marks them as used.
    pub(super) fn touch_all<const N: usize>(&self, keys: &[u64]) -> [PlacementIndex; N] {
        let mut values = [PlacementIndex::NONE; N];
        let mut homes = [&EMPTY_BUCKET; N];
        for (&key, home) in keys.iter().zip(&mut homes) {
            let part = &self.shards[self.shard_of(key)];
            *home = part.buckets.get(part.home(key)).unwrap_or(&EMPTY_BUCKET);
        }
        // All memory is requested before the first search waits for its own, in a loop short enough for out-of-order
        // execution to run many iterations at once.
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
            let found = raw.load(Ordering::Relaxed);
            // Writing only once keeps the line shared between cores.
            if found & TOUCHED == 0 {
                raw.store(found | TOUCHED, Ordering::Relaxed);
            }
            *value = PlacementIndex::from_raw(found & !TOUCHED);
        }
        values
    }

    /// The value at a position, if it holds an entry.
    pub(super) fn value(&self, position: TablePosition) -> Option<PlacementIndex> {
        let (bucket, entry) = self.entry(position)?;
        Some(PlacementIndex::from_raw(bucket.values[entry].load(Ordering::Relaxed) & !TOUCHED))
    }

    /// The key at a position, if it holds an entry.
    pub(super) fn key(&self, position: TablePosition) -> Option<u64> {
        let (bucket, entry) = self.entry(position)?;
        Some(bucket.keys[entry])
    }

    /// Whether the entry was used since the last call; clears the mark.
    pub(super) fn untouch(&mut self, position: TablePosition) -> bool {
        let Some(value) = self.value_mut(position) else { return false };
        let touched = *value & TOUCHED != 0;
        *value &= !TOUCHED;
        touched
    }

    pub(super) fn set(&mut self, position: TablePosition, value: PlacementIndex) {
        if let Some(raw) = self.value_mut(position) {
            *raw = *raw & TOUCHED | value.raw();
        }
    }

    /// Adds a key that is not in the table yet.
    pub(super) fn insert(&mut self, key: u64, value: PlacementIndex) {
        let part = self.shard_of(key);
        let (part, len) = (&mut self.shards[part], &mut self.lens[part]);
        if (*len as usize + 1) * 5 > part.buckets.len() * BUCKET_WIDTH * 4 {
            self.slots += part.grow() * BUCKET_WIDTH;
        }
        part.place(key, value.raw() & !TOUCHED);
        *len += 1;
        self.len += 1;
    }

    /// Removes an entry. The last one of its bucket takes its position.
    pub(super) fn remove(&mut self, position: TablePosition) {
        if self.entry(position).is_some() {
            self.shards[position.shard as usize].remove(position.slot as usize);
            self.lens[position.shard as usize] -= 1;
            self.len -= 1;
        }
    }

    /// The next position after `position`, cyclically; it need not hold an entry.
    pub(super) fn after(&self, position: TablePosition) -> TablePosition {
        let buckets = self.shards.get(position.shard as usize).map_or(0, |part| part.buckets.len());
        if (position.slot as usize) + 1 < buckets * BUCKET_WIDTH {
            return TablePosition { slot: position.slot + 1, ..position };
        }
        let part = if (position.shard as usize) + 1 < self.shards.len() { position.shard + 1 } else { 0 };
        TablePosition { shard: part, slot: 0 }
    }

    fn entry(&self, position: TablePosition) -> Option<(&HashTableBucket, usize)> {
        let (bucket, entry) = (position.slot as usize / BUCKET_WIDTH, position.slot as usize % BUCKET_WIDTH);
        let bucket = self.shards.get(position.shard as usize)?.buckets.get(bucket)?;
        (entry < usize::from(bucket.len)).then_some((bucket, entry))
    }

    fn value_mut(&mut self, position: TablePosition) -> Option<&mut u32> {
        let (bucket, entry) = (position.slot as usize / BUCKET_WIDTH, position.slot as usize % BUCKET_WIDTH);
        let bucket = self.shards.get_mut(position.shard as usize)?.buckets.get_mut(bucket)?;
        (entry < usize::from(bucket.len)).then(|| bucket.values[entry].get_mut())
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, PlacementIndex)> {
        let buckets = self.shards.iter().flat_map(|part| &part.buckets);
        let entries = buckets.flat_map(HashTableBucket::entries);
        entries.map(|(key, raw)| (key, PlacementIndex::from_raw(raw & !TOUCHED)))
    }
}

impl HashTableBucket {
    /// Position of a key's entry in the bucket, or [`BUCKET_WIDTH`].
    #[inline]
    fn find(&self, key: u64) -> usize {
        let mut found = BUCKET_WIDTH;
        // The first match counts: an unused slot may still contain the key of a removed entry.
        for entry in (0..BUCKET_WIDTH).rev() {
            if self.keys[entry] == key {
                found = entry;
            }
        }
        if found < usize::from(self.len) { found } else { BUCKET_WIDTH }
    }

    /// Adds an entry; `false` if the bucket is full.
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

    /// Keys and raw values of used entries.
    fn entries(&self) -> impl Iterator<Item = (u64, u32)> {
        let entries = self.keys.iter().zip(&self.values).take(self.len.into());
        entries.map(|(&key, raw)| (key, raw.load(Ordering::Relaxed)))
    }
}

impl HashTableShard {
    /// The bucket where a search starts.
    #[inline]
    fn home(&self, key: u64) -> usize {
        scale(halves(key).0, self.buckets.len())
    }

    fn next(&self, bucket: usize) -> usize {
        if bucket + 1 < self.buckets.len() { bucket + 1 } else { 0 }
    }

    /// The bucket and the slot of a key.
    fn find(&self, key: u64) -> Option<(usize, usize)> {
        let mut position = self.home(key);
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[position];
            let entry = bucket.find(key);
            if entry < BUCKET_WIDTH {
                return Some((position, entry));
            }
            if bucket.overflowed == 0 {
                return None;
            }
            position = self.next(position);
        }
        None
    }

    fn value_of(&self, key: u64) -> Option<&AtomicU32> {
        let (bucket, entry) = self.find(key)?;
        Some(&self.buckets[bucket].values[entry])
    }

    /// Fills the first empty slot; one must exist.
    fn place(&mut self, key: u64, value: u32) {
        let mut position = self.home(key);
        while !self.buckets[position].push(key, value) {
            let passed = &mut self.buckets[position].overflowed;
            *passed = passed.saturating_add(1);
            position = self.next(position);
        }
    }

    /// Grows by a quarter; returns the number of buckets gained.
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
        let mut position = self.home(key);
        while position != number {
            let passed = &mut self.buckets[position].overflowed;
            if *passed < u16::MAX {
                *passed -= 1;
            }
            position = self.next(position);
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

    fn touch(table: &CompactHashTable, key: u64) -> Option<PlacementIndex> {
        let [value] = table.touch_all(&[key]);
        Some(value).filter(|&value| value != PlacementIndex::NONE)
    }

    #[test]
    fn touch_mark_is_cleared_by_untouch() {
        let [first, second] = [7, 9].map(PlacementIndex::from_raw);
        let mut table = CompactHashTable::new(10);
        table.insert(5, first);
        let position = table.find(5).unwrap();
        assert!(!table.untouch(position));
        assert_eq!(touch(&table, 5), Some(first));
        table.set(position, second);
        assert!(table.untouch(position), "a new value keeps the mark");
        assert!(!table.untouch(position));
        assert_eq!(table.value(position), Some(second));
        assert_eq!(table.key(position), Some(5));
    }

    #[test]
    fn iteration_visits_every_entry() {
        let mut table = CompactHashTable::new(5_000);
        let keys: Vec<u64> = (0..5_000u64).map(|key| key.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        keys.iter().for_each(|&key| table.insert(key, PlacementIndex::from_raw(1)));
        let (mut position, mut met) = (TablePosition::default(), 0);
        loop {
            met += usize::from(table.value(position).is_some());
            position = table.after(position);
            if position == TablePosition::default() {
                break;
            }
        }
        assert_eq!((met, table.len()), (keys.len(), keys.len()));
    }

    proptest! {
        /// Few distinct keys that collide at both ends of a shard, so that entries are displaced far and reach the
        /// tail.
        #[test]
        fn behaves_like_a_map(ops in prop::collection::vec((any::<bool>(), 0u64..60, 0u32..100), 0..400)) {
            let mut table = CompactHashTable::new(1);
            let mut model = BTreeMap::new();
            for (add, key, value) in ops {
                let key = if key % 2 == 0 { key << 24 } else { u64::from(u32::MAX) - (key << 10) };
                let value = PlacementIndex::from_raw(value);
                match (add, table.find(key)) {
                    (true, None) => table.insert(key, value),
                    (true, Some(position)) => table.set(position, value),
                    (false, Some(position)) => table.remove(position),
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
