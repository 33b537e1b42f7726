//! The objects in a segment, as reported by its master: a master that has lost its log can restore them from here.
//!
//! The catalog has its own shared memory, separate from the ledger's. A record counts only while ledger entries cover its range exactly
//! with the same checksum. So a range that was overwritten, even by a release without a catalog, never counts as the earlier object.

mod record;
mod slots;

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{Ordering, fence};

use crate::checksum::Crc32c;
use crate::ledger::{LedgerError, touched_slots};
use crate::region::{MappedRegion, OutOfRangeError};
use crate::reopen;

pub use record::{ObjectRecord, ObjectVersion};
use slots::{ChainRead, ObjectSlots, PAYLOAD, SLOT};

/// Bytes of the header area before the slots.
const HEADER: u64 = 4096;
/// Offset of the second copy of the header.
const COPY: u64 = 2048;
const MAGIC: &[u8; 8] = b"moonobj\0";
const VERSION: u32 = 1;
const SEALED: usize = 28;
/// Segment bytes per slot. A record takes two or three slots.
const BYTES_PER_SLOT: u64 = 8 << 10;
const SLOTS: std::ops::RangeInclusive<u64> = 16_384..=1 << 24;

/// Maximum bytes of the catalog for a segment of `size` bytes.
#[must_use]
pub fn bytes_for(size: u64) -> u64 {
    HEADER + slots_for(size) * SLOT
}

