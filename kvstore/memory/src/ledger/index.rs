//! What the ledger's owner knows about its slots, ordered for questions; made anew from the slots when a ledger is opened.

use std::collections::BTreeMap;
use std::ops::Range;

use super::slots::LedgerRecord;
use crate::checksum::combine;

/// A part of the region that is whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LedgerEntry {
    /// Where it begins.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
    /// CRC-32C of its bytes.
    pub crc: u32,
    /// Tells it from a later entry for the same part, even of the same bytes.
    version: u64,
}

#[derive(Debug, Clone, Copy)]
struct IndexedEntry {
    entry: LedgerEntry,
    /// None when all were taken: then only this process knows of it.
    slot: Option<u64>,
}

/// A write under way.
#[derive(Debug)]
struct PendingWrite {
    id: u64,
    offset: u64,
    len: u64,
    /// Another write touched the same bytes.
    overlapped: bool,
}

/// Entries never overlap each other, nor a write under way.
#[derive(Debug)]
pub(super) struct LedgerIndex {
    by_offset: BTreeMap<u64, IndexedEntry>,
    bytes: u64,
    /// Slots that were in use before. They are taken first, so that memory of slots that are not needed is never touched.
    free: Vec<u64>,
    /// Slots after all that were ever in use.
    untouched: Range<u64>,
    /// As many as there are connections that write: few.
    writes: Vec<PendingWrite>,
    next: u64,
}

impl LedgerIndex {
    /// `records` are ordered and do not overlap.
    pub(super) fn new(slots: u64, records: Vec<(u64, LedgerRecord)>) -> Self {
        let mut taken: Vec<u64> = records.iter().map(|(slot, _)| *slot).collect();
        taken.sort_unstable();
        let touched = taken.last().map_or(0, |last| last + 1);
        let free = (0..touched).filter(|slot| taken.binary_search(slot).is_err()).collect();
        let bytes = records.iter().map(|(_, record)| record.len).sum();
        let held = |(slot, LedgerRecord { offset, len, crc })| {
            (offset, IndexedEntry { entry: LedgerEntry { offset, len, crc, version: 0 }, slot: Some(slot) })
        };
        let by_offset = records.into_iter().map(held).collect();
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
        // Entries do not overlap, so only the last one that begins before can reach in.
        let before = self.by_offset.range(..offset).next_back();
        let before = before.filter(|(_, held)| len > 0 && held.entry.offset + held.entry.len > offset);
        before.into_iter().chain(self.by_offset.range(offset..end)).map(|(_, held)| held)
    }

    /// Removes what overlaps, and gives how many entries that were, and their slots. They are in use until they come back through `give_back`.
    pub(super) fn remove(&mut self, offset: u64, len: u64) -> (usize, Vec<u64>) {
        let found: Vec<IndexedEntry> = self.overlapping(offset, len).copied().collect();
        for held in &found {
            self.by_offset.remove(&held.entry.offset);
            self.bytes -= held.entry.len;
        }
        (found.len(), found.into_iter().filter_map(|held| held.slot).collect())
    }

    pub(super) fn release_slots(&mut self, slots: &[u64]) {
        self.free.extend_from_slice(slots);
    }

    /// Notes a write under way.
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

    /// Ends a write. Its part, unless another write overlapped it.
    pub(super) fn end(&mut self, id: u64) -> Option<(u64, u64)> {
        let at = self.writes.iter().position(|write| write.id == id)?;
        let write = self.writes.swap_remove(at);
        (!write.overlapped).then_some((write.offset, write.len))
    }

    /// Enters a part that nothing overlaps, and gives the slot to write it to. None when all are taken: then it is entered here only.
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
        self.by_offset.get(&offset).map(|held| held.entry).filter(|entry| entry.len == len)
    }

    pub(super) fn covers(&self, offset: u64, len: u64) -> bool {
        let Some(end) = offset.checked_add(len) else { return false };
        let mut reached = offset;
        for held in self.overlapping(offset, len) {
            if held.entry.offset > reached {
                return false;
            }
            reached = held.entry.offset + held.entry.len;
        }
        reached >= end
    }

    /// Entries that are entered from now on have a higher version.
    pub(super) fn version(&self) -> u64 {
        self.next
    }

    /// The CRC-32C of a range that entries cover to the byte, none of them entered after the version `as_of`.
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

    pub(super) fn entries(&self, from: u64, most: usize) -> Vec<LedgerEntry> {
        self.by_offset.range(from..).take(most).map(|(_, held)| held.entry).collect()
    }
}
