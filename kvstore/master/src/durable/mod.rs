//! A master whose state survives: its facts are logged, and now and then the whole state is written as a snapshot.
//!
//! Nobody is told of a change before its facts are in the log ([`Journal::commit`]). [`DurableJournal::open`] makes the last snapshot's facts
//! true in a new master, and those of the log that follow it. What a machine that died may have lost of the log could have been
//! that an object's space was given to another; so where that is possible ([`moongate_oplog::Opened::may_lack_records`]) objects are
//! not trusted, and the master starts empty. Where files are damaged, it starts with what can be proven. [`RestoreReport::recovery`] says
//! which of these it was.

mod persister;
mod recovery;
mod restore;
mod salvage;

use std::io;
use std::path::Path;
use std::sync::Arc;

use moongate_master_core::MasterCoreOptions;
use moongate_oplog::{LogDirectory, LogFiles, OperationLog, OplogError, OplogOptions, snapshot};
use parking_lot::Mutex;

use crate::journal::{DataDirStatus, Journal};
use crate::state::{AuxState, MasterState};

pub(crate) use persister::SnapshotBatch;
pub use persister::{PersistenceSchedule, StatePersister};
pub use recovery::{RecoveryOutcome, StateDamage};
pub use restore::{LoadedState, RestoreReport};

/// Bytes of facts that may wait for a full disk before nobody is answered any more.
const MAX_UNFLUSHED_BYTES: usize = 64 << 20;

/// The log and the snapshots of one master.
#[derive(Debug)]
pub struct DurableJournal {
    log: OperationLog,
    folder: Arc<LogDirectory>,
    /// What the start found.
    recovery: RecoveryOutcome,
    /// Why the last write failed, as long as writing fails.
    failure: Mutex<Option<String>>,
}

impl DurableJournal {
    /// Opens a folder and builds the master whose facts it has, ready to serve from `now_ms` on.
    ///
    /// # Errors
    /// When the folder cannot be used. Damaged files are no error: [`RestoreReport::recovery`] reports them.
    pub fn open(
        path: &Path,
        options: OplogOptions,
        settings: &MasterCoreOptions,
        now_ms: u64,
    ) -> Result<(Self, MasterState, RestoreReport), OplogError> {
        Self::open_in(Arc::new(LogDirectory::lock(path)?), options, settings, now_ms)
    }

    /// [`Self::open`] of a folder that has been taken.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_in(
        folder: Arc<LogDirectory>,
        options: OplogOptions,
        settings: &MasterCoreOptions,
        now_ms: u64,
    ) -> Result<(Self, MasterState, RestoreReport), OplogError> {
        let (mut durable, state, mut restored) =
            match Self::load_from(Arc::clone(&folder), options.clone(), settings)? {
                LoadedState::Complete(loaded) => *loaded,
                LoadedState::Partial(loaded) => {
                    salvage::silence_clients(&loaded.1, now_ms);
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
                    let restored = RestoreReport { recovery, ..RestoreReport::default() };
                    (Self::begin_in(folder, options.clone(), 1)?, MasterState::empty(settings), restored)
                }
            };
        state.master.finish_replay(now_ms);
        if let RecoveryOutcome::Damaged(damage) | RecoveryOutcome::IntactDespiteDamage(damage) =
            &mut restored.recovery
            && damage.preserved_at.is_none()
        {
            durable = durable.rewrite_snapshot(&state, options, damage)?;
        }
        restored.log_losses(durable.folder.path());
        durable.recovery = restored.recovery.clone();
        Ok((durable, state, restored))
    }

    /// Opens a folder and builds a state that can be gone on with: facts may follow until
    /// [`SimulatedMaster::finish_replay`](moongate_master_core::Master::finish_replay).
    ///
    /// # Errors
    /// When the folder cannot be used. Damaged files are no error.
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

    /// Takes a folder for a log that begins with the record `first`. What it has is forgotten.
    ///
    /// # Errors
    /// What the file system says.
    pub fn begin(path: &Path, options: OplogOptions, first: u64) -> Result<Self, OplogError> {
        Self::begin_in(Arc::new(LogDirectory::lock(path)?), options, first)
    }

    fn begin_in(folder: Arc<LogDirectory>, options: OplogOptions, first: u64) -> Result<Self, OplogError> {
        snapshot::remove_all(&folder)?;
        let log = OperationLog::begin_at(Arc::clone(&folder), options, first)?;
        Ok(Self::new(log, folder))
    }

    /// What the start found of the state before.
    pub fn recovery(&self) -> &RecoveryOutcome {
        &self.recovery
    }

    pub(crate) fn set_recovery(&mut self, recovery: RecoveryOutcome) {
        self.recovery = recovery;
    }

    /// The log.
    pub fn log(&self) -> &OperationLog {
        &self.log
    }

    /// Where the files are.
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
