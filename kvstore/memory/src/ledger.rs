//! Records which ranges of a region hold completely written bytes.
//!
//! The ledger has its own shared memory, so that after a crash the next process can keep serving these ranges. It never lists an incomplete
//! range:
//! - entries that a write overlaps are removed before its first byte ([`Ledger::begin`]),
//! - and an entry is published by a single store after the last byte ([`LedgerWrite::finish`]).
//!
//! So an entry is either complete or absent, wherever the process is killed. Each entry has a checksum of itself and one of its range.
//! After a power loss, pages may have reached the disk in any order: see [`Ledger::same_boot`].

mod header;
mod index;
mod objects;
mod slots;

use std::fs::{File, TryLockError};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use parking_lot::Mutex;

pub use header::{MAX_NAME, SegmentIdentity};
pub use index::LedgerEntry;
pub use objects::RecordOutcome;
pub(crate) use slots::touched_slots;

use crate::catalog::ObjectCatalog;
use crate::region::{self, MappedRegion, OutOfRangeError};
use crate::reopen;
use header::LedgerHeader;
use index::LedgerIndex;
use slots::{LedgerRecord, LedgerSlot, LedgerTable, SLOT};

/// Bytes of the header area before the slots.
const HEADERS: u64 = 4096;
/// Region bytes per slot. If objects are smaller on average, not all of them survive a restart.
const BYTES_PER_SLOT: u64 = 4 << 10;
const SLOTS: std::ops::RangeInclusive<u64> = 1024..=1 << 24;

/// Maximum bytes of the ledger of a region of `size` bytes. Memory that is allocated on first touch grows only with the number of entries.
#[must_use]
pub fn bytes_for(size: u64) -> u64 {
    HEADERS + slots_for(size) * SLOT
}

fn slots_for(size: u64) -> u64 {
    (size / BYTES_PER_SLOT).clamp(*SLOTS.start(), *SLOTS.end())
}

/// Why a ledger cannot be opened or changed.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// Another process has the ledger open.
    #[error("the segment is in use by another process; stop that process, or use separate segments")]
    InUse,
    /// The operating system returned an error.
    #[error("cannot open the segment's ledger: {0}")]
    Io(#[from] io::Error),
    /// The ledger cannot be mapped.
    #[error("cannot open the segment's ledger: {0}")]
    Region(#[from] region::RegionError),
    /// The segment name is too long.
    #[error("a segment name of {0} bytes is too long; the maximum is {MAX_NAME}")]
    Name(usize),
}

impl From<OutOfRangeError> for LedgerError {
    fn from(problem: OutOfRangeError) -> Self {
        Self::Io(problem.into())
    }
}

/// Result of opening a ledger.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one per segment, destructured at once")]
pub enum OpenedLedger {
    /// A ledger of an existing segment.
    Existing(Ledger),
    /// Memory without a usable ledger.
    Empty(EmptyLedger),
}

/// Ledger memory without a segment.
#[derive(Debug)]
pub struct EmptyLedger {
    table: LedgerTable,
    lock: File,
    size: u64,
}

/// The ledger of one segment, open in one process at a time and shared by its threads.
#[derive(Debug)]
pub struct Ledger {
    table: LedgerTable,
    header: Mutex<LedgerHeader>,
    index: Mutex<LedgerIndex>,
    /// Catalog of objects, if enabled. Locked after `index`.
    catalog: Mutex<Option<ObjectCatalog>>,
    size: u64,
    damaged: u64,
    unrecorded: AtomicU64,
    /// Whether the full-ledger warning was logged.
    full_logged: AtomicBool,
    /// File lock, held until the process ends or closes it.
    lock: File,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LedgerCounts {
    pub entries: u64,
    /// Total bytes of complete ranges.
    pub bytes: u64,
    /// Corrupt entries found when the ledger was opened.
    pub damaged: u64,
    /// Written ranges that do not survive a restart, for lack of a slot or because of an overlapping write.
    pub unrecorded: u64,
}

/// Result of a finished write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LedgerWriteOutcome {
    /// The entry is stored in the ledger.
    Recorded,
    /// Another write touched the same bytes meanwhile: the content is undefined.
    Overlapped,
    /// All slots are in use. The entry is valid in this process, but does not survive a restart.
    NoFreeSlot,
}

/// A write in progress. Dropped before `finish`, it leaves no entry.
#[derive(Debug)]
#[must_use = "a write that is not finished leaves no entry"]
pub struct LedgerWrite<'a> {
    ledger: &'a Ledger,
    id: u64,
}

