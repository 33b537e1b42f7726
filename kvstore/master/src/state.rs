//! The state that the records of a log produce.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use moongate_master_core::{MasterCore, MasterCoreOptions};
use parking_lot::Mutex;

use crate::epochs::{EpochHistory, LogPosition};
use crate::metadata::MetadataTable;
use crate::record::{self, MasterLogRecord};

/// Table slots that are read under one lock: some tens of microseconds.
pub(crate) const SLOTS_PER_LOCK: u32 = 64;

/// State of a log outside the state machine.
#[derive(Debug, Default)]
pub struct AuxState {
    /// Epochs of the log's records.
    pub(crate) epochs: Mutex<EpochHistory>,
    /// The last number that a KV event may have.
    events: AtomicU64,
    /// Transfer metadata, unless it is stored separately.
    pub(crate) metadata: Arc<Mutex<MetadataTable>>,
}

impl AuxState {
    /// Passes the whole state as records to `each`, for a snapshot.
    pub(crate) fn for_each_record(&self, mut each: impl FnMut(&[u8])) {
        each(&record::epochs(&self.epochs.lock()));
        each(&record::events(self.events()));
        self.metadata.lock().for_each_record(|change| each(&record::metadata(change)));
    }

    /// Whether an earlier leader, another master or this one, has led with this state.
    pub(crate) fn had_other_leaders(&self) -> bool {
        self.epochs.lock().iter().count() > 1
    }

    /// Highest number reserved for KV events.
    pub(crate) fn events(&self) -> u64 {
        self.events.load(Relaxed)
    }

    /// Reserves KV event numbers up to this one.
    pub(crate) fn reserve_events(&self, bound: u64) {
        self.events.fetch_max(bound, Relaxed);
    }
}

/// A state and the number of its last record.
#[derive(Debug)]
pub struct MasterState {
    pub master: Box<MasterCore>,
    /// State outside the state machine.
    pub aux: Arc<AuxState>,
    pub last_record: u64,
}

impl MasterState {
    /// A state without any record.
    pub fn empty(settings: &MasterCoreOptions) -> Self {
        Self { master: Box::new(MasterCore::new(settings.clone())), aux: Arc::default(), last_record: 0 }
    }

    /// Applies the next record. Returns false if it does not apply because its object or segment is gone.
    pub(crate) fn apply_next(&mut self, record: &[u8]) -> bool {
        self.last_record += 1;
        self.apply(record)
    }

    /// Applies a record of a snapshot, or the record with the number [`Self::last_record`].
    pub(crate) fn apply(&self, record: &[u8]) -> bool {
        if record::is_aux(record) {
            self.apply_aux(record, self.last_record)
        } else {
            self.apply_fact(record)
        }
    }

    /// Applies a record of the state machine.
    pub(crate) fn apply_fact(&self, record: &[u8]) -> bool {
        matches!(record::read(record), Some(MasterLogRecord::Fact(fact)) if self.master.apply(&fact).is_ok())
    }

    /// Applies a record outside the state machine, with its number in the log.
    pub(crate) fn apply_aux(&self, record: &[u8], number: u64) -> bool {
        match record::read(record) {
            Some(MasterLogRecord::Epoch(id)) => self.aux.epochs.lock().begin(id, number),
            Some(MasterLogRecord::Epochs(epochs)) => *self.aux.epochs.lock() = epochs,
            Some(MasterLogRecord::Events(bound)) => self.aux.reserve_events(bound),
            Some(MasterLogRecord::Metadata(change)) => self.aux.metadata.lock().apply(change),
            Some(MasterLogRecord::Fact(_)) | None => return false,
        }
        true
    }

    /// The last record, for comparison with other masters' logs.
    pub(crate) fn position(&self) -> Option<LogPosition> {
        self.aux.epochs.lock().current().map(|epoch| LogPosition { epoch, number: self.last_record })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Journal as _, MemoryJournal};
    use crate::metadata::{MetadataPutOutcome, MetadataStore};
    use bytes::Bytes;

    #[test]
    fn aux_state_is_restored_from_records_and_snapshots() {
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

        // Once from the records, and once from a snapshot.
        let mut follower = MasterState::empty(&MasterCoreOptions::default());
        journal.read(1, |_, record| assert!(follower.apply_next(record)));
        let copy = MasterState {
            last_record: follower.last_record,
            ..MasterState::empty(&MasterCoreOptions::default())
        };
        follower.aux.for_each_record(|record| assert!(copy.apply(record)));
        for state in [follower, copy] {
            assert_eq!(
                (state.position(), state.aux.events()),
                (Some(LogPosition { epoch: 7, number: 7 }), 50)
            );
            let metadata = MetadataStore::in_journal(Arc::clone(&state.aux.metadata), journal.clone());
            assert_eq!((metadata.count(), metadata.get("a")), (2, Some(Bytes::from("3"))));
            // The client may have been restarted meanwhile.
            assert_eq!(metadata.put("b/rpc_meta/x", &Bytes::from("other")), MetadataPutOutcome::Updated);
        }
    }
}
