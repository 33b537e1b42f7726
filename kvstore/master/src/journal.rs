//! Journal of a master: every change of the state as a numbered record.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;

use moongate_master_core::StateChange;
use parking_lot::Mutex;

use crate::recovery::RecoveryOutcome;

/// Accepts encoded changes. A change is appended under the lock of the entry that it changes, so appending must be fast;
/// waiting belongs in [`Journal::commit`].
pub trait Journal: Send + Sync + 'static {
    /// Appends a record and returns its number. Numbers start at 1 and have no gaps.
    fn append(&self, fact: &[u8]) -> u64;

    /// [`Journal::append`] for implementations that also need the decoded change.
    fn append_fact(&self, fact: &StateChange<'_>, encoded: &[u8]) -> u64 {
        let _ = fact;
        self.append(encoded)
    }

    /// Waits until the record with this number, and all earlier ones, are as durable as the journal promises.
    ///
    /// # Errors
    /// The record could not be made durable. The change must not be confirmed to a client.
    fn commit(&self, number: u64) -> io::Result<()>;

    /// Whether replies are allowed. Checked before every reply, even without a change.
    ///
    /// # Errors
    /// Another master may be the leader by now.
    fn may_reply(&self) -> io::Result<()> {
        Ok(())
    }

    /// Whether a change can probably be persisted. Checked before every change, so it must be fast.
    fn may_write(&self) -> bool {
        true
    }

    /// Status of the data directory, if the journal has one.
    fn storage(&self) -> Option<DataDirStatus> {
        None
    }
}

/// Status of the data directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataDirStatus {
    pub path: PathBuf,
    /// Error of the last failed write, while writes fail.
    pub failure: Option<String>,
    /// Free bytes, if the file system reports them.
    pub free_bytes: Option<u64>,
    /// Result of the recovery at the start.
    pub recovery: RecoveryOutcome,
}

/// Size of a chunk of records in bytes.
const CHUNK: usize = 64 * 1024;

/// Buffers the newest records in memory. They are not persistent, so a commit returns at once.
#[derive(Debug)]
pub struct MemoryJournal {
    buffer: Mutex<JournalBuffer>,
    capacity: usize,
}

#[derive(Debug)]
struct JournalBuffer {
    next: u64,
    chunks: VecDeque<JournalChunk>,
}

#[derive(Debug)]
struct JournalChunk {
    first: u64,
    bytes: Vec<u8>,
    /// End offset of each record.
    ends: Vec<usize>,
}

impl MemoryJournal {
    /// A journal that buffers about the newest `capacity` bytes of records.
    pub fn new(capacity: usize) -> Self {
        Self::starting_at(1, capacity)
    }

    /// [`MemoryJournal::new`] with another number for the first record.
    pub fn starting_at(next: u64, capacity: usize) -> Self {
        Self { buffer: Mutex::new(JournalBuffer { next, chunks: VecDeque::new() }), capacity }
    }

    /// The number of the next record.
    pub fn next(&self) -> u64 {
        self.buffer.lock().next
    }

    /// Calls `act` with the number of the next record, while none can be appended.
    pub(crate) fn with_next<T>(&self, act: impl FnOnce(u64) -> T) -> T {
        act(self.buffer.lock().next)
    }

    /// [`Journal::append`] that calls `also` in the order of the numbers.
    pub(crate) fn append_and(&self, fact: &[u8], also: impl FnOnce()) -> u64 {
        let mut buffer = self.buffer.lock();
        if let Some(chunk) = buffer.chunk(self.capacity, fact.len()) {
            chunk.bytes.extend_from_slice(fact);
            chunk.ends.push(chunk.bytes.len());
        }
        buffer.next += 1;
        also();
        buffer.next - 1
    }

    /// Passes the records from `number` on to `each`, in order, about 64 KiB at most. Returns the number to continue with, or
    /// `None` if `number` was evicted.
    pub fn read(&self, number: u64, mut each: impl FnMut(u64, &[u8])) -> Option<u64> {
        let buffer = self.buffer.lock();
        if number >= buffer.next {
            return Some(buffer.next);
        }
        let index = buffer.chunks.partition_point(|chunk| chunk.first <= number).checked_sub(1)?;
        let chunk = buffer.chunks.get(index)?;
        let mut start = 0;
        for (fact, end) in (chunk.first..).zip(&chunk.ends) {
            if fact >= number {
                each(fact, chunk.bytes.get(start..*end).unwrap_or_default());
            }
            start = *end;
        }
        Some(chunk.first + chunk.ends.len() as u64)
    }
}

impl JournalBuffer {
    /// A chunk with free space; beyond the capacity the oldest one is reused. It only grows if a record is longer than a chunk.
    fn chunk(&mut self, capacity: usize, fact: usize) -> Option<&mut JournalChunk> {
        let full = self.chunks.back().is_none_or(|last| last.bytes.len() + fact > CHUNK);
        if full {
            let mut chunk =
                JournalChunk { first: self.next, bytes: Vec::with_capacity(CHUNK), ends: Vec::new() };
            if self.chunks.len() * CHUNK >= capacity
                && let Some(JournalChunk { bytes, ends, .. }) = self.chunks.pop_front()
            {
                (chunk.bytes, chunk.ends) = (bytes, ends);
                chunk.bytes.clear();
                chunk.ends.clear();
            }
            self.chunks.push_back(chunk);
        }
        self.chunks.back_mut()
    }
}

impl Journal for MemoryJournal {
    fn append(&self, fact: &[u8]) -> u64 {
        self.append_and(fact, || {})
    }

    fn commit(&self, _: u64) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_in_order_and_the_oldest_are_evicted() {
        let journal = MemoryJournal::new(3 * CHUNK);
        let fact = |number: u64| vec![number as u8; 1000];
        for number in 1..=1000 {
            assert_eq!(journal.append(&fact(number)), number);
        }
        assert_eq!(journal.next(), 1001);
        assert_eq!(journal.read(1, |_, _| panic!("evicted")), None);
        let mut next = journal.buffer.lock().chunks.front().unwrap().first;
        assert!((700..=900).contains(&next), "{next}");
        while next < 1001 {
            let mut expected = next;
            let after = journal.read(next, |number, bytes| {
                assert_eq!((number, bytes), (expected, &fact(number)[..]));
                expected += 1;
            });
            assert_eq!(after, Some(expected));
            next = expected;
        }
        assert_eq!(journal.read(next, |_, _| panic!("no record yet")), Some(1001));
        assert_eq!(journal.read(999, |number, _| assert!(number >= 999)), Some(1001));
    }
}
