//! Persistent state of a master: its changes are logged, and snapshots of the whole state are written regularly.
//!
//! A change is confirmed to a client only after its record is in the log ([`Journal::commit`]). [`DurableJournal::open`] applies the last
//! snapshot to a new master, then the later records of the log. After a machine crash the log may lack its last records, and one of them
//! could have given an object's memory to another object; where that is possible
//! ([`moongate_oplog::LogRecoveryReport::may_lack_records`]), the master starts without objects. If files are damaged, it starts with the objects
//! that can be verified. [`RestoreReport::recovery`] reports which of these happened.

mod parallel_replay;
mod persister;
mod restore;
mod salvage;
mod shard_marker;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use moongate_master_core::MasterCoreOptions;
use moongate_oplog::{LogDirectory, LogFiles, OperationLog, OplogError, OplogOptions, snapshot};
use parking_lot::Mutex;

use crate::journal::{DataDirStatus, Journal};
use crate::recovery::{RecoveryOutcome, StateDamage};
use crate::state::MasterState;

pub(crate) use parallel_replay::ReplayThreads;
pub(crate) use persister::SnapshotBatch;
pub use persister::{PersistenceSchedule, StatePersister};
pub use restore::{LoadedState, RestoreReport, RestoredJournal};
pub use shard_marker::ShardMarkerError;
pub(crate) use shard_marker::mark_folder;

/// Maximum size of records that a failing disk has not stored, in bytes. Beyond it, no call gets a reply.
const MAX_UNFLUSHED_BYTES: usize = 64 << 20;

/// File that marks a folder as that of a master in HA mode, and identifies it.
pub(crate) const MEMBER_FILE: &str = "member";

/// Settings of the persistent state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataDirOptions {
    /// Directory of the log and the snapshots.
    pub folder: PathBuf,
    /// Whether a change must be on disk before its caller gets a reply.
    pub flush_always: bool,
    pub snapshot_every: Duration,
}

impl DataDirOptions {
    /// Snapshots at the configured interval.
    pub(crate) fn schedule(&self) -> PersistenceSchedule {
        PersistenceSchedule { snapshot_every: self.snapshot_every, ..PersistenceSchedule::default() }
    }
}

/// The log and the snapshots of one master.
#[derive(Debug)]
pub struct DurableJournal {
    log: OperationLog,
    folder: Arc<LogDirectory>,
    /// Result of the recovery at the start.
    recovery: RecoveryOutcome,
    /// Error of the last failed write; `None` after a success.
    failure: Mutex<Option<String>>,
}

impl DurableJournal {
    /// Opens a folder and builds the master from it, ready to serve from `now_ms` on.
    ///
    /// # Errors
    /// The folder cannot be used. Damaged files are no error: [`RestoreReport::recovery`] reports them.
    pub fn open(
        path: &Path,
        options: OplogOptions,
        settings: &MasterCoreOptions,
        now_ms: u64,
    ) -> Result<RestoredJournal, OplogError> {
        Self::open_in(Arc::new(LogDirectory::lock(path)?), options, settings, now_ms)
    }