impl Ledger {
    /// Opens and locks the ledger of a region of `size` bytes, in memory of [`bytes_for`] bytes.
    ///
    /// # Errors
    /// [`LedgerError::InUse`], or errors of the operating system.
    pub fn open(memory: impl AsFd, size: u64) -> Result<OpenedLedger, LedgerError> {
        // Locks belong to an open file description, which `memory` may share with the holder.
        let lock = reopen(&memory)?;
        lock.try_lock().map_err(|problem| match problem {
            TryLockError::WouldBlock => LedgerError::InUse,
            TryLockError::Error(problem) => LedgerError::Io(problem),
        })?;
        let region = MappedRegion::from_fd(memory.as_fd().try_clone_to_owned()?, bytes_for(size), None)?;
        let table = LedgerTable::new(region, slots_for(size));
        let empty = EmptyLedger { table, lock, size };
        match LedgerHeader::read(&empty.table.memory)? {
            Some(header) if header.identity.size == size => Ok(OpenedLedger::Existing(empty.resume(header))),
            Some(header) => {
                tracing::warn!(
                    "the segment size changed from {} to {size} bytes: its content is dropped",
                    header.identity.size
                );
                Ok(OpenedLedger::Empty(empty))
            }
            None => Ok(OpenedLedger::Empty(empty)),
        }
    }

    /// Whether the entries were written or verified since the machine booted. If not, the memory is on a disk, which entries may have
    /// reached without their bytes: verify all of them before serving any, then call [`Ledger::mark_verified`].
    #[must_use]
    pub fn same_boot(&self) -> bool {
        self.header.lock().boot == header::boot()
    }

    /// Records that all entries were verified since the machine booted.
    ///
    /// # Errors
    /// None for an open ledger.
    pub fn mark_verified(&self) -> Result<(), LedgerError> {
        self.update_header(|header| header.boot = header::boot())
    }

    fn update_header(&self, change: impl FnOnce(&mut LedgerHeader)) -> Result<(), LedgerError> {
        let mut header = self.header.lock();
        let mut next = header.clone();
        change(&mut next);
        next.generation += 1;
        next.write(&self.table.memory)?;
        *header = next;
        Ok(())
    }

    /// Whether peers write to the memory directly, over RDMA. Then the ledger has no entries, and the master is the only one that
    /// can say which ranges are complete.
    #[must_use]
    pub fn has_direct_writes(&self) -> bool {
        self.header.lock().direct_writes
    }

    #[must_use]
    pub fn identity(&self) -> SegmentIdentity {
        self.header.lock().identity.clone()
    }

    /// Changes the segment's identity atomically.
    ///
    /// # Errors
    /// [`LedgerError::Name`]. The size cannot be changed.
    pub fn set_identity(&self, identity: SegmentIdentity) -> Result<(), LedgerError> {
        let segment = identity.segment;
        let is_other = segment != self.identity().segment;
        self.update_header(|header| header.identity = SegmentIdentity { size: self.size, ..identity })?;
        match self.catalog.lock().as_mut() {
            Some(catalog) if is_other => Ok(catalog.reset(segment)?),
            _ => Ok(()),
        }
    }

    /// Drops all entries, to start another segment.
    #[must_use]
    pub fn wipe(self) -> EmptyLedger {
        EmptyLedger { table: self.table, lock: self.lock, size: self.size }
    }

    /// Call before the first byte of a range is written: removes overlapping entries.
    ///
    /// # Errors
    /// When the range is not within the region.
    pub fn begin(&self, offset: u64, len: u64) -> Result<LedgerWrite<'_>, OutOfRangeError> {
        if offset.checked_add(len).is_none_or(|end| end > self.size) {
            return Err(OutOfRangeError { offset, len, size: self.size });
        }
        let mut index = self.index.lock();
        self.remove_range(&mut index, offset, len);
        let id = index.start(offset, len);
        Ok(LedgerWrite { ledger: self, id })
    }

    /// Removes all entries that overlap a range; returns their number.
    pub fn remove(&self, offset: u64, len: u64) -> usize {
        self.remove_range(&mut self.index.lock(), offset, len)
    }

    /// Removes exactly this entry, unless its bytes were rewritten since. Returns whether it did.
    pub fn remove_entry(&self, entry: &LedgerEntry) -> bool {
        let mut index = self.index.lock();
        index.exact(entry.offset, entry.len) == Some(*entry)
            && self.remove_range(&mut index, entry.offset, 1) == 1
    }

    fn remove_range(&self, index: &mut LedgerIndex, offset: u64, len: u64) -> usize {
        let (entries, slots) = index.remove(offset, len);
        for slot in &slots {
            self.table.clear(*slot);
        }
        if let Some(catalog) = self.catalog.lock().as_mut() {
            catalog.remove(offset, len);
        }
        // Later stores (bytes written here or by the kernel, reuse of a slot) must not move before the removal.
        fence(Ordering::SeqCst);
        index.release_slots(&slots);
        entries
    }

    /// The entry for exactly this range.
    #[must_use]
    pub fn find(&self, offset: u64, len: u64) -> Option<LedgerEntry> {
        self.index.lock().exact(offset, len)
    }

    /// Whether one or several adjacent entries cover the whole range.
    #[must_use]
    pub fn covers(&self, offset: u64, len: u64) -> bool {
        self.index.lock().covers(offset, len)
    }

    /// Up to `limit` entries in offset order, starting at offset `from`.
    #[must_use]
    pub fn entries(&self, from: u64, limit: usize) -> Vec<LedgerEntry> {
        self.index.lock().entries(from, limit)
    }

    fn warn_full(&self) {
        if !self.full_logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "a ledger of {} entries is full, because objects are smaller than {BYTES_PER_SLOT} bytes on average: \
                 further objects do not survive a restart",
                self.table.capacity()
            );
        }
    }

    #[must_use]
    pub fn counts(&self) -> LedgerCounts {
        let index = self.index.lock();
        LedgerCounts {
            entries: index.len() as u64,
            bytes: index.bytes(),
            damaged: self.damaged,
            unrecorded: self.unrecorded.load(Ordering::Relaxed),
        }
    }
}

