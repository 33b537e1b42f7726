//! Which parts of a region hold bytes that were written to their end.
//!
//! The ledger lies in shared memory of its own, so that a process that comes after one that died knows what it can go on serving. It
//! never says that a part is whole when it is not:
//! - what a write will overlap is taken out before its first byte ([`Ledger::begin`]),
//! - and a part is entered by one store, after its last byte ([`LedgerWrite::finish`]).
//!
//! So wherever a process is killed, an entry is there or it is not. Each entry has a checksum of itself, and one of the bytes it
//! speaks of. The pages of a machine that loses its power reach the disk in any order: see [`Ledger::same_boot`].

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

/// Bytes before the slots.
const HEADERS: u64 = 4096;
/// Bytes of a region per slot. Of objects that are smaller on the average, not all outlive the process.
const BYTES_PER_SLOT: u64 = 4 << 10;
const SLOTS: std::ops::RangeInclusive<u64> = 1024..=1 << 24;

/// Bytes that the ledger of a region of `size` bytes takes at most: of memory that is given when it is first touched, it takes no more
/// than it has entries.
#[must_use]
pub fn bytes_for(size: u64) -> u64 {
    HEADERS + slots_for(size) * SLOT
}

fn slots_for(size: u64) -> u64 {
    (size / BYTES_PER_SLOT).clamp(*SLOTS.start(), *SLOTS.end())
}

/// Why there is no ledger.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// Another process writes it.
    #[error("the segment is in use by another process; stop that one first, or give each its own")]
    InUse,
    /// The system says no.
    #[error("cannot open the segment's ledger: {0}")]
    Io(#[from] io::Error),
    /// It cannot be mapped.
    #[error("cannot open the segment's ledger: {0}")]
    Region(#[from] region::RegionError),
    /// A name that does not fit.
    #[error("a segment's name of {0} bytes is too long; {MAX_NAME} at most")]
    Name(usize),
}

impl From<OutOfRangeError> for LedgerError {
    fn from(problem: OutOfRangeError) -> Self {
        Self::Io(problem.into())
    }
}

/// What was there.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each segment, taken apart at once")]
pub enum OpenedLedger {
    /// A ledger, and a segment to go on with.
    Existing(Ledger),
    /// Nothing that can be used.
    Empty(EmptyLedger),
}

/// A ledger's memory without a segment.
#[derive(Debug)]
pub struct EmptyLedger {
    table: LedgerTable,
    lock: File,
    size: u64,
}

/// The ledger of one segment. One process has it open at a time; its threads share it.
#[derive(Debug)]
pub struct Ledger {
    table: LedgerTable,
    header: Mutex<LedgerHeader>,
    index: Mutex<LedgerIndex>,
    /// Which objects lie where, if that is kept too. Locked after `index`.
    catalog: Mutex<Option<ObjectCatalog>>,
    size: u64,
    damaged: u64,
    unrecorded: AtomicU64,
    /// Whether it has been said that all slots are taken.
    full_logged: AtomicBool,
    /// Held until the process ends or closes it.
    lock: File,
}

/// Numbers about a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LedgerCounts {
    /// Parts that are whole.
    pub entries: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Entries that could not be read when it was opened: bits had changed.
    pub damaged: u64,
    /// Parts that were written and that a process that comes after this one will not know, because there was no slot or another write
    /// overlapped them.
    pub unrecorded: u64,
}

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LedgerWriteOutcome {
    /// It is entered.
    Recorded,
    /// Another write touched the same bytes meanwhile: nobody knows what lies there.
    Overlapped,
    /// All slots are taken. This process knows it like any other part, one that comes after this one will not.
    NoFreeSlot,
}

/// A write under way. Dropped before it is finished, it leaves nothing.
#[derive(Debug)]
#[must_use = "a write that is not finished leaves no entry"]
pub struct LedgerWrite<'a> {
    ledger: &'a Ledger,
    id: u64,
}

impl Ledger {
    /// Opens the ledger of a region of `size` bytes in memory of [`bytes_for`] bytes, and holds it against other processes.
    ///
    /// # Errors
    /// [`LedgerError::InUse`], or as the system says.
    pub fn open(memory: impl AsFd, size: u64) -> Result<OpenedLedger, LedgerError> {
        // The lock is an opening's own, and the descriptor may share its opening with the holder.
        let lock = reopen(&memory)?;
        lock.try_lock().map_err(|problem| match problem {
            TryLockError::WouldBlock => LedgerError::InUse,
            TryLockError::Error(problem) => LedgerError::Io(problem),
        })?;
        let region = MappedRegion::from_fd(memory.as_fd().try_clone_to_owned()?, bytes_for(size), None)?;
        let table = LedgerTable::new(region, slots_for(size));
        let blank = EmptyLedger { table, lock, size };
        match LedgerHeader::read(&blank.table.memory)? {
            Some(header) if header.identity.size == size => Ok(OpenedLedger::Existing(blank.resume(header))),
            Some(header) => {
                tracing::warn!(
                    "the segment was {} bytes and is {size} now: what it held is dropped",
                    header.identity.size
                );
                Ok(OpenedLedger::Empty(blank))
            }
            None => Ok(OpenedLedger::Empty(blank)),
        }
    }

