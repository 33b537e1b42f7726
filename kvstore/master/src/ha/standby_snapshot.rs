//! Snapshots of a standby's state: written in small steps between two acknowledgements.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use moongate_master_core::SnapshotCursor;
use moongate_oplog::{OplogError, snapshot};

use crate::durable::{DurableJournal, PersistenceSchedule, SnapshotBatch};
use crate::record;
use crate::state::{MasterState, SLOTS_PER_LOCK};

/// Parts of a snapshot per step, which takes some milliseconds.
const PARTS_AT_ONCE: usize = 128;

/// A snapshot that is being written.
#[derive(Debug)]
enum InFlightSnapshot {
    /// Parts are still being written.
    Writing(snapshot::SnapshotWriter, SnapshotCursor),
    /// Being flushed. The thread returns the first record that the log still needs.
    Flushing(JoinHandle<Result<u64, OplogError>>),
}

#[derive(Debug)]
pub(super) struct StandbySnapshotter {
    snapshot: Option<InFlightSnapshot>,
    /// Start time of the last snapshot, and its last record.
    last: (Instant, u64),
}

impl StandbySnapshotter {
    /// For a log whose last snapshot ends with the record `number`.
    pub(super) fn new(number: u64) -> Self {
        Self { snapshot: None, last: (Instant::now(), number) }
    }

    /// Runs the next step that is due.
    pub(super) fn poll(
        &mut self,
        durable: &Arc<DurableJournal>,
        state: &MasterState,
        schedule: PersistenceSchedule,
    ) {
        let done = match self.snapshot.take() {
            None if self.is_due(state, schedule) => {
                self.last = (Instant::now(), state.last_record);
                begin(durable, state).map(Some)
            }
            None => Ok(None),
            Some(InFlightSnapshot::Writing(writer, from)) => {
                write_parts(durable, state, writer, from).map(Some)
            }
            Some(InFlightSnapshot::Flushing(thread)) if thread.is_finished() => {
                finish(durable, thread).map(|()| None)
            }
            Some(flushing) => Ok(Some(flushing)),
        };
        match done {
            Ok(snapshot) => self.snapshot = snapshot,
            Err(error) => tracing::error!(%error, "cannot write a snapshot"),
        }
    }

    fn is_due(&self, state: &MasterState, schedule: PersistenceSchedule) -> bool {
        let (started, number) = self.last;
        let records = state.last_record.saturating_sub(number);
        records >= schedule.snapshot_after_records
            || records > 0 && started.elapsed() >= schedule.snapshot_every
    }

    /// Aborts the current snapshot. Another thread may write snapshots afterwards.
    pub(super) fn abort(&mut self) {
        if let Some(InFlightSnapshot::Flushing(thread)) = self.snapshot.take() {
            let _ = thread.join();
        }
    }
}

fn begin(durable: &DurableJournal, state: &MasterState) -> Result<InFlightSnapshot, OplogError> {
    let mut writer = snapshot::SnapshotWriter::begin(Arc::clone(durable.folder()), state.last_record)?;
    let mut batch = SnapshotBatch::default();
    batch.append_aux_state(&state.aux);
    batch.write(&mut writer)?;
    Ok(InFlightSnapshot::Writing(writer, SnapshotCursor::default()))
}

fn write_parts(
    durable: &Arc<DurableJournal>,
    state: &MasterState,
    mut writer: snapshot::SnapshotWriter,
    mut from: SnapshotCursor,
) -> Result<InFlightSnapshot, OplogError> {
    let mut batch = SnapshotBatch::default();
    for _ in 0..PARTS_AT_ONCE {
        let next = state.master.snapshot(from, SLOTS_PER_LOCK, &mut batch);
        batch.write(&mut writer)?;
        let Some(next) = next else {
            // The parts are from different times, so the snapshot needs the log up to now.
            durable.log().commit(state.last_record)?;
            let path = durable.folder().path().to_owned();
            writer.write(&record::snapshot_needs(state.last_record))?;
            let journal = Arc::clone(durable);
            let finish = move || journal.log().flush().and_then(|()| writer.finish());
            let thread = std::thread::Builder::new().name("snapshot".to_owned()).spawn(finish);
            return thread
                .map(InFlightSnapshot::Flushing)
                .map_err(|problem| OplogError::Io { path, problem });
        };
        from = next;
    }
    Ok(InFlightSnapshot::Writing(writer, from))
}

fn finish(durable: &DurableJournal, thread: JoinHandle<Result<u64, OplogError>>) -> Result<(), OplogError> {
    thread.join().map_or(Ok(()), |needed| durable.log().prune(needed?))
}
