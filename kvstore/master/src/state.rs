//! All that the records of a log amount to.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use moongate_kvcore::{Effects, Fact, Master, Settings, SnapshotCursor};
use parking_lot::Mutex;

use crate::epochs::Epochs;
use crate::metadata::Entries;
use crate::record::{self, Record};
use crate::server::Server;

/// Places of the table that are looked at under one lock: some tens of microseconds.
pub(crate) const PLACES_AT_ONCE: u32 = 64;

/// What a log has beside the facts of the state machine.
#[derive(Debug, Default)]
pub struct Beside {
    /// Whose records they are.
    pub(crate) epochs: Mutex<Epochs>,
    /// The last number that a KV event may have.
    events: AtomicU64,
    /// Transfer metadata, if it is not kept elsewhere.
    pub(crate) metadata: Arc<Mutex<Entries>>,
}

impl Beside {
    /// Tells all of it as records, for a snapshot.
    pub(crate) fn tell(&self, mut each: impl FnMut(&[u8])) {
        each(&record::epochs(&self.epochs.lock()));
        each(&record::events(self.events()));
        self.metadata.lock().tell(|change| each(&record::metadata(change)));
    }

    /// Whether another master, or this one, has led with this state before the one that leads now.
    pub(crate) fn had_other_leaders(&self) -> bool {
        self.epochs.lock().iter().count() > 1
    }

    /// The last number that a KV event may have.
    pub(crate) fn events(&self) -> u64 {
        self.events.load(Relaxed)
    }

    /// KV events may have numbers up to this one.
    pub(crate) fn reserve_events(&self, bound: u64) {
        self.events.fetch_max(bound, Relaxed);
    }
}

/// A state, and the last record that it has.
#[derive(Debug)]
pub struct State {
    /// The state machine.
    pub master: Box<Master>,
    /// What there is beside it.
    pub beside: Arc<Beside>,
    /// The record's number.
    pub last: u64,
}

impl State {
    /// A state without any record.
    pub fn empty(settings: &Settings) -> Self {
        Self { master: Box::new(Master::new(settings.clone())), beside: Arc::default(), last: 0 }
    }

    /// The state of a server that serves nobody any more.
    pub(crate) fn of(server: Arc<Server>, beside: Arc<Beside>, last: u64) -> Self {
        let master = Arc::try_unwrap(server).map(Server::into_master);
        let master = master.unwrap_or_else(|still_used| {
            let copy = Applied(Master::new(still_used.master.settings().clone()));
            let (mut cursor, mut copy) = (Some(SnapshotCursor::default()), copy);
            while let Some(from) = cursor {
                cursor = still_used.master.snapshot(from, PLACES_AT_ONCE, &mut copy);
            }
            copy.0
        });
        Self { master: Box::new(master), beside, last }
    }

    /// Makes the next record true. Returns whether it fits: what does not is about something that is gone by now.
    pub(crate) fn next(&mut self, record: &[u8]) -> bool {
        self.last += 1;
        self.apply(record)
    }

    /// Makes a part of a snapshot true, or the record with the number [`Self::last`].
    pub(crate) fn apply(&self, record: &[u8]) -> bool {
        match record::read(record) {
            Some(Record::Fact(fact)) => self.master.apply(&fact).is_ok(),
            Some(Record::Epoch(id)) => {
                self.beside.epochs.lock().begin(id, self.last);
                true
            }
            Some(Record::Epochs(epochs)) => {
                *self.beside.epochs.lock() = epochs;
                true
            }
            Some(Record::Events(bound)) => {
                self.beside.reserve_events(bound);
                true
            }
            Some(Record::Metadata(change)) => {
                self.beside.metadata.lock().apply(change);
                true
            }
            None => false,
        }
    }

    /// By what another master may know that it has the same records.
    pub(crate) fn position(&self) -> Option<(u64, u64)> {
        self.beside.epochs.lock().current().map(|id| (id, self.last))
    }
}

/// Makes facts true at once. What does not fit is left out.
struct Applied(Master);

impl Effects for Applied {
    fn fact(&mut self, fact: Fact<'_>) {
        let _ = self.0.apply(&fact);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Journal as _, MemoryJournal};
    use crate::metadata::{Metadata, Put};
    use bytes::Bytes;

    #[test]
    fn what_is_beside_the_state_machine_comes_along() {
        let (leader, journal) = (State::empty(&Settings::default()), Arc::new(MemoryJournal::new(1 << 20)));
        leader.beside.epochs.lock().begin(7, journal.append(&record::epoch(7)));
        leader.beside.reserve_events(50);
        journal.append(&record::events(50));
        let metadata = Metadata::in_journal(Arc::clone(&leader.beside.metadata), journal.clone());
        for (key, value) in [("a", "1"), ("b/rpc_meta/x", "2"), ("a", "3"), ("gone", "4")] {
            assert_eq!(metadata.put(key, &Bytes::from(value)), Put::Updated);
        }
        assert!(metadata.delete("gone"));
        metadata.commit().unwrap();
        assert_eq!(metadata.put("b/rpc_meta/x", &Bytes::from("other")), Put::Duplicate);

        // From the records, and from a snapshot.
        let mut follower = State::empty(&Settings::default());
        journal.read(1, |_, record| assert!(follower.next(record)));
        let copy = State { last: follower.last, ..State::empty(&Settings::default()) };
        follower.beside.tell(|record| assert!(copy.apply(record)));
        for state in [follower, copy] {
            assert_eq!((state.position(), state.beside.events()), (Some((7, 7)), 50));
            let metadata = Metadata::in_journal(Arc::clone(&state.beside.metadata), journal.clone());
            assert_eq!((metadata.count(), metadata.get("a")), (2, Some(Bytes::from("3"))));
            // Its client may have been started anew meanwhile.
            assert_eq!(metadata.put("b/rpc_meta/x", &Bytes::from("other")), Put::Updated);
        }
    }
}
