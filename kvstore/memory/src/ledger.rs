//! Which parts of a region hold bytes that were written to their end.
//!
//! The ledger lies in shared memory of its own, so that a process that comes after one that died knows what it can go on serving. It
//! never says that a part is whole when it is not:
//! - what a write will overlap is taken out before its first byte ([`Ledger::begin`]),
//! - and a part is entered by one store, after its last byte ([`Writing::finish`]).
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

pub use header::{Identity, MAX_NAME};
pub use index::Entry;
pub use objects::RecordOutcome;
pub(crate) use slots::touched_slots;

use crate::catalog::Catalog;
use crate::region::{self, OutOfRange, Region};
use crate::reopen;
use header::Header;
use index::Index;
use slots::{Record, SLOT, Slot, Table};

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
pub enum Error {
    /// Another process writes it.
    #[error("the segment is in use by another process; stop that one first, or give each its own")]
    InUse,
    /// The system says no.
    #[error("cannot open the segment's ledger: {0}")]
    Io(#[from] io::Error),
    /// It cannot be mapped.
    #[error("cannot open the segment's ledger: {0}")]
    Region(#[from] region::Error),
    /// A name that does not fit.
    #[error("a segment's name of {0} bytes is too long; {MAX_NAME} at most")]
    Name(usize),
}

impl From<OutOfRange> for Error {
    fn from(problem: OutOfRange) -> Self {
        Self::Io(problem.into())
    }
}

/// What was there.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each segment, taken apart at once")]
pub enum Opened {
    /// A ledger, and a segment to go on with.
    Kept(Ledger),
    /// Nothing that can be used.
    Empty(Blank),
}

/// A ledger's memory without a segment.
#[derive(Debug)]
pub struct Blank {
    table: Table,
    lock: File,
    size: u64,
}

/// The ledger of one segment. One process has it open at a time; its threads share it.
#[derive(Debug)]
pub struct Ledger {
    table: Table,
    header: Mutex<Header>,
    index: Mutex<Index>,
    /// Which objects lie where, if that is kept too. Locked after `index`.
    catalog: Mutex<Option<Catalog>>,
    size: u64,
    damaged: u64,
    unrecorded: AtomicU64,
    /// Whether it has been said that all slots are taken.
    told: AtomicBool,
    /// Held until the process ends or closes it.
    lock: File,
}

/// Numbers about a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
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
pub enum Finished {
    /// It is entered.
    Recorded,
    /// Another write touched the same bytes meanwhile: nobody knows what lies there.
    Overlapped,
    /// All slots are taken. This process knows it like any other part, one that comes after this one will not.
    NoRoom,
}

/// A write under way. Dropped before it is finished, it leaves nothing.
#[derive(Debug)]
#[must_use = "a write that is not finished leaves no entry"]
pub struct Writing<'a> {
    ledger: &'a Ledger,
    id: u64,
}

impl Ledger {
    /// Opens the ledger of a region of `size` bytes in memory of [`bytes_for`] bytes, and holds it against other processes.
    ///
    /// # Errors
    /// [`Error::InUse`], or as the system says.
    pub fn open(memory: impl AsFd, size: u64) -> Result<Opened, Error> {
        // The lock is an opening's own, and the descriptor may share its opening with the holder.
        let lock = reopen(&memory)?;
        lock.try_lock().map_err(|problem| match problem {
            TryLockError::WouldBlock => Error::InUse,
            TryLockError::Error(problem) => Error::Io(problem),
        })?;
        let region = Region::from_fd(memory.as_fd().try_clone_to_owned()?, bytes_for(size), None)?;
        let table = Table::new(region, slots_for(size));
        let blank = Blank { table, lock, size };
        match Header::read(&blank.table.memory)? {
            Some(header) if header.identity.size == size => Ok(Opened::Kept(blank.resume(header))),
            Some(header) => {
                tracing::warn!(
                    "the segment was {} bytes and is {size} now: what it held is dropped",
                    header.identity.size
                );
                Ok(Opened::Empty(blank))
            }
            None => Ok(Opened::Empty(blank)),
        }
    }

    /// Whether the machine has not been started anew since the entries were written or last checked. If it has, the memory lies on a
    /// disk, and entries may have reached it that their bytes have not: check them all before any is served, and tell by
    /// [`Ledger::checked`].
    #[must_use]
    pub fn same_boot(&self) -> bool {
        self.header.lock().boot == header::boot()
    }

    /// All entries have been checked since the machine was started.
    ///
    /// # Errors
    /// None that a ledger which is open can have.
    pub fn checked(&self) -> Result<(), Error> {
        self.change(|header| header.boot = header::boot())
    }

    fn change(&self, change: impl FnOnce(&mut Header)) -> Result<(), Error> {
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
    pub fn identity(&self) -> Identity {
        self.header.lock().identity.clone()
    }

    /// Changes what the segment is, all at once.
    ///
    /// # Errors
    /// [`Error::Name`]; its size cannot change either.
    pub fn set_identity(&self, identity: Identity) -> Result<(), Error> {
        let segment = identity.segment;
        let is_other = segment != self.identity().segment;
        self.change(|header| header.identity = Identity { size: self.size, ..identity })?;
        match self.catalog.lock().as_mut() {
            Some(catalog) if is_other => Ok(catalog.restart(segment)?),
            _ => Ok(()),
        }
    }

    /// Drops all that is known, to begin another segment.
    #[must_use]
    pub fn wipe(self) -> Blank {
        Blank { table: self.table, lock: self.lock, size: self.size }
    }

    /// To be called before the first byte of a part is written: what overlaps it is whole no longer.
    ///
    /// # Errors
    /// When the part does not lie in the region.
    pub fn begin(&self, offset: u64, len: u64) -> Result<Writing<'_>, OutOfRange> {
        if offset.checked_add(len).is_none_or(|end| end > self.size) {
            return Err(OutOfRange { offset, len, size: self.size });
        }
        let mut index = self.index.lock();
        self.take_out(&mut index, offset, len);
        let id = index.start(offset, len);
        Ok(Writing { ledger: self, id })
    }

