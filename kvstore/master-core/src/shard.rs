//! A shard of the object table: entries, their hash index, and the eviction queues.

use std::collections::BTreeSet;

use mooncake_wire::types::Uuid;

use crate::indices::{AllocatorBlockIndex, EntryIndex, PrefixIndex, SegmentIndex, SlabIndex, TenantIndex};
use crate::inventory::ShardRebuild;
use crate::key_store::KeyStore;
use crate::object::{EvictionQueue, ObjectEntry, QueueNumber};
use crate::slab::Slab;
use crate::table::HashIndex;
use crate::writers::{WriterIndex, WriterTable};

/// Head and tail of a list through the entries.
#[derive(Clone, Copy, Debug)]
struct EntryList {
    head: EntryIndex,
    tail: EntryIndex,
}

/// A range that belongs to no object, while clients may still read or write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuarantinedRange {
    pub(crate) until_ms: u64,
    pub(crate) segment: SegmentIndex,
    pub(crate) block: AllocatorBlockIndex,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PrefixTally {
    pub(crate) keys: u64,
    pub(crate) bytes: u64,
    pub(crate) hits: u64,
}

/// Reads answered with a disk copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DiskReads {
    pub(crate) reads: u64,
    pub(crate) bytes: u64,
}

/// One shard of the object table.
#[derive(Debug)]
pub(crate) struct ObjectShard {
    pub(crate) entries: Slab<EntryIndex, ObjectEntry>,
    keys: KeyStore,
    writers: WriterTable,
    table: HashIndex<EntryIndex>,
    /// By number of the queue.
    lists: Box<[EntryList]>,
    pub(crate) quarantined: Vec<QuarantinedRange>,
    /// Entries with an active copy or move.
    pub(crate) transfers: Vec<EntryIndex>,
    /// Entries with an active disk task, by start time.
    pub(crate) disk_tasks: BTreeSet<(u64, EntryIndex)>,
    /// Entries with a new version being written, by start time.
    pub(crate) pending: BTreeSet<(u64, EntryIndex)>,
    pub(crate) prefix_tallies: Vec<PrefixTally>,
    pub(crate) soft_pinned: usize,
    /// Bytes of objects whose memory replicas were returned to readers.
    pub(crate) read_bytes: u64,
    pub(crate) disk_reads: DiskReads,
    /// Whose first entries have changed since the last [`Self::take_changed_heads`].
    changed_heads: QueueSet,
    /// State for restoring inventories, while a rebuild is open.
    pub(crate) rebuild: Option<Box<ShardRebuild>>,
}

impl Default for ObjectShard {
    fn default() -> Self {
        Self {
            entries: Slab::default(),
            keys: KeyStore::default(),
            writers: WriterTable::default(),
            table: HashIndex::default(),
            lists: vec![EntryList { head: EntryIndex::NONE, tail: EntryIndex::NONE }; EvictionQueue::COUNT]
                .into(),
            quarantined: Vec::new(),
            transfers: Vec::new(),
            disk_tasks: BTreeSet::new(),
            pending: BTreeSet::new(),
            prefix_tallies: Vec::new(),
            soft_pinned: 0,
            read_bytes: 0,
            disk_reads: DiskReads::default(),
            changed_heads: QueueSet::default(),
            rebuild: None,
        }
    }
}

/// Maximum number of entries scanned from either end for a sorted insertion.
const SORT_SCAN_LIMIT: usize = 256;

/// A set of queues: bits by number.
#[derive(Clone, Copy, Debug, Default)]
struct QueueSet([u64; EvictionQueue::COUNT.div_ceil(QueueSet::WORD_BITS)]);

impl QueueSet {
    const WORD_BITS: usize = u64::BITS as usize;

    fn insert(&mut self, position: usize) {
        self.0[position / Self::WORD_BITS] |= 1 << (position % Self::WORD_BITS);
    }

    fn positions(self) -> impl Iterator<Item = usize> {
        self.0.into_iter().enumerate().flat_map(|(number, mut word)| {
            std::iter::from_fn(move || {
                let bit = (word != 0).then(|| word.trailing_zeros() as usize)?;
                word &= word - 1;
                Some(number * Self::WORD_BITS + bit)
            })
        })
    }
}

fn list_of(queue: QueueNumber) -> Option<usize> {
    queue.is_listed().then(|| queue.get())
}

impl ObjectShard {
    /// Index of a key's entry.
    pub(crate) fn find(&self, tag: u32, tenant: TenantIndex, key: &str) -> Option<EntryIndex> {
        self.table.find(tag, |index| {
            let entry = &self.entries[index];
            entry.tenant == tenant && self.keys.bytes(entry.key) == key.as_bytes()
        })
    }

