//! Snapshots of a state that follows a leader: written a little at a time, between two acknowledgements.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use moongate_kvcore::SnapshotCursor;
use moongate_oplog::{Error, snapshot};

use crate::durable::{Durable, Pace, Piece};
use crate::record;
use crate::state::{PLACES_AT_ONCE, State};

/// Parts of a snapshot that are written at a time: some milliseconds.
const PARTS_AT_ONCE: usize = 128;

/// A snapshot on its way.
#[derive(Debug)]
enum Snapshot {
    /// Parts are being written.
    Writing(snapshot::Writer, SnapshotCursor),
    /// It is being flushed. Tells from which record on the log is still needed.
    Flushing(JoinHandle<Result<u64, Error>>),
}

/// When snapshots are written.
#[derive(Debug)]
pub(super) struct Tending {
    snapshot: Option<Snapshot>,
    /// When the last one was begun, and the last record then.
    last: (Instant, u64),
}

impl Tending {
    /// A log whose last snapshot has this record.
    pub(super) fn new(number: u64) -> Self {
        Self { snapshot: None, last: (Instant::now(), number) }
    }

    /// Does a little of what is due.
    pub(super) fn tend(&mut self, durable: &Arc<Durable>, state: &State, pace: Pace) {
        let done = match self.snapshot.take() {
            None if self.is_due(state, pace) => {
                self.last = (Instant::now(), state.last);
                begin(durable, state).map(Some)
            }
            None => Ok(None),
            Some(Snapshot::Writing(writer, from)) => go_on(durable, state, writer, from).map(Some),
            Some(Snapshot::Flushing(thread)) if thread.is_finished() => {
                finish(durable, thread).map(|()| None)
            }
            Some(flushing) => Ok(Some(flushing)),
        };
        match done {
            Ok(snapshot) => self.snapshot = snapshot,
            Err(error) => tracing::error!(%error, "a snapshot cannot be written"),
        }
    }

    fn is_due(&self, state: &State, pace: Pace) -> bool {
        let (begun, number) = self.last;
        let records = state.last.saturating_sub(number);
        records >= pace.records || records > 0 && begun.elapsed() >= pace.snapshot_every
    }

    /// Gives up what is being written. Another may write snapshots afterwards.
    pub(super) fn rest(&mut self) {
        if let Some(Snapshot::Flushing(thread)) = self.snapshot.take() {
            let _ = thread.join();
        }
    }
}

fn begin(durable: &Durable, state: &State) -> Result<Snapshot, Error> {
    let mut writer = snapshot::Writer::begin(Arc::clone(durable.folder()), state.last)?;
    let mut piece = Piece::default();
    piece.tell_beside(&state.beside);
    piece.write(&mut writer)?;
    Ok(Snapshot::Writing(writer, SnapshotCursor::default()))
}

fn go_on(
    durable: &Arc<Durable>,
    state: &State,
    mut writer: snapshot::Writer,
    mut from: SnapshotCursor,
) -> Result<Snapshot, Error> {
    let mut piece = Piece::default();
    for _ in 0..PARTS_AT_ONCE {
        let next = state.master.snapshot(from, PLACES_AT_ONCE, &mut piece);
        piece.write(&mut writer)?;
        let Some(next) = next else {
            // Its parts are of different moments: what came in between must not be missing.
            durable.log().commit(state.last)?;
            let path = durable.folder().path().to_owned();
            writer.write(&record::snapshot_needs(state.last))?;
            let kept = Arc::clone(durable);
            let finish = move || kept.log().flush().and_then(|()| writer.finish());
            let thread = std::thread::Builder::new().name("snapshot".to_owned()).spawn(finish);
            return thread.map(Snapshot::Flushing).map_err(|problem| Error::Io { path, problem });
        };
        from = next;
    }
    Ok(Snapshot::Writing(writer, from))
}

fn finish(durable: &Durable, thread: JoinHandle<Result<u64, Error>>) -> Result<(), Error> {
    thread.join().map_or(Ok(()), |needed| durable.log().prune(needed?))
}
