//! Flushing the log and writing snapshots, on a thread of its own.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use moongate_master_core::{MasterCore, SnapshotCursor, StateChange, StateChangeSink, encode};
use moongate_oplog::{OplogError, snapshot};

use super::DurableJournal;
use crate::record;
use crate::state::{AuxState, SLOTS_PER_LOCK};

/// How often what is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PersistenceSchedule {
    /// Between two flushes of the log to the disk.
    pub flush_every: Duration,
    /// Between two snapshots.
    pub snapshot_every: Duration,
    /// Records after which a snapshot is written before its time, and without which none is written.
    pub snapshot_after_records: u64,
}

impl Default for PersistenceSchedule {
    fn default() -> Self {
        Self {
            flush_every: Duration::from_secs(1),
            snapshot_every: Duration::from_mins(10),
            snapshot_after_records: 2_000_000,
        }
    }
}

/// When the last snapshot was written, and whether saving fails.
#[derive(Debug)]
pub(crate) struct SnapshotProgress {
    last_snapshot_at: Instant,
    /// The last record that the snapshot has.
    last_record: u64,
    failing: bool,
}

/// Keeps a master's files short and flushed.
#[derive(Debug)]
pub struct StatePersister<'a> {
    durable: &'a DurableJournal,
    master: &'a MasterCore,
    aux: &'a AuxState,
    schedule: PersistenceSchedule,
}

impl<'a> StatePersister<'a> {
    /// A keeper of this master's files.
    pub fn new(
        durable: &'a DurableJournal,
        master: &'a MasterCore,
        aux: &'a AuxState,
        schedule: PersistenceSchedule,
    ) -> Self {
        Self { durable, master, aux, schedule }
    }

    /// Works until the other end of `stop` is dropped. A snapshot that is being written then is given up.
    pub fn run(&self, stop: &Receiver<()>) {
        let mut progress = self.progress();
        while stop.recv_timeout(self.schedule.flush_every) == Err(RecvTimeoutError::Timeout) {
            self.run_once(&mut progress, stop);
        }
    }

    /// The state before the first [`Self::run_once`].
    pub(crate) fn progress(&self) -> SnapshotProgress {
        SnapshotProgress {
            last_snapshot_at: Instant::now(),
            last_record: self.durable.log.oldest(),
            failing: false,
        }
    }

    /// What is due once every [`PersistenceSchedule::flush_every`].
    pub(crate) fn run_once(&self, progress: &mut SnapshotProgress, stop: &Receiver<()>) {
        let SnapshotProgress { last_snapshot_at: last, last_record: last_number, failing } = progress;
        let number = self.durable.log.next() - 1;
        let records = number.saturating_sub(*last_number);
        let due = records >= self.schedule.snapshot_after_records
            || (records > 0 && last.elapsed() >= self.schedule.snapshot_every);
        let done = self.durable.log.commit(number).and_then(|()| self.durable.log.flush());
        let done = done.and_then(|()| if due { self.snapshot_until(stop).map(drop) } else { Ok(()) });
        if due {
            (*last, *last_number) = (Instant::now(), number);
        }
        // Logged once, not every second.
        match done {
            Err(error) if !std::mem::replace(failing, true) => {
                tracing::error!(%error, "changes cannot be saved; new objects are refused until they can");
            }
            Ok(()) if std::mem::take(failing) => tracing::info!("changes are saved again"),
            _ => {}
        }
    }

    /// Writes a snapshot, and removes what is not needed any more. Returns how many facts it has.
    ///
    /// # Errors
    /// What the file system says. The snapshot before stays the newest.
    pub fn snapshot(&self) -> Result<u64, OplogError> {
        let (_running, stop) = std::sync::mpsc::channel();
        self.snapshot_until(&stop)
    }

    fn snapshot_until(&self, stop: &Receiver<()>) -> Result<u64, OplogError> {
        let DurableJournal { log, folder, .. } = self.durable;
        // All facts up to this one are true already: each is appended while what it is about is locked.
        let mut writer = snapshot::SnapshotWriter::begin(Arc::clone(folder), log.next() - 1)?;
        let (mut cursor, mut facts) = (Some(SnapshotCursor::default()), 0);
        let mut piece = SnapshotBatch::default();
        piece.append_aux_state(self.aux);
        while let Some(from) = cursor {
            if stop.try_recv() == Err(TryRecvError::Disconnected) {
                return Ok(facts);
            }
            cursor = self.master.snapshot(from, SLOTS_PER_LOCK, &mut piece);
            facts += piece.write(&mut writer)?;
        }
        // Its pieces are of different moments: what came in between must not be missing.
        let last = log.next() - 1;
        log.commit(last)?;
        log.flush()?;
        writer.write(&record::snapshot_needs(last))?;
        log.prune(writer.finish()?)?;
        Ok(facts)
    }
}

/// A part of a snapshot: records. They are written when nothing is locked.
pub(crate) struct SnapshotBatch {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Default for SnapshotBatch {
    fn default() -> Self {
        Self { bytes: Vec::new(), ends: vec![0] }
    }
}

impl SnapshotBatch {
    /// Puts in what there is beside the state machine.
    pub(crate) fn append_aux_state(&mut self, beside: &AuxState) {
        beside.for_each_record(|record| {
            self.bytes.extend_from_slice(record);
            self.ends.push(self.bytes.len());
        });
    }

    /// Writes what it has, and is empty then. Returns how many records that was.
    pub(crate) fn write(&mut self, writer: &mut snapshot::SnapshotWriter) -> Result<u64, OplogError> {
        let mut written = 0;
        for range in self.ends.windows(2) {
            writer.write(self.bytes.get(range[0]..range[1]).unwrap_or_default())?;
            written += 1;
        }
        self.bytes.clear();
        self.ends.truncate(1);
        Ok(written)
    }
}

impl StateChangeSink for SnapshotBatch {
    fn record(&mut self, fact: StateChange<'_>) {
        encode(&fact, &mut self.bytes);
        self.ends.push(self.bytes.len());
    }
}