    /// Probable index of a key's entry. For batches: the cache misses of several calls overlap.
    pub(crate) fn candidate(&self, tag: u32) -> EntryIndex {
        self.table.candidate(tag).unwrap_or(EntryIndex::NONE)
    }

    /// Whether an entry has this key.
    pub(crate) fn has_key(&self, index: EntryIndex, key: &str) -> bool {
        self.key_bytes(index) == key.as_bytes()
    }

    /// The key of an entry.
    pub(crate) fn key(&self, index: EntryIndex) -> &str {
        self.keys.get(self.entries[index].key)
    }

    pub(crate) fn key_bytes(&self, index: EntryIndex) -> &[u8] {
        self.keys.bytes(self.entries[index].key)
    }

    /// The client that wrote an entry's object.
    pub(crate) fn writer(&self, index: EntryIndex) -> Uuid {
        let entry = &self.entries[index];
        let unlisted = || entry.extra.as_ref().and_then(|extra| extra.writer);
        self.writers.get(entry.writer).or_else(unlisted).unwrap_or_default()
    }

    /// Sets the client that wrote an entry's object.
    pub(crate) fn set_writer(&mut self, index: EntryIndex, client: Uuid) {
        let entry = &mut self.entries[index];
        self.writers.remove(entry.writer);
        entry.writer = self.writers.add(client);
        let unlisted = (entry.writer == WriterIndex::UNLISTED).then_some(client);
        if unlisted.is_some() || entry.extra.is_some() {
            entry.extra_mut().writer = unlisted;
            entry.drop_empty_extras();
        }
    }

    /// Adds an entry whose key is absent, at the end of its queue.
    pub(crate) fn insert(&mut self, tag: u32, key: &str, client: Uuid, mut entry: ObjectEntry) -> EntryIndex {
        let queue = entry.queue();
        entry.key = self.keys.insert(key);
        let index = self.entries.insert(entry);
        self.table.insert(tag, index);
        self.set_writer(index, client);
        self.link(index, queue);
        index
    }

    /// Removes an entry from its queue, the hash index and the slab. Its key and writer are dropped.
    pub(crate) fn remove(&mut self, tag: u32, index: EntryIndex) -> ObjectEntry {
        self.unlink(index);
        self.table.remove(tag, index);
        let entry = self.entries.remove(index);
        self.keys.remove(entry.key);
        self.writers.remove(entry.writer);
        entry
    }

    /// Moves an entry to the end of a queue.
    pub(crate) fn enqueue(&mut self, index: EntryIndex, queue: EvictionQueue) {
        self.unlink(index);
        self.link(index, queue);
    }

    /// Inserts an entry into a queue by its stamp; if its position is more than 256 entries from both ends, near the start.
    pub(crate) fn enqueue_by_stamp(&mut self, index: EntryIndex, queue: EvictionQueue) {
        self.unlink(index);
        let (Some(list), stamp) = (list_of(queue.number()), self.entries[index].stamp) else {
            self.link(index, queue);
            return;
        };
        let EntryList { head, tail } = self.lists[list];
        let (mut first, mut last) = (head, tail);
        for _ in 0..SORT_SCAN_LIMIT {
            if last == EntryIndex::NONE || self.entries[last].stamp <= stamp {
                first = if last == EntryIndex::NONE { head } else { self.entries[last].next };
                break;
            }
            if self.entries[first].stamp > stamp {
                break;
            }
            (first, last) = (self.entries[first].next, self.entries[last].previous);
        }
        if first == EntryIndex::NONE {
            self.link(index, queue);
            return;
        }
        self.entries[index].set_queue(queue);
        self.soft_pinned += usize::from(queue == EvictionQueue::SoftPinned);
        let before = std::mem::replace(&mut self.entries[first].previous, index);
        let entry = &mut self.entries[index];
        (entry.previous, entry.next) = (before, first);
        if before == EntryIndex::NONE {
            self.lists[list].head = index;
            self.changed_heads.insert(list);
        } else {
            self.entries[before].next = index;
        }
    }

    fn link(&mut self, index: EntryIndex, queue: EvictionQueue) {
        self.entries[index].set_queue(queue);
        self.soft_pinned += usize::from(queue == EvictionQueue::SoftPinned);
        let Some(list) = list_of(queue.number()) else { return };
        let tail = std::mem::replace(&mut self.lists[list].tail, index);
        let entry = &mut self.entries[index];
        (entry.previous, entry.next) = (tail, EntryIndex::NONE);
        if tail == EntryIndex::NONE {
            self.lists[list].head = index;
            self.changed_heads.insert(list);
        } else {
            self.entries[tail].next = index;
        }
    }