    /// [`Self::open`] for a folder that is already locked.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_in(
        folder: Arc<LogDirectory>,
        options: OplogOptions,
        settings: &MasterCoreOptions,
        now_ms: u64,
    ) -> Result<RestoredJournal, OplogError> {
        let RestoredJournal { journal: mut durable, state, report: mut restored } =
            match Self::load_from(Arc::clone(&folder), options.clone(), settings)? {
                LoadedState::Complete(loaded) => *loaded,
                LoadedState::Partial(loaded) => {
                    salvage::silence_clients(&loaded.state, now_ms);
                    *loaded
                }
                LoadedState::MachineDied(damage) => {
                    let recovery = match damage {
                        None => RecoveryOutcome::MachineDied,
                        Some(damage) => RecoveryOutcome::Damaged(StateDamage {
                            preserved_at: Some(folder.preserve()?),
                            ..damage
                        }),
                    };
                    RestoredJournal {
                        journal: Self::begin_in(folder, options.clone(), 1)?,
                        state: MasterState::empty(settings),
                        report: RestoreReport { recovery, ..RestoreReport::default() },
                    }
                }
            };
        state.master.finish_replay(now_ms, &ReplayThreads::default());
        if let RecoveryOutcome::Damaged(damage) | RecoveryOutcome::IntactDespiteDamage(damage) =
            &mut restored.recovery
            && damage.preserved_at.is_none()
        {
            durable = durable.rewrite_snapshot(&state, options, damage)?;
        }
        restored.log_losses(durable.folder.path());
        durable.recovery = restored.recovery.clone();
        Ok(RestoredJournal { journal: durable, state, report: restored })
    }

    /// Opens a folder and builds a state to which further records can be applied until
    /// [`MasterCore::finish_replay`](moongate_master_core::MasterCore::finish_replay).
    ///
    /// # Errors
    /// The folder cannot be used. Damaged files are no error.
    pub fn load(
        path: &Path,
        options: OplogOptions,
        settings: &MasterCoreOptions,
    ) -> Result<LoadedState, OplogError> {
        Self::load_from(Arc::new(LogDirectory::lock(path)?), options, settings)
    }

    fn load_from(
        folder: Arc<LogDirectory>,
        options: OplogOptions,
        settings: &MasterCoreOptions,
    ) -> Result<LoadedState, OplogError> {
        let files = LogFiles::read(&folder, &options)?;
        if files.may_lack_records(&options) {
            return Ok(LoadedState::MachineDied(files.damage().map(StateDamage::from)));
        }
        let (log, opened) = OperationLog::open_read(Arc::clone(&folder), options, &files)?;
        Self::new(log, folder).restore(&opened, settings)
    }

    fn new(log: OperationLog, folder: Arc<LogDirectory>) -> Self {
        Self { log, folder, recovery: RecoveryOutcome::Intact, failure: Mutex::new(None) }
    }

    /// Locks a folder for a log that starts with the record `first`. Its contents are deleted.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn begin(path: &Path, options: OplogOptions, first: u64) -> Result<Self, OplogError> {
        Self::begin_in(Arc::new(LogDirectory::lock(path)?), options, first)
    }

    fn begin_in(folder: Arc<LogDirectory>, options: OplogOptions, first: u64) -> Result<Self, OplogError> {
        snapshot::remove_all(&folder)?;
        let log = OperationLog::begin_at(Arc::clone(&folder), options, first)?;
        Ok(Self::new(log, folder))
    }

    /// Result of the recovery at the start.
    pub fn recovery(&self) -> &RecoveryOutcome {
        &self.recovery
    }

    pub(crate) fn set_recovery(&mut self, recovery: RecoveryOutcome) {
        self.recovery = recovery;
    }

    pub fn log(&self) -> &OperationLog {
        &self.log
    }

    /// The locked folder with the files.
    pub fn folder(&self) -> &Arc<LogDirectory> {
        &self.folder
    }
}

impl Journal for DurableJournal {
    fn append(&self, fact: &[u8]) -> u64 {
        self.log.append(fact)
    }

    fn commit(&self, number: u64) -> io::Result<()> {
        let committed = self.log.commit(number);
        if let Err(error) = &committed {
            *self.failure.lock() = Some(error.to_string());
        }
        committed.map_err(|error| match error {
            OplogError::Io { problem, .. } => problem,
            other => io::Error::other(other),
        })
    }

    fn may_reply(&self) -> io::Result<()> {
        if self.log.unwritten_bytes() > MAX_UNFLUSHED_BYTES {
            Err(io::ErrorKind::StorageFull.into())
        } else {
            Ok(())
        }
    }

    fn may_write(&self) -> bool {
        !self.log.is_failing()
    }

    fn storage(&self) -> Option<DataDirStatus> {
        let failure = self.log.is_failing().then(|| self.failure.lock().clone().unwrap_or_default());
        let free_bytes = self.folder.free_bytes().ok();
        let path = self.folder.path().to_owned();
        Some(DataDirStatus { path, failure, free_bytes, recovery: self.recovery.clone() })
    }
}
