//! A part of the object table: entries, the way to them by key, and the lists by which they are evicted.

use std::collections::BTreeSet;

use crate::object::{EvictionQueue, ObjectEntry};
use crate::rebuild::ShardRebuild;
use crate::slab::{NIL, Slab};
use crate::table::HashIndex;

/// Head and tail of a list through the entries.
#[derive(Clone, Copy, Debug)]
struct EntryList {
    head: u32,
    tail: u32,
}

/// Space that belongs to no object while somebody may still write to it, or read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuarantinedRange {
    pub(crate) until_ms: u64,
    pub(crate) segment: u16,
    pub(crate) block: u32,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

/// What is counted per prefix of keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PrefixTally {
    pub(crate) keys: u64,
    pub(crate) bytes: u64,
    pub(crate) hits: u64,
}

/// A part of the table.
#[derive(Debug)]
pub(crate) struct ObjectShard {
    pub(crate) entries: Slab<ObjectEntry>,
    table: HashIndex,
    lists: [EntryList; 4],
    pub(crate) quarantined: Vec<QuarantinedRange>,
    /// Entries with a copy or a move.
    pub(crate) transfers: Vec<u32>,
    /// Entries on their way to or from a disk, by when that began.
    pub(crate) disk_tasks: BTreeSet<(u64, u32)>,
    /// Entries with a new version that is being written, by when that began.
    pub(crate) pending: BTreeSet<(u64, u32)>,
    pub(crate) prefix_tallies: Vec<PrefixTally>,
    pub(crate) soft_pinned: usize,
    /// Bytes of objects whose places were told to readers.
    pub(crate) read_bytes: u64,
    /// Reads that were sent to a disk, and their bytes.
    pub(crate) disk_reads: (u64, u64),
    /// Whether a head has changed since that was last asked.
    heads_changed: bool,
    /// What objects from nodes' inventories are compared with, while a rebuild is open.
    pub(crate) rebuild: Option<Box<ShardRebuild>>,
}

impl Default for ObjectShard {
    fn default() -> Self {
        Self {
            entries: Slab::default(),
            table: HashIndex::default(),
            lists: [EntryList { head: NIL, tail: NIL }; 4],
            quarantined: Vec::new(),
            transfers: Vec::new(),
            disk_tasks: BTreeSet::new(),
            pending: BTreeSet::new(),
            prefix_tallies: Vec::new(),
            soft_pinned: 0,
            read_bytes: 0,
            disk_reads: (0, 0),
            heads_changed: false,
            rebuild: None,
        }
    }
}

/// Entries that are looked at from either end to find out where another belongs.
const SORT_SCAN_LIMIT: usize = 256;

fn list_of(queue: EvictionQueue) -> Option<usize> {
    match queue {
        EvictionQueue::Vacant | EvictionQueue::Unlisted => None,
        EvictionQueue::Writing => Some(0),
        EvictionQueue::Unread => Some(1),
        EvictionQueue::Leased => Some(2),
        EvictionQueue::SoftPinned => Some(3),
    }
}

impl ObjectShard {
    /// Where a key is.
    pub(crate) fn find(&self, tag: u32, tenant: u16, key: &str) -> Option<u32> {
        self.table.find(tag, |at| {
            let entry = &self.entries[at];
            entry.tenant == tenant && *entry.key == *key
        })
    }

    /// Where a key probably is. For many keys at once: each of these looks touches memory that no other waits for.
    pub(crate) fn candidate(&self, tag: u32) -> u32 {
        self.table.candidate(tag)
    }

    /// Adds an entry whose key is not there and puts it at the end of its list.
    pub(crate) fn insert(&mut self, tag: u32, entry: ObjectEntry) -> u32 {
        let queue = entry.queue();
        let at = self.entries.insert(entry);
        self.table.insert(tag, at);
        self.link(at, queue);
        at
    }

    /// Takes an entry out of everything that this shard knows.
    pub(crate) fn remove(&mut self, tag: u32, at: u32) -> ObjectEntry {
        self.unlink(at);
        self.table.remove(tag, at);
        self.entries.remove(at)
    }

    /// Puts an entry at the end of a list.
    pub(crate) fn enqueue(&mut self, at: u32, queue: EvictionQueue) {
        self.unlink(at);
        self.link(at, queue);
    }

