//! In-memory index of the ledger's entries, rebuilt from the slots when a ledger is opened.

use std::collections::BTreeMap;
use std::ops::Range;

use super::slots::LedgerRecord;
use crate::checksum::combine;

/// A completely written range of the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LedgerEntry {
    pub offset: u64,
    /// Length of the range in bytes.
    pub len: u64,
    /// CRC-32C of the range's bytes.
    pub crc: u32,
    /// Distinguishes it from later entries for the same range.
    version: u64,
}

#[derive(Debug, Clone, Copy)]
struct IndexedEntry {
    entry: LedgerEntry,
    /// `None` if no slot was free: then the entry exists only in this process.
    slot: Option<u64>,
}

#[derive(Debug)]
struct PendingWrite {
    id: u64,
    offset: u64,
    len: u64,
    /// Whether another write touched the same bytes.
    overlapped: bool,
}

/// Entries overlap neither each other nor a write in progress.
#[derive(Debug)]
pub(super) struct LedgerIndex {
    by_offset: BTreeMap<u64, IndexedEntry>,
    bytes: u64,
    /// Freed slots. They are reused first, so that unneeded slots stay untouched and use no memory.
    free: Vec<u64>,
    /// Slots that were never in use.
    untouched: Range<u64>,
    /// Writes in progress: at most one per writing connection, so few.
    writes: Vec<PendingWrite>,
    next: u64,
}

impl LedgerIndex {
    /// `records` must be sorted and must not overlap.
    pub(super) fn new(slots: u64, records: Vec<(u64, LedgerRecord)>) -> Self {
        let mut used: Vec<u64> = records.iter().map(|(slot, _)| *slot).collect();
        used.sort_unstable();
        let touched = used.last().map_or(0, |last| last + 1);
        let free = (0..touched).filter(|slot| used.binary_search(slot).is_err()).collect();
        let bytes = records.iter().map(|(_, record)| record.len).sum();
        let indexed = |(slot, LedgerRecord { offset, len, crc })| {
            (offset, IndexedEntry { entry: LedgerEntry { offset, len, crc, version: 0 }, slot: Some(slot) })
        };
        let by_offset = records.into_iter().map(indexed).collect();
        Self { by_offset, bytes, free, untouched: touched..slots, writes: Vec::new(), next: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.by_offset.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn overlapping(&self, offset: u64, len: u64) -> impl Iterator<Item = &IndexedEntry> {
        let end = offset.saturating_add(len);
        // Entries do not overlap, so of the earlier ones only the last can reach into the range.
        let before = self.by_offset.range(..offset).next_back();
        let before =
            before.filter(|(_, indexed)| len > 0 && indexed.entry.offset + indexed.entry.len > offset);
        before.into_iter().chain(self.by_offset.range(offset..end)).map(|(_, indexed)| indexed)
    }

    /// Removes overlapping entries; returns their number and slots. The slots stay reserved until `release_slots`.
    pub(super) fn remove(&mut self, offset: u64, len: u64) -> (usize, Vec<u64>) {
        let found: Vec<IndexedEntry> = self.overlapping(offset, len).copied().collect();
        for indexed in &found {
            self.by_offset.remove(&indexed.entry.offset);
            self.bytes -= indexed.entry.len;
        }
        (found.len(), found.into_iter().filter_map(|indexed| indexed.slot).collect())
    }

    pub(super) fn release_slots(&mut self, slots: &[u64]) {
        self.free.extend_from_slice(slots);
    }

    /// Registers a write in progress; returns its id.
    pub(super) fn start(&mut self, offset: u64, len: u64) -> u64 {
        let end = offset + len;
        let mut overlapped = false;
        for other in &mut self.writes {
            if len > 0 && offset < other.offset + other.len && other.offset < end {
                other.overlapped = true;
                overlapped = true;
            }
        }
        self.next += 1;
        self.writes.push(PendingWrite { id: self.next, offset, len, overlapped });
        self.next
    }

    /// Ends a write; returns its range, unless another write overlapped it.
    pub(super) fn end(&mut self, id: u64) -> Option<(u64, u64)> {
        let index = self.writes.iter().position(|write| write.id == id)?;
        let write = self.writes.swap_remove(index);
        (!write.overlapped).then_some((write.offset, write.len))
    }

    /// Inserts a range that nothing overlaps; returns the slot to store it in. `None` if all slots are in use: then it is only indexed.
    pub(super) fn insert(&mut self, record: LedgerRecord) -> Option<u64> {
        let slot = self.free.pop().or_else(|| self.untouched.next());
        self.next += 1;
        let LedgerRecord { offset, len, crc } = record;
        let entry = LedgerEntry { offset, len, crc, version: self.next };
        self.by_offset.insert(offset, IndexedEntry { entry, slot });
        self.bytes += len;
        slot
    }

    pub(super) fn exact(&self, offset: u64, len: u64) -> Option<LedgerEntry> {
        self.by_offset.get(&offset).map(|indexed| indexed.entry).filter(|entry| entry.len == len)
    }

    pub(super) fn covers(&self, offset: u64, len: u64) -> bool {
        let Some(end) = offset.checked_add(len) else { return false };
        let mut reached = offset;
        for indexed in self.overlapping(offset, len) {
            if indexed.entry.offset > reached {
                return false;
            }
            reached = indexed.entry.offset + indexed.entry.len;
        }
        reached >= end
    }

    /// Entries inserted later have a higher version.
    pub(super) fn version(&self) -> u64 {
        self.next
    }

    /// The CRC-32C of a range if entries cover it exactly and none is newer than version `as_of`.
    pub(super) fn exact_crc(&self, offset: u64, len: u64, as_of: u64) -> Option<u32> {
        let end = offset.checked_add(len)?;
        let (mut reached, mut crc) = (offset, 0);
        for IndexedEntry { entry, .. } in self.overlapping(offset, len) {
            if entry.offset != reached || entry.version > as_of {
                return None;
            }
            crc = if entry.offset == offset { entry.crc } else { combine(crc, entry.crc, entry.len) };
            reached = entry.offset + entry.len;
        }
        (reached == end && len > 0).then_some(crc)
    }

    pub(super) fn entries(&self, from: u64, limit: usize) -> Vec<LedgerEntry> {
        self.by_offset.range(from..).take(limit).map(|(_, indexed)| indexed.entry).collect()
    }
}