    /// Takes out all that overlaps a part, and tells how many entries that were.
    pub fn forget(&self, offset: u64, len: u64) -> usize {
        self.take_out(&mut self.index.lock(), offset, len)
    }

    /// Takes out this very entry, unless its bytes have been written anew since. Whether it did.
    pub fn forget_entry(&self, entry: &Entry) -> bool {
        let mut index = self.index.lock();
        index.exact(entry.offset, entry.len) == Some(*entry)
            && self.take_out(&mut index, entry.offset, 1) == 1
    }

    fn take_out(&self, index: &mut Index, offset: u64, len: u64) -> usize {
        let (entries, slots) = index.remove(offset, len);
        for slot in &slots {
            self.table.clear(*slot);
        }
        if let Some(catalog) = self.catalog.lock().as_mut() {
            catalog.remove(offset, len);
        }
        // What follows (bytes written here or by the kernel, a slot's next use) stays behind the entries' end.
        fence(Ordering::SeqCst);
        index.give_back(&slots);
        entries
    }

    /// The entry for exactly this part.
    #[must_use]
    pub fn find(&self, offset: u64, len: u64) -> Option<Entry> {
        self.index.lock().exact(offset, len)
    }

    /// Whether every byte of a part is whole, by one entry or several side by side.
    #[must_use]
    pub fn covers(&self, offset: u64, len: u64) -> bool {
        self.index.lock().covers(offset, len)
    }

    /// Entries in the order of their offsets, at most `most` of them, from the first that begins at `from` or later.
    #[must_use]
    pub fn entries(&self, from: u64, most: usize) -> Vec<Entry> {
        self.index.lock().entries(from, most)
    }

    fn tell_that_it_is_full(&self) {
        if !self.told.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "a ledger of {} entries is full, since objects are smaller than {BYTES_PER_SLOT} bytes on the average: \
                 what comes beyond them does not outlive this process",
                self.table.capacity()
            );
        }
    }

    /// Numbers.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let index = self.index.lock();
        Counts {
            entries: index.len() as u64,
            bytes: index.bytes(),
            damaged: self.damaged,
            unrecorded: self.unrecorded.load(Ordering::Relaxed),
        }
    }
}

impl Blank {
    /// Begins a segment.
    ///
    /// # Errors
    /// [`Error::Name`].
    pub fn start(self, identity: Identity) -> Result<Ledger, Error> {
        let identity = Identity { size: self.size, ..identity };
        let header = Header { generation: 1, boot: header::boot(), identity };
        // A process that dies here leaves no header, and the next one begins again.
        Header::erase(&self.table.memory)?;
        for slot in self.table.touched(&self.lock) {
            self.table.clear(slot);
        }
        fence(Ordering::SeqCst);
        header.write(&self.table.memory)?;
        Ok(self.ledger(header, Vec::new(), 0))
    }

    /// Goes on with what is there.
    fn resume(self, header: Header) -> Ledger {
        let mut records = Vec::new();
        let mut damaged = 0;
        for slot in self.table.touched(&self.lock) {
            match self.table.read(slot) {
                Slot::Free => {}
                Slot::Whole(record) if record.lies_in(self.size) => records.push((slot, record)),
                Slot::Whole(_) | Slot::Damaged => {
                    damaged += 1;
                    self.table.clear(slot);
                }
            }
        }
        // Entries of which one must be wrong: both go.
        records.sort_unstable_by_key(|(_, record)| record.offset);
        let mut whole: Vec<(u64, Record)> = Vec::with_capacity(records.len());
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

    fn ledger(self, header: Header, records: Vec<(u64, Record)>, damaged: u64) -> Ledger {
        Ledger {
            index: Mutex::new(Index::new(self.table.capacity(), records)),
            catalog: Mutex::default(),
            table: self.table,
            header: Mutex::new(header),
            size: self.size,
            damaged,
            unrecorded: AtomicU64::new(0),
            told: AtomicBool::new(false),
            lock: self.lock,
        }
    }
}

impl Writing<'_> {
    /// To be called after the last byte: enters the part, with the CRC-32C of its bytes.
    pub fn finish(self, crc: u32) -> Finished {
        let mut index = self.ledger.index.lock();
        // The bytes are there before the entry is.
        fence(Ordering::SeqCst);
        let finished = match index.end(self.id) {
            None => Finished::Overlapped,
            Some((_, 0)) => Finished::Recorded,
            Some((offset, len)) => {
                let record = Record { offset, len, crc };
                match index.enter(record) {
                    None => {
                        self.ledger.tell_that_it_is_full();
                        Finished::NoRoom
                    }
                    Some(slot) => {
                        self.ledger.table.publish(slot, record);
                        Finished::Recorded
                    }
                }
            }
        };
        if finished != Finished::Recorded {
            self.ledger.unrecorded.fetch_add(1, Ordering::Relaxed);
        }
        finished
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        // After `finish` there is nothing left to end.
        self.ledger.index.lock().end(self.id);
    }
}