impl EmptyLedger {
    /// Starts a new segment. `direct_writes`: see [`Ledger::has_direct_writes`].
    ///
    /// # Errors
    /// [`LedgerError::Name`].
    pub fn start(self, identity: SegmentIdentity, direct_writes: bool) -> Result<Ledger, LedgerError> {
        let identity = SegmentIdentity { size: self.size, ..identity };
        let header = LedgerHeader { generation: 1, boot: header::boot(), direct_writes, identity };
        // A process killed here leaves no header, and the next one starts over.
        LedgerHeader::erase(&self.table.memory)?;
        for slot in self.table.touched(&self.lock) {
            self.table.clear(slot);
        }
        fence(Ordering::SeqCst);
        header.write(&self.table.memory)?;
        Ok(self.ledger(header, Vec::new(), 0))
    }

    /// Resumes with the existing entries.
    fn resume(self, header: LedgerHeader) -> Ledger {
        let mut records = Vec::new();
        let mut damaged = 0;
        for slot in self.table.touched(&self.lock) {
            match self.table.read(slot) {
                LedgerSlot::Free => {}
                LedgerSlot::Valid(record) if record.lies_in(self.size) => records.push((slot, record)),
                LedgerSlot::Valid(_) | LedgerSlot::Damaged => {
                    damaged += 1;
                    self.table.clear(slot);
                }
            }
        }
        // Of two overlapping entries one must be wrong: drop both.
        records.sort_unstable_by_key(|(_, record)| record.offset);
        let mut whole: Vec<(u64, LedgerRecord)> = Vec::with_capacity(records.len());
        let mut end = 0;
        for (slot, record) in records {
            if record.offset < end {
                damaged += 1;
                self.table.clear(slot);
                if let Some((before, _)) = whole.pop_if(|(_, last)| last.offset + last.len == end) {
                    damaged += 1;
                    self.table.clear(before);
                }
                end = end.max(record.offset + record.len);
            } else {
                end = record.offset + record.len;
                whole.push((slot, record));
            }
        }
        if damaged > 0 {
            tracing::warn!("dropped {damaged} corrupt entries of a segment ledger");
        }
        self.ledger(header, whole, damaged)
    }

    fn ledger(self, header: LedgerHeader, records: Vec<(u64, LedgerRecord)>, damaged: u64) -> Ledger {
        Ledger {
            index: Mutex::new(LedgerIndex::new(self.table.capacity(), records)),
            catalog: Mutex::default(),
            table: self.table,
            header: Mutex::new(header),
            size: self.size,
            damaged,
            unrecorded: AtomicU64::new(0),
            full_logged: AtomicBool::new(false),
            lock: self.lock,
        }
    }
}

impl LedgerWrite<'_> {
    /// Call after the last byte: publishes the range with the CRC-32C of its bytes.
    pub fn finish(self, crc: u32) -> LedgerWriteOutcome {
        let mut index = self.ledger.index.lock();
        // The bytes must be visible before the entry.
        fence(Ordering::SeqCst);
        let outcome = match index.end(self.id) {
            None => LedgerWriteOutcome::Overlapped,
            Some((_, 0)) => LedgerWriteOutcome::Recorded,
            Some((offset, len)) => {
                let record = LedgerRecord { offset, len, crc };
                match index.insert(record) {
                    None => {
                        self.ledger.warn_full();
                        LedgerWriteOutcome::NoFreeSlot
                    }
                    Some(slot) => {
                        self.ledger.table.publish(slot, record);
                        LedgerWriteOutcome::Recorded
                    }
                }
            }
        };
        if outcome != LedgerWriteOutcome::Recorded {
            self.ledger.unrecorded.fetch_add(1, Ordering::Relaxed);
        }
        outcome
    }
}

impl LedgerWrite<'_> {
    /// Call after the last byte instead of [`LedgerWrite::finish`], to leave no entry. False if another write touched the same bytes
    /// meanwhile.
    #[must_use]
    pub fn end_unrecorded(self) -> bool {
        self.ledger.index.lock().end(self.id).is_some()
    }
}

impl Drop for LedgerWrite<'_> {
    fn drop(&mut self) {
        // After `finish` this has no effect.
        self.ledger.index.lock().end(self.id);
    }
}
