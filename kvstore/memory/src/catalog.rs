//! Which objects lie in a segment, as its master reported them: what a master that has lost its log needs to serve them again.
//!
//! The catalog lies in shared memory of its own, beside the ledger's. A record proves nothing alone: it counts while entries of the
//! ledger cover its range to the byte and have its checksum. So a range that was overwritten, also by a release that has no
//! catalog, never counts as the object that was there before.

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

/// Bytes before the slots.
const HEADER: u64 = 4096;
/// The header is there twice.
const COPY: u64 = 2048;
const MAGIC: &[u8; 8] = b"moonobj\0";
const VERSION: u32 = 1;
const SEALED: usize = 28;
/// Bytes of a segment per slot. A record takes two or three.
const BYTES_PER_SLOT: u64 = 8 << 10;
const SLOTS: std::ops::RangeInclusive<u64> = 16_384..=1 << 24;

/// Bytes that the catalog of a segment of `size` bytes takes at most.
#[must_use]
pub fn bytes_for(size: u64) -> u64 {
    HEADER + slots_for(size) * SLOT
}

fn slots_for(size: u64) -> u64 {
    (size / BYTES_PER_SLOT).clamp(*SLOTS.start(), *SLOTS.end())
}

/// Numbers about a catalog.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CatalogCounts {
    /// Objects that a master can be offered.
    pub objects: u64,
    /// Records that failed their checksum when it was opened.
    pub damaged: u64,
    /// Records whose range was overwritten, or lost, before it was opened.
    pub stale: u64,
    /// Objects that were not recorded, because there was no slot, or their texts are too long.
    pub unrecorded: u64,
}

#[derive(Debug)]
struct CatalogEntry {
    size: u64,
    version: ObjectVersion,
    chain: Box<[u32]>,
}

/// The catalog of one segment.
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
    /// Opens what is in memory of [`bytes_for`] bytes. Only records that `is_proven` accepts are kept; a catalog of another segment
    /// starts over.
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
        // First slots that are counted as damaged or stale already.
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
                    let lies_in = |it: &ObjectRecord| {
                        it.size > 0 && it.offset.checked_add(it.size).is_some_and(|end| end <= size)
                    };
                    match record.filter(|it| lies_in(it) && is_proven(it)) {
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
        // Their records were being made or dropped when the process ended, or their first slots are lost.
        let cut: HashSet<u32> =
            tails.iter().filter(|(_, slot)| !used.contains(slot)).map(|(head, _)| *head).collect();
        self.counts.stale += cut.iter().filter(|head| !heads.contains(head)).count() as u64;
        // `place` has freed the slots of records that others replaced.
        let taken: HashSet<u32> = self.objects.values().flat_map(|it| it.chain.iter().copied()).collect();
        let last = used.iter().map(|slot| u64::from(*slot) + 1).max().unwrap_or(0).max(end);
        self.free = (0..last)
            .filter_map(|slot| u32::try_from(slot).ok())
            .filter(|slot| !taken.contains(slot))
            .collect();
        self.untouched = last..self.slots.slots;
    }

    /// Enters a record that is in its slots. Of two that overlap the newer one counts.
    fn place(&mut self, record: &ObjectRecord, chain: Vec<u32>) {
        let newer = self.overlapping(record.offset, record.size).any(|(_, it)| it.version > record.version);
        if newer {
            self.slots.clear(&chain);
            self.counts.stale += 1;
            return;
        }
        self.counts.stale += self.remove(record.offset, record.size) as u64;
        let placed = CatalogEntry { size: record.size, version: record.version, chain: chain.into() };
        self.newest_epoch = self.newest_epoch.max(record.version.epoch);
        self.objects.insert(record.offset, placed);
    }

    fn overlapping(&self, offset: u64, len: u64) -> impl Iterator<Item = (u64, &CatalogEntry)> {
        let end = offset.saturating_add(len);
        // Records do not overlap, so only the last one that begins before can reach in.
        let before = self.objects.range(..offset).next_back();
        let before = before.filter(|(from, it)| len > 0 && **from + it.size > offset);
        before.into_iter().chain(self.objects.range(offset..end)).map(|(from, it)| (*from, it))
    }

    /// Records an object in place of all that it overlaps. False when there is no slot for it, or its texts are too long.
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
                    "the catalog of objects is full: a master that has lost its log will not get what comes beyond it"
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

    /// Drops all records that overlap a range. Returns how many that were.
    pub(crate) fn remove(&mut self, offset: u64, len: u64) -> usize {
        let found: Vec<u64> = self.overlapping(offset, len).map(|(from, _)| from).collect();
        for from in &found {
            if let Some(placed) = self.objects.remove(from) {
                self.slots.clear(&placed.chain);
                fence(Ordering::SeqCst);
                self.free.extend(placed.chain.iter());
            }
        }
        found.len()
    }

    /// The version of the object that begins at an offset, and its size.
    pub(crate) fn version_at(&self, offset: u64) -> Option<(ObjectVersion, u64)> {
        self.objects.get(&offset).map(|it| (it.version, it.size))
    }

    /// Records in the order of their offsets, at most `most` of them, from the first that begins at `from` or later.
    pub(crate) fn records(&self, from: u64, most: usize) -> Vec<ObjectRecord> {
        let heads = self.objects.range(from..).take(most).filter_map(|(_, it)| it.chain.first());
        let read = |head: &u32| match self.slots.read(*head) {
            ChainRead::Record { payload, .. } => ObjectRecord::decode(&payload),
            _ => None,
        };
        heads.filter_map(read).collect()
    }

    /// The highest epoch of any record that was there.
    pub(crate) fn newest_epoch(&self) -> u64 {
        self.newest_epoch
    }

    pub(crate) fn counts(&self) -> CatalogCounts {
        CatalogCounts { objects: self.objects.len() as u64, ..self.counts }
    }

    /// Drops everything and belongs to another segment from now on.
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

    /// Whether either copy of the header is that of this segment, in a form that this release reads.
    fn has_header(&self, segment: [u64; 2]) -> Result<bool, OutOfRangeError> {
        let mut is_known = false;
        for copy in 0..2 {
            let mut bytes = [0; SEALED + 4];
            self.memory.read_at(copy * COPY, &mut bytes)?;
            let (body, seal) = bytes.split_at(SEALED);
            let is_sealed = Crc32c::of(body).to_le_bytes() == seal;
            if !is_sealed && bytes.iter().any(|byte| *byte != 0) {
                tracing::warn!(copy, "a copy of a catalog's header is damaged");
            }
            let words: Vec<u64> = body
                .get(12..)
                .unwrap_or_default()
                .as_chunks::<8>()
                .0
                .iter()
                .map(|it| u64::from_le_bytes(*it))
                .collect();
            let is_ours = body.get(..8) == Some(MAGIC) && body.get(8..12) == Some(&VERSION.to_le_bytes());
            is_known |= is_sealed && is_ours && words == segment;
        }
        Ok(is_known)
    }
}