    /// Whether the machine has not been started anew since the entries were written or last checked. If it has, the memory lies on a
    /// disk, and entries may have reached it that their bytes have not: check them all before any is served, and tell by
    /// [`Ledger::mark_verified`].
    #[must_use]
    pub fn same_boot(&self) -> bool {
        self.header.lock().boot == header::boot()
    }

    /// All entries have been checked since the machine was started.
    ///
    /// # Errors
    /// None that a ledger which is open can have.
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

    /// What the segment is.
    #[must_use]
    pub fn identity(&self) -> SegmentIdentity {
        self.header.lock().identity.clone()
    }

    /// Changes what the segment is, all at once.
    ///
    /// # Errors
    /// [`LedgerError::Name`]; its size cannot change either.
    pub fn set_identity(&self, identity: SegmentIdentity) -> Result<(), LedgerError> {
        let segment = identity.segment;
        let is_other = segment != self.identity().segment;
        self.update_header(|header| header.identity = SegmentIdentity { size: self.size, ..identity })?;
        match self.catalog.lock().as_mut() {
            Some(catalog) if is_other => Ok(catalog.reset(segment)?),
            _ => Ok(()),
        }
    }

    /// Drops all that is known, to begin another segment.
    #[must_use]
    pub fn wipe(self) -> EmptyLedger {
        EmptyLedger { table: self.table, lock: self.lock, size: self.size }
    }

    /// To be called before the first byte of a part is written: what overlaps it is whole no longer.
    ///
    /// # Errors
    /// When the part does not lie in the region.
    pub fn begin(&self, offset: u64, len: u64) -> Result<LedgerWrite<'_>, OutOfRangeError> {
        if offset.checked_add(len).is_none_or(|end| end > self.size) {
            return Err(OutOfRangeError { offset, len, size: self.size });
        }
        let mut index = self.index.lock();
        self.remove_range(&mut index, offset, len);
        let id = index.start(offset, len);
        Ok(LedgerWrite { ledger: self, id })
    }

    /// Takes out all that overlaps a part, and tells how many entries that were.
    pub fn remove(&self, offset: u64, len: u64) -> usize {
        self.remove_range(&mut self.index.lock(), offset, len)
    }

    /// Takes out this very entry, unless its bytes have been written anew since. Whether it did.
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
        // What follows (bytes written here or by the kernel, a slot's next use) stays behind the entries' end.
        fence(Ordering::SeqCst);
        index.release_slots(&slots);
        entries
    }

    /// The entry for exactly this part.
    #[must_use]
    pub fn find(&self, offset: u64, len: u64) -> Option<LedgerEntry> {
        self.index.lock().exact(offset, len)
    }

    /// Whether every byte of a part is whole, by one entry or several side by side.
    #[must_use]
    pub fn covers(&self, offset: u64, len: u64) -> bool {
        self.index.lock().covers(offset, len)
    }

    /// Entries in the order of their offsets, at most `most` of them, from the first that begins at `from` or later.
    #[must_use]
    pub fn entries(&self, from: u64, most: usize) -> Vec<LedgerEntry> {
        self.index.lock().entries(from, most)
    }

    fn warn_full(&self) {
        if !self.full_logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "a ledger of {} entries is full, since objects are smaller than {BYTES_PER_SLOT} bytes on the average: \
                 what comes beyond them does not outlive this process",
                self.table.capacity()
            );
        }
    }

    /// Numbers.
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
    /// Begins a segment.
    ///
    /// # Errors
    /// [`LedgerError::Name`].
    pub fn start(self, identity: SegmentIdentity) -> Result<Ledger, LedgerError> {
        let identity = SegmentIdentity { size: self.size, ..identity };
        let header = LedgerHeader { generation: 1, boot: header::boot(), identity };
        // A process that dies here leaves no header, and the next one begins again.
        LedgerHeader::erase(&self.table.memory)?;
        for slot in self.table.touched(&self.lock) {
            self.table.clear(slot);
        }
        fence(Ordering::SeqCst);
        header.write(&self.table.memory)?;
        Ok(self.ledger(header, Vec::new(), 0))
    }

    /// Goes on with what is there.
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
        // Entries of which one must be wrong: both go.
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
            tracing::warn!("{damaged} entries of a segment's ledger are damaged and dropped");
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
    /// To be called after the last byte: enters the part, with the CRC-32C of its bytes.
    pub fn finish(self, crc: u32) -> LedgerWriteOutcome {
        let mut index = self.ledger.index.lock();
        // The bytes are there before the entry is.
        fence(Ordering::SeqCst);
        let finished = match index.end(self.id) {
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
        if finished != LedgerWriteOutcome::Recorded {
            self.ledger.unrecorded.fetch_add(1, Ordering::Relaxed);
        }
        finished
    }
}

impl Drop for LedgerWrite<'_> {
    fn drop(&mut self) {
        // After `finish` there is nothing left to end.
        self.ledger.index.lock().end(self.id);
    }
}