    fn unlink(&mut self, index: EntryIndex) {
        let entry = &self.entries[index];
        let (before, after, queue) = (entry.previous, entry.next, entry.queue_number());
        self.soft_pinned -= usize::from(queue == QueueNumber::SOFT_PINNED);
        let Some(list) = list_of(queue) else { return };
        if before == EntryIndex::NONE {
            self.lists[list].head = after;
            self.changed_heads.insert(list);
        } else {
            self.entries[before].next = after;
        }
        if after == EntryIndex::NONE {
            self.lists[list].tail = before;
        } else {
            self.entries[after].previous = before;
        }
    }

    /// Reads the neighbours in the queue, so that they are cached when the entry is moved. The result has no meaning.
    pub(crate) fn prefetch_neighbours(&self, index: EntryIndex) -> u32 {
        let entry = &self.entries[index];
        if !entry.queue_number().is_listed() {
            return 0;
        }
        let previous = |index: EntryIndex| {
            if index == EntryIndex::NONE { 0 } else { self.entries[index].previous.slot() }
        };
        previous(entry.previous).wrapping_add(previous(entry.next))
    }

    /// Sorts all queues by stamp; entries with the same stamp, by index.
    pub(crate) fn sort_lists(&mut self) {
        let is_listed = |index: &EntryIndex| self.entries[*index].queue_number().is_listed();
        let mut sorted: Vec<(u64, EntryIndex)> =
            self.all_occupied().filter(is_listed).map(|index| (self.entries[index].stamp, index)).collect();
        sorted.sort_unstable();
        for (position, list) in self.lists.iter_mut().enumerate() {
            if list.head != EntryIndex::NONE {
                self.changed_heads.insert(position);
            }
            *list = EntryList { head: EntryIndex::NONE, tail: EntryIndex::NONE };
        }
        self.soft_pinned = 0;
        for (_, index) in sorted {
            let queue = self.entries[index].queue();
            self.link(index, queue);
        }
    }

    /// First entry of a queue.
    pub(crate) fn head(&self, queue: EvictionQueue) -> Option<EntryIndex> {
        let head = self.lists[list_of(queue.number())?].head;
        (head != EntryIndex::NONE).then_some(head)
    }

    /// Next entry in the same queue.
    pub(crate) fn next_in_list(&self, index: EntryIndex) -> Option<EntryIndex> {
        let after = self.entries[index].next;
        (after != EntryIndex::NONE).then_some(after)
    }

    /// Calls `each` with every queue whose first entry has changed, and the stamp of that entry: `u64::MAX` if the queue
    /// is empty.
    pub(crate) fn take_changed_heads(&mut self, mut each: impl FnMut(EvictionQueue, u64)) {
        for position in std::mem::take(&mut self.changed_heads).positions() {
            let queue = QueueNumber::of_position(position).queue();
            each(queue, self.head(queue).map_or(u64::MAX, |index| self.entries[index].stamp));
        }
    }

    /// The totals of a prefix.
    pub(crate) fn tally(&mut self, prefix: PrefixIndex) -> &mut PrefixTally {
        let index = prefix.get();
        if self.prefix_tallies.len() <= index {
            self.prefix_tallies.resize(index + 1, PrefixTally::default());
        }
        &mut self.prefix_tallies[index]
    }

    /// Indices of occupied entries among the next `limit` slots from `from`, and the slot to continue at.
    pub(crate) fn occupied(&self, from: u32, limit: u32) -> (impl Iterator<Item = EntryIndex>, Option<u32>) {
        let bound = self.entries.high_water_mark();
        let end = from.saturating_add(limit).min(bound);
        let indices = (from..end)
            .map(EntryIndex::from_slot)
            .filter(|index| self.entries[*index].queue() != EvictionQueue::Vacant);
        (indices, (end < bound).then_some(end))
    }

    /// Indices of all occupied entries.
    pub(crate) fn all_occupied(&self) -> impl Iterator<Item = EntryIndex> {
        self.occupied(0, u32::MAX).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_every_queue() {
        let mut set = QueueSet::default();
        assert_eq!(set.positions().count(), 0);
        for position in [0, 63, 64, EvictionQueue::COUNT - 1, 63] {
            set.insert(position);
        }
        assert!(set.positions().eq([0, 63, 64, EvictionQueue::COUNT - 1]));
    }
}
