//! A part of the object table: entries, the way to them by key, and the lists by which they are evicted.

use std::collections::BTreeSet;

use crate::object::{Entry, Queue};
use crate::rebuild::ShardRebuild;
use crate::slab::{NIL, Slab};
use crate::table::Table;

/// Head and tail of a list through the entries.
#[derive(Clone, Copy, Debug)]
struct List {
    head: u32,
    tail: u32,
}

/// Space that belongs to no object while somebody may still write to it, or read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) until_ms: u64,
    pub(crate) segment: u16,
    pub(crate) block: u32,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

/// What is counted per prefix of keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) keys: u64,
    pub(crate) bytes: u64,
    pub(crate) hits: u64,
}

/// A part of the table.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) entries: Slab<Entry>,
    table: Table,
    lists: [List; 4],
    pub(crate) held: Vec<Held>,
    /// Entries with a copy or a move.
    pub(crate) transfers: Vec<u32>,
    /// Entries on their way to or from a disk, by when that began.
    pub(crate) works: BTreeSet<(u64, u32)>,
    /// Entries with a new version that is being written, by when that began.
    pub(crate) pending: BTreeSet<(u64, u32)>,
    pub(crate) tallies: Vec<Tally>,
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

impl Default for Shard {
    fn default() -> Self {
        Self {
            entries: Slab::default(),
            table: Table::default(),
            lists: [List { head: NIL, tail: NIL }; 4],
            held: Vec::new(),
            transfers: Vec::new(),
            works: BTreeSet::new(),
            pending: BTreeSet::new(),
            tallies: Vec::new(),
            soft_pinned: 0,
            read_bytes: 0,
            disk_reads: (0, 0),
            heads_changed: false,
            rebuild: None,
        }
    }
}

/// Entries that are looked at from either end to find out where another belongs.
const SORT_STEPS: usize = 256;

fn list_of(queue: Queue) -> Option<usize> {
    match queue {
        Queue::Vacant | Queue::Apart => None,
        Queue::Writing => Some(0),
        Queue::Unread => Some(1),
        Queue::Leased => Some(2),
        Queue::Soft => Some(3),
    }
}

impl Shard {
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
    pub(crate) fn insert(&mut self, tag: u32, entry: Entry) -> u32 {
        let queue = entry.queue();
        let at = self.entries.insert(entry);
        self.table.insert(tag, at);
        self.link(at, queue);
        at
    }

    /// Takes an entry out of everything that this shard knows.
    pub(crate) fn remove(&mut self, tag: u32, at: u32) -> Entry {
        self.unlink(at);
        self.table.remove(tag, at);
        self.entries.remove(at)
    }

    /// Puts an entry at the end of a list.
    pub(crate) fn enqueue(&mut self, at: u32, queue: Queue) {
        self.unlink(at);
        self.link(at, queue);
    }

    /// Puts an entry where it belongs in a list by its stamp; if that is far from both ends, near the beginning.
    pub(crate) fn enqueue_by_stamp(&mut self, at: u32, queue: Queue) {
        self.unlink(at);
        let (Some(list), stamp) = (list_of(queue), self.entries[at].stamp) else {
            self.link(at, queue);
            return;
        };
        let List { head, tail } = self.lists[list];
        let (mut first, mut last) = (head, tail);
        for _ in 0..SORT_STEPS {
            if last == NIL || self.entries[last].stamp <= stamp {
                first = if last == NIL { head } else { self.entries[last].after };
                break;
            }
            if self.entries[first].stamp > stamp {
                break;
            }
            (first, last) = (self.entries[first].after, self.entries[last].before);
        }
        if first == NIL {
            self.link(at, queue);
            return;
        }
        self.entries[at].set_queue(queue);
        self.soft_pinned += usize::from(queue == Queue::Soft);
        let before = std::mem::replace(&mut self.entries[first].before, at);
        let entry = &mut self.entries[at];
        (entry.before, entry.after) = (before, first);
        if before == NIL {
            self.lists[list].head = at;
            self.heads_changed = true;
        } else {
            self.entries[before].after = at;
        }
    }

    fn link(&mut self, at: u32, queue: Queue) {
        self.entries[at].set_queue(queue);
        self.soft_pinned += usize::from(queue == Queue::Soft);
        let Some(list) = list_of(queue) else { return };
        let tail = std::mem::replace(&mut self.lists[list].tail, at);
        let entry = &mut self.entries[at];
        (entry.before, entry.after) = (tail, NIL);
        if tail == NIL {
            self.lists[list].head = at;
            self.heads_changed = true;
        } else {
            self.entries[tail].after = at;
        }
    }

    fn unlink(&mut self, at: u32) {
        let entry = &self.entries[at];
        let (before, after, queue) = (entry.before, entry.after, entry.queue());
        self.soft_pinned -= usize::from(queue == Queue::Soft);
        let Some(list) = list_of(queue) else { return };
        if before == NIL {
            self.lists[list].head = after;
            self.heads_changed = true;
        } else {
            self.entries[before].after = after;
        }
        if after == NIL {
            self.lists[list].tail = before;
        } else {
            self.entries[after].before = before;
        }
    }

    /// Something of the neighbours in a list, to have them in the cache when the entry is moved.
    pub(crate) fn neighbours(&self, at: u32) -> u32 {
        let entry = &self.entries[at];
        if list_of(entry.queue()).is_none() {
            return 0;
        }
        let flag = |at: u32| if at == NIL { 0 } else { self.entries[at].before };
        flag(entry.before).wrapping_add(flag(entry.after))
    }

    /// The first of a list.
    pub(crate) fn head(&self, queue: Queue) -> Option<u32> {
        let head = self.lists[list_of(queue)?].head;
        (head != NIL).then_some(head)
    }

    /// The one that follows in the same list.
    pub(crate) fn after(&self, at: u32) -> Option<u32> {
        let after = self.entries[at].after;
        (after != NIL).then_some(after)
    }

    /// Stamps of the first entry that has not been read, of the first with a lease and of the first that is pinned softly, if they have
    /// changed.
    pub(crate) fn changed_heads(&mut self) -> Option<[u64; 3]> {
        if !std::mem::take(&mut self.heads_changed) {
            return None;
        }
        let stamp = |queue| self.head(queue).map_or(u64::MAX, |at| self.entries[at].stamp);
        Some([Queue::Unread, Queue::Leased, Queue::Soft].map(stamp))
    }

    /// The count for a prefix.
    pub(crate) fn tally(&mut self, prefix: u8) -> &mut Tally {
        let at = usize::from(prefix);
        if self.tallies.len() <= at {
            self.tallies.resize(at + 1, Tally::default());
        }
        &mut self.tallies[at]
    }

    /// All places that are not vacant, from one on, at most so many looked at; and where to go on.
    pub(crate) fn occupied(&self, from: u32, limit: u32) -> (impl Iterator<Item = u32>, Option<u32>) {
        let bound = self.entries.bound();
        let end = from.saturating_add(limit).min(bound);
        let places = (from..end).filter(|at| self.entries[*at].queue() != Queue::Vacant);
        (places, (end < bound).then_some(end))
    }
}
