//! Thread that flushes the log and writes snapshots.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use moongate_master_core::{MasterCore, SnapshotCursor, StateChange, StateChangeSink, encode};
use moongate_oplog::{OplogError, snapshot};

use super::DurableJournal;
use crate::record;
use crate::state::{AuxState, SLOTS_PER_LOCK};

/// Intervals of flushes and snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PersistenceSchedule {
    /// Interval between two flushes of the log to disk.
    pub flush_every: Duration,
    pub snapshot_every: Duration,
    /// Number of records after which a snapshot is written early.
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

/// When the last snapshot was written, and whether writing fails.
#[derive(Debug)]
pub(crate) struct SnapshotProgress {
    last_snapshot_at: Instant,
    /// The last record that the snapshot contains.
    last_record: u64,
    failing: bool,
}

/// Flushes a master's log and shortens it with snapshots.
#[derive(Debug)]
pub struct StatePersister<'a> {
    durable: &'a DurableJournal,
    master: &'a MasterCore,
    aux: &'a AuxState,
    schedule: PersistenceSchedule,
}

impl<'a> StatePersister<'a> {
    /// A persister for this master's files.
    pub fn new(
        durable: &'a DurableJournal,
        master: &'a MasterCore,
        aux: &'a AuxState,
        schedule: PersistenceSchedule,
    ) -> Self {
        Self { durable, master, aux, schedule }
    }

    /// Runs until the sender of `stop` is dropped. A snapshot in progress is aborted.
    pub fn run(&self, stop: &Receiver<()>) {
        let mut progress = self.progress();
        while stop.recv_timeout(self.schedule.flush_every) == Err(RecvTimeoutError::Timeout) {
            self.run_once(&mut progress, stop);
        }
    }

    /// The progress before the first [`Self::run_once`].
    pub(crate) fn progress(&self) -> SnapshotProgress {
        SnapshotProgress {
            last_snapshot_at: Instant::now(),
            last_record: self.durable.log.oldest(),
            failing: false,
        }
    }

    /// Runs the tasks that are due, once every [`PersistenceSchedule::flush_every`].
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
        // Logged once per failure, not every second.
        match done {
            Err(error) if !std::mem::replace(failing, true) => {
                tracing::error!(%error, "cannot write the log; new objects are rejected until it is writable");
            }
            Ok(()) if std::mem::take(failing) => tracing::info!("the log is writable again"),
            _ => {}
        }
    }

    /// Writes a snapshot and removes obsolete files. Returns the number of its records.
    ///
    /// # Errors
    /// An error of the file system. The previous snapshot stays the newest.
    pub fn snapshot(&self) -> Result<u64, OplogError> {
        let (_running, stop) = std::sync::mpsc::channel();
        self.snapshot_until(&stop)
    }

    fn snapshot_until(&self, stop: &Receiver<()>) -> Result<u64, OplogError> {
        let DurableJournal { log, folder, .. } = self.durable;
        // Records up to this one are applied already: each is appended under the lock of the entry that it changes.
        let mut writer = snapshot::SnapshotWriter::begin(Arc::clone(folder), log.next() - 1)?;
        let (mut cursor, mut facts) = (Some(SnapshotCursor::default()), 0);
        let mut batch = SnapshotBatch::default();
        batch.append_aux_state(self.aux);
        while let Some(from) = cursor {
            if stop.try_recv() == Err(TryRecvError::Disconnected) {
                return Ok(facts);
            }
            cursor = self.master.snapshot(from, SLOTS_PER_LOCK, &mut batch);
            facts += batch.write(&mut writer)?;
        }
        // The batches are from different times, so the snapshot needs the log up to now.
        let last = log.next() - 1;
        log.commit(last)?;
        log.flush()?;
        writer.write(&record::snapshot_needs(last))?;
        log.prune(writer.finish()?)?;
        Ok(facts)
    }
}

/// Records of a snapshot, collected under a lock and written without one.
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
    /// Adds the records of the state outside the state machine.
    pub(crate) fn append_aux_state(&mut self, aux: &AuxState) {
        aux.for_each_record(|record| {
            self.bytes.extend_from_slice(record);
            self.ends.push(self.bytes.len());
        });
    }

    /// Writes and clears the batch. Returns the number of its records.
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
