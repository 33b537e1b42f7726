//! Where facts go: every change of the state, numbered in the order in which it became true.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use moongate_master_core::{ReplicaLocation, StateChange, StateChangeSink};
use parking_lot::Mutex;

use crate::durable::RecoveryOutcome;
use crate::object_feed::ObjectFeed;

/// Takes encoded facts. One is appended while the part of the state that it is about is locked, so appending must be
/// quick; waiting belongs into [`Journal::commit`].
pub trait Journal: Send + Sync + 'static {
    /// Takes a fact and returns its number. Numbers begin at 1 and have no gaps.
    fn append(&self, fact: &[u8]) -> u64;

    /// [`Journal::append`] for who wants to see the fact itself too.
    fn append_fact(&self, fact: &StateChange<'_>, encoded: &[u8]) -> u64 {
        let _ = fact;
        self.append(encoded)
    }

    /// Returns when the fact with this number, and all before it, will survive whatever the journal promises to
    /// survive.
    ///
    /// # Errors
    /// When that cannot be had. Then nobody may be told that the change was made.
    fn commit(&self, number: u64) -> io::Result<()>;

    /// Whether callers may be answered at all. Asked before every answer, even if nothing was changed.
    ///
    /// # Errors
    /// When another may decide by now.
    fn may_reply(&self) -> io::Result<()> {
        Ok(())
    }

    /// Whether a change that is made now can probably be kept. Asked before every change, so it must be quick.
    fn may_write(&self) -> bool {
        true
    }

    /// How the disk is that facts are written to, if they are.
    fn storage(&self) -> Option<DataDirStatus> {
        None
    }
}

/// How the disk is that a state is kept on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataDirStatus {
    /// The folder.
    pub path: PathBuf,
    /// Why changes cannot be written, if they cannot.
    pub failure: Option<String>,
    /// Bytes that can still be written, if the file system reports them.
    pub free_bytes: Option<u64>,
    /// What the start found of the state before.
    pub recovery: RecoveryOutcome,
}

/// Bytes of facts that are kept together.
const CHUNK: usize = 64 * 1024;

/// Keeps the newest facts in memory. They survive nothing, so a commit has nothing to wait for.
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
    /// Where each fact ends.
    ends: Vec<usize>,
}

impl MemoryJournal {
    /// A journal that keeps about the newest `capacity` bytes of facts.
    pub fn new(capacity: usize) -> Self {
        Self::starting_at(1, capacity)
    }

    /// The same, with another number for its first fact.
    pub fn starting_at(next: u64, capacity: usize) -> Self {
        Self { buffer: Mutex::new(JournalBuffer { next, chunks: VecDeque::new() }), capacity }
    }

    /// The number that the next fact will get.
    pub fn next(&self) -> u64 {
        self.buffer.lock().next
    }

    /// Does something with the number that the next fact will get, while none is appended.
    pub(crate) fn with_next<T>(&self, act: impl FnOnce(u64) -> T) -> T {
        act(self.buffer.lock().next)
    }

    /// [`Journal::append`]. What `also` does happens in the order of the numbers, too.
    pub(crate) fn append_and(&self, fact: &[u8], also: impl FnOnce()) -> u64 {
        let mut kept = self.buffer.lock();
        if let Some(chunk) = kept.chunk(self.capacity, fact.len()) {
            chunk.bytes.extend_from_slice(fact);
            chunk.ends.push(chunk.bytes.len());
        }
        kept.next += 1;
        also();
        kept.next - 1
    }

    /// Hands the facts from `number` on to `each`, in order, about 64 KiB at most. Returns the number to go on with, or
    /// nothing if `number` is not kept any more.
    pub fn read(&self, number: u64, mut each: impl FnMut(u64, &[u8])) -> Option<u64> {
        let kept = self.buffer.lock();
        if number >= kept.next {
            return Some(kept.next);
        }
        let at = kept.chunks.partition_point(|chunk| chunk.first <= number).checked_sub(1)?;
        let chunk = kept.chunks.get(at)?;
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
    /// A chunk with room, made out of the oldest one if there are enough. It need not grow, unless a fact is longer than a chunk.
    fn chunk(&mut self, capacity: usize, fact: usize) -> Option<&mut JournalChunk> {
        let full = self.chunks.back().is_none_or(|last| last.bytes.len() + fact > CHUNK);
        if full {
            let mut new =
                JournalChunk { first: self.next, bytes: Vec::with_capacity(CHUNK), ends: Vec::new() };
            if self.chunks.len() * CHUNK >= capacity
                && let Some(JournalChunk { bytes, ends, .. }) = self.chunks.pop_front()
            {
                (new.bytes, new.ends) = (bytes, ends);
                new.bytes.clear();
                new.ends.clear();
            }
            self.chunks.push_back(new);
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

/// Encodes facts into a journal, and remembers what has to be committed before anybody is told.
pub struct FactRecorder {
    journal: Arc<dyn Journal>,
    feed: Option<Arc<ObjectFeed>>,
    encoded: Vec<u8>,
    last_uncommitted: Option<u64>,
}

impl FactRecorder {
    /// A recorder that has nothing to commit.
    pub fn new(journal: Arc<dyn Journal>) -> Self {
        Self { journal, feed: None, encoded: Vec::new(), last_uncommitted: None }
    }

    /// One that reports what lies in segments, too.
    pub(crate) fn with_feed(journal: Arc<dyn Journal>, feed: Arc<ObjectFeed>) -> Self {
        Self { feed: Some(feed), ..Self::new(journal) }
    }

    /// Waits until what was recorded since the last time is committed.
    ///
    /// # Errors
    /// As [`Journal::commit`].
    pub fn commit(&mut self) -> io::Result<()> {
        self.last_uncommitted
            .take()
            .map_or_else(|| self.journal.may_reply(), |last| self.journal.commit(last))
    }

    /// Drops the commit of what was recorded: no reply depends on it.
    pub(crate) fn discard_pending(&mut self) {
        self.last_uncommitted = None;
    }

    /// [`Self::commit`] for another thread; none if nothing was recorded.
    pub fn take_commit(&mut self) -> Option<impl FnOnce() -> io::Result<()> + Send + use<>> {
        let (last, journal) = (self.last_uncommitted.take()?, Arc::clone(&self.journal));
        Some(move || journal.commit(last))
    }
}

impl StateChangeSink for FactRecorder {
    fn record(&mut self, fact: StateChange<'_>) {
        self.encoded.clear();
        moongate_master_core::encode(&fact, &mut self.encoded);
        self.last_uncommitted = Some(self.journal.append_fact(&fact, &self.encoded));
        if let Some(feed) = &self.feed {
            feed.observe(&fact);
        }
    }

    fn range_vacated(&mut self, place: ReplicaLocation) {
        if let Some(feed) = &self.feed {
            feed.vacated(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_come_back_in_order_and_the_oldest_are_forgotten() {
        let journal = MemoryJournal::new(3 * CHUNK);
        let fact = |number: u64| vec![number as u8; 1000];
        for number in 1..=1000 {
            assert_eq!(journal.append(&fact(number)), number);
        }
        assert_eq!(journal.next(), 1001);
        assert_eq!(journal.read(1, |_, _| panic!("forgotten")), None);
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
        assert_eq!(journal.read(next, |_, _| panic!("there is nothing yet")), Some(1001));
        assert_eq!(journal.read(999, |number, _| assert!(number >= 999)), Some(1001));
    }
}
