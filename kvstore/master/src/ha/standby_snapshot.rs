//! Snapshots of a state that follows a leader: written a little at a time, between two acknowledgements.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use moongate_master_core::SnapshotCursor;
use moongate_oplog::{OplogError, snapshot};

use crate::durable::{DurableJournal, PersistenceSchedule, SnapshotBatch};
use crate::record;
use crate::state::{MasterState, SLOTS_PER_LOCK};

/// Parts of a snapshot that are written at a time: some milliseconds.
const PARTS_AT_ONCE: usize = 128;

/// A snapshot on its way.
#[derive(Debug)]
enum InFlightSnapshot {
    /// Parts are being written.
    Writing(snapshot::SnapshotWriter, SnapshotCursor),
    /// It is being flushed. Tells from which record on the log is still needed.
    Flushing(JoinHandle<Result<u64, OplogError>>),
}

/// When snapshots are written.
#[derive(Debug)]
pub(super) struct StandbySnapshotter {
    snapshot: Option<InFlightSnapshot>,
    /// When the last one was begun, and the last record then.
    last: (Instant, u64),
}

impl StandbySnapshotter {
    /// A log whose last snapshot has this record.
    pub(super) fn new(number: u64) -> Self {
        Self { snapshot: None, last: (Instant::now(), number) }
    }

    /// Does a little of what is due.
    pub(super) fn poll(
        &mut self,
        durable: &Arc<DurableJournal>,
        state: &MasterState,
        pace: PersistenceSchedule,
    ) {
        let done = match self.snapshot.take() {
            None if self.is_due(state, pace) => {
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
            Err(error) => tracing::error!(%error, "a snapshot cannot be written"),
        }
    }

    fn is_due(&self, state: &MasterState, pace: PersistenceSchedule) -> bool {
        let (begun, number) = self.last;
        let records = state.last_record.saturating_sub(number);
        records >= pace.snapshot_after_records || records > 0 && begun.elapsed() >= pace.snapshot_every
    }

    /// Gives up what is being written. Another may write snapshots afterwards.
    pub(super) fn abort(&mut self) {
        if let Some(InFlightSnapshot::Flushing(thread)) = self.snapshot.take() {
            let _ = thread.join();
        }
    }
}

fn begin(durable: &DurableJournal, state: &MasterState) -> Result<InFlightSnapshot, OplogError> {
    let mut writer = snapshot::SnapshotWriter::begin(Arc::clone(durable.folder()), state.last_record)?;
    let mut piece = SnapshotBatch::default();
    piece.append_aux_state(&state.aux);
    piece.write(&mut writer)?;
    Ok(InFlightSnapshot::Writing(writer, SnapshotCursor::default()))
}

fn write_parts(
    durable: &Arc<DurableJournal>,
    state: &MasterState,
    mut writer: snapshot::SnapshotWriter,
    mut from: SnapshotCursor,
) -> Result<InFlightSnapshot, OplogError> {
    let mut piece = SnapshotBatch::default();
    for _ in 0..PARTS_AT_ONCE {
        let next = state.master.snapshot(from, SLOTS_PER_LOCK, &mut piece);
        piece.write(&mut writer)?;
        let Some(next) = next else {
            // Its parts are of different moments: what came in between must not be missing.
            durable.log().commit(state.last_record)?;
            let path = durable.folder().path().to_owned();
            writer.write(&record::snapshot_needs(state.last_record))?;
            let kept = Arc::clone(durable);
            let finish = move || kept.log().flush().and_then(|()| writer.finish());
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