    /// Puts an entry where it belongs in a list by its stamp; if that is far from both ends, near the beginning.
    pub(crate) fn enqueue_by_stamp(&mut self, at: u32, queue: EvictionQueue) {
        self.unlink(at);
        let (Some(list), stamp) = (list_of(queue), self.entries[at].stamp) else {
            self.link(at, queue);
            return;
        };
        let EntryList { head, tail } = self.lists[list];
        let (mut first, mut last) = (head, tail);
        for _ in 0..SORT_SCAN_LIMIT {
            if last == NIL || self.entries[last].stamp <= stamp {
                first = if last == NIL { head } else { self.entries[last].next };
                break;
            }
            if self.entries[first].stamp > stamp {
                break;
            }
            (first, last) = (self.entries[first].next, self.entries[last].previous);
        }
        if first == NIL {
            self.link(at, queue);
            return;
        }
        self.entries[at].set_queue(queue);
        self.soft_pinned += usize::from(queue == EvictionQueue::SoftPinned);
        let before = std::mem::replace(&mut self.entries[first].previous, at);
        let entry = &mut self.entries[at];
        (entry.previous, entry.next) = (before, first);
        if before == NIL {
            self.lists[list].head = at;
            self.heads_changed = true;
        } else {
            self.entries[before].next = at;
        }
    }

    fn link(&mut self, at: u32, queue: EvictionQueue) {
        self.entries[at].set_queue(queue);
        self.soft_pinned += usize::from(queue == EvictionQueue::SoftPinned);
        let Some(list) = list_of(queue) else { return };
        let tail = std::mem::replace(&mut self.lists[list].tail, at);
        let entry = &mut self.entries[at];
        (entry.previous, entry.next) = (tail, NIL);
        if tail == NIL {
            self.lists[list].head = at;
            self.heads_changed = true;
        } else {
            self.entries[tail].next = at;
        }
    }

    fn unlink(&mut self, at: u32) {
        let entry = &self.entries[at];
        let (before, after, queue) = (entry.previous, entry.next, entry.queue());
        self.soft_pinned -= usize::from(queue == EvictionQueue::SoftPinned);
        let Some(list) = list_of(queue) else { return };
        if before == NIL {
            self.lists[list].head = after;
            self.heads_changed = true;
        } else {
            self.entries[before].next = after;
        }
        if after == NIL {
            self.lists[list].tail = before;
        } else {
            self.entries[after].previous = before;
        }
    }

    /// Something of the neighbours in a list, to have them in the cache when the entry is moved.
    pub(crate) fn prefetch_neighbours(&self, at: u32) -> u32 {
        let entry = &self.entries[at];
        if list_of(entry.queue()).is_none() {
            return 0;
        }
        let flag = |at: u32| if at == NIL { 0 } else { self.entries[at].previous };
        flag(entry.previous).wrapping_add(flag(entry.next))
    }

    /// The first of a list.
    pub(crate) fn head(&self, queue: EvictionQueue) -> Option<u32> {
        let head = self.lists[list_of(queue)?].head;
        (head != NIL).then_some(head)
    }

    /// The one that follows in the same list.
    pub(crate) fn next_in_list(&self, at: u32) -> Option<u32> {
        let after = self.entries[at].next;
        (after != NIL).then_some(after)
    }

    /// Stamps of the first entry that has not been read, of the first with a lease and of the first that is pinned softly, if they have
    /// changed.
    pub(crate) fn changed_heads(&mut self) -> Option<[u64; 3]> {
        if !std::mem::take(&mut self.heads_changed) {
            return None;
        }
        let stamp = |queue| self.head(queue).map_or(u64::MAX, |at| self.entries[at].stamp);
        Some([EvictionQueue::Unread, EvictionQueue::Leased, EvictionQueue::SoftPinned].map(stamp))
    }

    /// The count for a prefix.
    pub(crate) fn tally(&mut self, prefix: u8) -> &mut PrefixTally {
        let at = usize::from(prefix);
        if self.prefix_tallies.len() <= at {
            self.prefix_tallies.resize(at + 1, PrefixTally::default());
        }
        &mut self.prefix_tallies[at]
    }

    /// All places that are not vacant, from one on, at most so many looked at; and where to go on.
    pub(crate) fn occupied(&self, from: u32, limit: u32) -> (impl Iterator<Item = u32>, Option<u32>) {
        let bound = self.entries.high_water_mark();
        let end = from.saturating_add(limit).min(bound);
        let places = (from..end).filter(|at| self.entries[*at].queue() != EvictionQueue::Vacant);
        (places, (end < bound).then_some(end))
    }
}
