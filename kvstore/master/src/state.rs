//! All that the records of a log amount to.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use moongate_master_core::{MasterCore, MasterCoreOptions, SnapshotCursor, StateChange, StateChangeSink};
use parking_lot::Mutex;

use crate::epochs::EpochHistory;
use crate::metadata::MetadataTable;
use crate::record::{self, MasterLogRecord};
use crate::server::MasterServer;

/// Places of the table that are looked at under one lock: some tens of microseconds.
pub(crate) const SLOTS_PER_LOCK: u32 = 64;

/// What a log has beside the facts of the state machine.
#[derive(Debug, Default)]
pub struct AuxState {
    /// Whose records they are.
    pub(crate) epochs: Mutex<EpochHistory>,
    /// The last number that a KV event may have.
    events: AtomicU64,
    /// Transfer metadata, if it is not kept elsewhere.
    pub(crate) metadata: Arc<Mutex<MetadataTable>>,
}

impl AuxState {
    /// Tells all of it as records, for a snapshot.
    pub(crate) fn for_each_record(&self, mut each: impl FnMut(&[u8])) {
        each(&record::epochs(&self.epochs.lock()));
        each(&record::events(self.events()));
        self.metadata.lock().for_each_record(|change| each(&record::metadata(change)));
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
pub struct MasterState {
    /// The state machine.
    pub master: Box<MasterCore>,
    /// What there is beside it.
    pub aux: Arc<AuxState>,
    /// The record's number.
    pub last_record: u64,
}

impl MasterState {
    /// A state without any record.
    pub fn empty(settings: &MasterCoreOptions) -> Self {
        Self { master: Box::new(MasterCore::new(settings.clone())), aux: Arc::default(), last_record: 0 }
    }

    /// The state of a server that serves nobody any more.
    pub(crate) fn from_server(server: Arc<MasterServer>, aux: Arc<AuxState>, last_record: u64) -> Self {
        let master = Arc::try_unwrap(server).map(MasterServer::into_master);
        let master = master.unwrap_or_else(|still_used| {
            let copy = FactApplier(MasterCore::new(still_used.master.settings().clone()));
            let (mut cursor, mut copy) = (Some(SnapshotCursor::default()), copy);
            while let Some(from) = cursor {
                cursor = still_used.master.snapshot(from, SLOTS_PER_LOCK, &mut copy);
            }
            copy.0
        });
        Self { master: Box::new(master), aux, last_record }
    }

    /// Makes the next record true. Returns whether it fits: what does not is about something that is gone by now.
    pub(crate) fn apply_next(&mut self, record: &[u8]) -> bool {
        self.last_record += 1;
        self.apply(record)
    }

    /// Makes a part of a snapshot true, or the record with the number [`Self::last_record`].
    pub(crate) fn apply(&self, record: &[u8]) -> bool {
        match record::read(record) {
            Some(MasterLogRecord::Fact(fact)) => self.master.apply(&fact).is_ok(),
            Some(MasterLogRecord::Epoch(id)) => {
                self.aux.epochs.lock().begin(id, self.last_record);
                true
            }
            Some(MasterLogRecord::Epochs(epochs)) => {
                *self.aux.epochs.lock() = epochs;
                true
            }
            Some(MasterLogRecord::Events(bound)) => {
                self.aux.reserve_events(bound);
                true
            }
            Some(MasterLogRecord::Metadata(change)) => {
                self.aux.metadata.lock().apply(change);
                true
            }
            None => false,
        }
    }

    /// By what another master may know that it has the same records.
    pub(crate) fn position(&self) -> Option<(u64, u64)> {
        self.aux.epochs.lock().current().map(|id| (id, self.last_record))
    }
}

/// Makes facts true at once. What does not fit is left out.
struct FactApplier(MasterCore);

impl StateChangeSink for FactApplier {
    fn record(&mut self, fact: StateChange<'_>) {
        let _ = self.0.apply(&fact);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Journal as _, MemoryJournal};
    use crate::metadata::{MetadataPutOutcome, MetadataStore};
    use bytes::Bytes;

    #[test]
    fn what_is_beside_the_state_machine_comes_along() {
        let (leader, journal) =
            (MasterState::empty(&MasterCoreOptions::default()), Arc::new(MemoryJournal::new(1 << 20)));
        leader.aux.epochs.lock().begin(7, journal.append(&record::epoch(7)));
        leader.aux.reserve_events(50);
        journal.append(&record::events(50));
        let metadata = MetadataStore::in_journal(Arc::clone(&leader.aux.metadata), journal.clone());
        for (key, value) in [("a", "1"), ("b/rpc_meta/x", "2"), ("a", "3"), ("gone", "4")] {
            assert_eq!(metadata.put(key, &Bytes::from(value)), MetadataPutOutcome::Updated);
        }
        assert!(metadata.delete("gone"));
        metadata.commit().unwrap();
        assert_eq!(metadata.put("b/rpc_meta/x", &Bytes::from("other")), MetadataPutOutcome::Duplicate);

        // From the records, and from a snapshot.
        let mut follower = MasterState::empty(&MasterCoreOptions::default());
        journal.read(1, |_, record| assert!(follower.apply_next(record)));
        let copy = MasterState {
            last_record: follower.last_record,
            ..MasterState::empty(&MasterCoreOptions::default())
        };
        follower.aux.for_each_record(|record| assert!(copy.apply(record)));
        for state in [follower, copy] {
            assert_eq!((state.position(), state.aux.events()), (Some((7, 7)), 50));
            let metadata = MetadataStore::in_journal(Arc::clone(&state.aux.metadata), journal.clone());
            assert_eq!((metadata.count(), metadata.get("a")), (2, Some(Bytes::from("3"))));
            // Its client may have been started anew meanwhile.
            assert_eq!(metadata.put("b/rpc_meta/x", &Bytes::from("other")), MetadataPutOutcome::Updated);
        }
    }
}