fn slots_for(size: u64) -> u64 {
    (size / BYTES_PER_SLOT).clamp(*SLOTS.start(), *SLOTS.end())
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CatalogCounts {
    /// Number of objects with a valid record.
    pub objects: u64,
    /// Records with a wrong checksum when the catalog was opened.
    pub damaged: u64,
    /// Records whose range was overwritten or lost before the catalog was opened.
    pub stale: u64,
    /// Objects not recorded for lack of a slot, or because their strings are too long.
    pub unrecorded: u64,
}

#[derive(Debug)]
struct CatalogEntry {
    size: u64,
    version: ObjectVersion,
    chain: Box<[u32]>,
}

/// The object catalog of one segment.
#[derive(Debug)]
pub(crate) struct ObjectCatalog {
    slots: ObjectSlots,
    objects: BTreeMap<u64, CatalogEntry>,
    free: Vec<u32>,
    untouched: Range<u64>,
    counts: CatalogCounts,
    newest_epoch: u64,
}

impl ObjectCatalog {
    /// Opens a catalog in memory of [`bytes_for`] bytes. Only records accepted by `is_proven` are kept; a catalog of another segment is
    /// reset.
    pub(crate) fn open(
        memory: impl AsFd,
        size: u64,
        segment: [u64; 2],
        is_proven: impl Fn(&ObjectRecord) -> bool,
    ) -> Result<Self, LedgerError> {
        let file = reopen(&memory)?;
        let region = MappedRegion::from_fd(memory.as_fd().try_clone_to_owned()?, bytes_for(size), None)?;
        let slots = ObjectSlots { memory: region, slots: slots_for(size) };
        let is_known = slots.has_header(segment)?;
        let mut catalog = Self {
            untouched: 0..slots.slots,
            slots,
            objects: BTreeMap::new(),
            free: Vec::new(),
            counts: CatalogCounts::default(),
            newest_epoch: 0,
        };
        catalog.load(&file, size, |record| is_known && is_proven(record));
        catalog.slots.write_header(segment)?;
        Ok(catalog)
    }

    fn load(&mut self, file: &File, size: u64, is_proven: impl Fn(&ObjectRecord) -> bool) {
        let (mut used, mut others, mut end) = (HashSet::new(), Vec::new(), 0);
        let mut tails: Vec<(u32, u32)> = Vec::new();
        // Head slots already counted as damaged or stale.
        let mut heads: HashSet<u32> = HashSet::new();
        for slot in touched_slots(file, HEADER, SLOT, self.slots.slots) {
            let Ok(slot) = u32::try_from(slot) else { continue };
            let read = self.slots.read(slot);
            if read != ChainRead::Free {
                end = u64::from(slot) + 1;
            }
            match read {
                ChainRead::Free => {}
                ChainRead::Tail(head) => {
                    others.push(slot);
                    tails.push((head, slot));
                }
                ChainRead::Damaged => {
                    self.counts.damaged += 1;
                    heads.insert(slot);
                    others.push(slot);
                }
                ChainRead::Record { chain, payload } => {
                    let record = ObjectRecord::decode(&payload);
                    let lies_in = |record: &ObjectRecord| {
                        record.size > 0
                            && record.offset.checked_add(record.size).is_some_and(|end| end <= size)
                    };
                    match record.filter(|record| lies_in(record) && is_proven(record)) {
                        Some(record) => {
                            used.extend(chain.iter().copied());
                            self.place(&record, chain);
                        }
                        None => {
                            self.counts.stale += 1;
                            heads.insert(slot);
                            others.push(slot);
                        }
                    }
                }
            }
        }
        let garbage: Vec<u32> = others.into_iter().filter(|slot| !used.contains(slot)).collect();
        self.slots.clear(&garbage);
        // Tails without a valid head: their records were being written or removed when the process ended, or their head is lost.
        let orphaned: HashSet<u32> =
            tails.iter().filter(|(_, slot)| !used.contains(slot)).map(|(head, _)| *head).collect();
        self.counts.stale += orphaned.iter().filter(|head| !heads.contains(head)).count() as u64;
        // `place` has freed the slots of replaced records.
        let occupied: HashSet<u32> =
            self.objects.values().flat_map(|entry| entry.chain.iter().copied()).collect();
        let last = used.iter().map(|slot| u64::from(*slot) + 1).max().unwrap_or(0).max(end);
        self.free = (0..last)
            .filter_map(|slot| u32::try_from(slot).ok())
            .filter(|slot| !occupied.contains(slot))
            .collect();
        self.untouched = last..self.slots.slots;
    }

    /// Indexes a stored record. Of two overlapping records the newer one wins.
    fn place(&mut self, record: &ObjectRecord, chain: Vec<u32>) {
        let newer =
            self.overlapping(record.offset, record.size).any(|(_, entry)| entry.version > record.version);
        if newer {
            self.slots.clear(&chain);
            self.counts.stale += 1;
            return;
        }
        self.counts.stale += self.remove(record.offset, record.size) as u64;
        let entry = CatalogEntry { size: record.size, version: record.version, chain: chain.into() };
        self.newest_epoch = self.newest_epoch.max(record.version.epoch);
        self.objects.insert(record.offset, entry);
    }

    fn overlapping(&self, offset: u64, len: u64) -> impl Iterator<Item = (u64, &CatalogEntry)> {
        let end = offset.saturating_add(len);
        // Records do not overlap, so of the earlier ones only the last can reach into the range.
        let before = self.objects.range(..offset).next_back();
        let before = before.filter(|(from, entry)| len > 0 && **from + entry.size > offset);
        before.into_iter().chain(self.objects.range(offset..end)).map(|(from, entry)| (*from, entry))
    }

    /// Records an object and removes all overlapping records. Returns false if there is no slot or its strings are too long.
    pub(crate) fn record(&mut self, record: &ObjectRecord) -> bool {
        self.remove(record.offset, record.size);
        let Some(payload) = record.encode() else {
            self.counts.unrecorded += 1;
            return false;
        };
        let needed = payload.len().div_ceil(PAYLOAD);
        let available = self.free.len() as u64 + (self.untouched.end - self.untouched.start);
        if needed as u64 > available {
            if self.counts.unrecorded == 0 {
                tracing::warn!(
                    slots = self.slots.slots,
                    "the object catalog is full: a master that loses its log cannot restore further objects"
                );
            }
            self.counts.unrecorded += 1;
            return false;
        }
        let slots = std::iter::from_fn(|| {
            self.free.pop().or_else(|| self.untouched.next().and_then(|slot| u32::try_from(slot).ok()))
        });
        let chain: Vec<u32> = slots.take(needed).collect();
        self.slots.publish(&chain, &payload);
        self.place(record, chain);
        true
    }

    /// Removes all records that overlap a range; returns their number.
    pub(crate) fn remove(&mut self, offset: u64, len: u64) -> usize {
        let found: Vec<u64> = self.overlapping(offset, len).map(|(from, _)| from).collect();
        for from in &found {
            if let Some(entry) = self.objects.remove(from) {
                self.slots.clear(&entry.chain);
                fence(Ordering::SeqCst);
                self.free.extend(entry.chain.iter());
            }
        }
        found.len()
    }

    /// Version and size of the object at an offset.
    pub(crate) fn version_at(&self, offset: u64) -> Option<(ObjectVersion, u64)> {
        self.objects.get(&offset).map(|entry| (entry.version, entry.size))
    }

    /// Up to `limit` records in offset order, starting at offset `from`.
    pub(crate) fn records(&self, from: u64, limit: usize) -> Vec<ObjectRecord> {
        let heads = self.objects.range(from..).take(limit).filter_map(|(_, entry)| entry.chain.first());
        let read = |head: &u32| match self.slots.read(*head) {
            ChainRead::Record { payload, .. } => ObjectRecord::decode(&payload),
            _ => None,
        };
        heads.filter_map(read).collect()
    }

    /// Highest master epoch of all records, past ones included.
    pub(crate) fn newest_epoch(&self) -> u64 {
        self.newest_epoch
    }

    pub(crate) fn counts(&self) -> CatalogCounts {
        CatalogCounts { objects: self.objects.len() as u64, ..self.counts }
    }

    /// Removes all records and assigns the catalog to another segment.
    pub(crate) fn reset(&mut self, segment: [u64; 2]) -> Result<(), OutOfRangeError> {
        self.remove(0, u64::MAX);
        self.slots.write_header(segment)
    }
}

impl ObjectSlots {
    fn write_header(&self, segment: [u64; 2]) -> Result<(), OutOfRangeError> {
        let mut bytes = Vec::with_capacity(SEALED + 4);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        segment.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.extend(Crc32c::of(&bytes).to_le_bytes());
        (0..2).try_for_each(|copy| self.memory.write_at(copy * COPY, &bytes))
    }

    /// Whether either header copy is valid for this segment and this format version.
    fn has_header(&self, segment: [u64; 2]) -> Result<bool, OutOfRangeError> {
        let mut is_known = false;
        for copy in 0..2 {
            let mut bytes = [0; SEALED + 4];
            self.memory.read_at(copy * COPY, &mut bytes)?;
            let (body, seal) = bytes.split_at(SEALED);
            let is_sealed = Crc32c::of(body).to_le_bytes() == seal;
            if !is_sealed && bytes.iter().any(|byte| *byte != 0) {
                tracing::warn!(copy, "a copy of a catalog header is corrupt");
            }
            let words: Vec<u64> = body
                .get(12..)
                .unwrap_or_default()
                .as_chunks::<8>()
                .0
                .iter()
                .map(|word| u64::from_le_bytes(*word))
                .collect();
            let is_supported =
                body.get(..8) == Some(MAGIC) && body.get(8..12) == Some(&VERSION.to_le_bytes());
            is_known |= is_sealed && is_supported && words == segment;
        }
        Ok(is_known)
    }
}
