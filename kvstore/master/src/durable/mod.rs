//! A master whose state survives: its facts are logged, and now and then the whole state is written as a snapshot.
//!
//! Nobody is told of a change before its facts are in the log ([`Journal::commit`]). [`Durable::open`] makes the last snapshot's facts
//! true in a new master, and those of the log that follow it. What a machine that died may have lost of the log could have been
//! that an object's space was given to another; so where that is possible ([`moongate_oplog::Opened::may_lack_records`]) objects are
//! not trusted, and the master starts empty. Where files are damaged, it starts with what can be proven. [`Restored::recovery`] says
//! which of these it was.

mod keeper;
mod recovery;
mod restore;
mod salvage;

use std::io;
use std::path::Path;
use std::sync::Arc;

use moongate_kvcore::Settings;
use moongate_oplog::{Error, Folder, Log, LogFiles, Options, snapshot};
use parking_lot::Mutex;

use crate::journal::{Journal, StorageStatus};
use crate::state::{Beside, State};

pub(crate) use keeper::Piece;
pub use keeper::{Keeper, Pace};
pub use recovery::{Recovery, StateDamage};
pub use restore::{Loaded, Restored};

/// Bytes of facts that may wait for a full disk before nobody is answered any more.
const MOST_WAITING: usize = 64 << 20;

/// The log and the snapshots of one master.
#[derive(Debug)]
pub struct Durable {
    log: Log,
    folder: Arc<Folder>,
    /// What the start found.
    recovery: Recovery,
    /// Why the last write failed, as long as writing fails.
    failure: Mutex<Option<String>>,
}

impl Durable {
    /// Opens a folder and builds the master whose facts it has, ready to serve from `now_ms` on.
    ///
    /// # Errors
    /// When the folder cannot be used. Damaged files are no error: [`Restored::recovery`] reports them.
    pub fn open(
        path: &Path,
        options: Options,
        settings: &Settings,
        now_ms: u64,
    ) -> Result<(Self, State, Restored), Error> {
        Self::open_in(Arc::new(Folder::take(path)?), options, settings, now_ms)
    }

    /// [`Self::open`] of a folder that has been taken.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_in(
        folder: Arc<Folder>,
        options: Options,
        settings: &Settings,
        now_ms: u64,
    ) -> Result<(Self, State, Restored), Error> {
        let (mut durable, state, mut restored) =
            match Self::load_from(Arc::clone(&folder), options.clone(), settings)? {
                Loaded::Complete(loaded) => *loaded,
                Loaded::Partial(loaded) => {
                    salvage::silence_clients(&loaded.1, now_ms);
                    *loaded
                }
                Loaded::MachineDied(damage) => {
                    let recovery = match damage {
                        None => Recovery::MachineDied,
                        Some(damage) => {
                            Recovery::Damaged(StateDamage { kept: Some(folder.preserve()?), ..damage })
                        }
                    };
                    let restored = Restored { recovery, ..Restored::default() };
                    (Self::begin_in(folder, options.clone(), 1)?, State::empty(settings), restored)
                }
            };
        state.master.finish_replay(now_ms);
        if let Recovery::Damaged(damage) | Recovery::Spared(damage) = &mut restored.recovery
            && damage.kept.is_none()
        {
            durable = durable.renew(&state, options, damage)?;
        }
        restored.warn(durable.folder.path());
        durable.recovery = restored.recovery.clone();
        Ok((durable, state, restored))
    }

    /// Opens a folder and builds a state that can be gone on with: facts may follow until
    /// [`Master::finish_replay`](moongate_kvcore::Master::finish_replay).
    ///
    /// # Errors
    /// When the folder cannot be used. Damaged files are no error.
    pub fn load(path: &Path, options: Options, settings: &Settings) -> Result<Loaded, Error> {
        Self::load_from(Arc::new(Folder::take(path)?), options, settings)
    }

    fn load_from(folder: Arc<Folder>, options: Options, settings: &Settings) -> Result<Loaded, Error> {
        let files = LogFiles::read(&folder, &options)?;
        if files.may_lack_records(&options) {
            return Ok(Loaded::MachineDied(files.damage().map(StateDamage::from)));
        }
        let (log, opened) = Log::open_read(Arc::clone(&folder), options, &files)?;
        Self::new(log, folder).restore(&opened, settings)
    }

    fn new(log: Log, folder: Arc<Folder>) -> Self {
        Self { log, folder, recovery: Recovery::Intact, failure: Mutex::new(None) }
    }

    /// Takes a folder for a log that begins with the record `first`. What it has is forgotten.
    ///
    /// # Errors
    /// What the file system says.
    pub fn begin(path: &Path, options: Options, first: u64) -> Result<Self, Error> {
        Self::begin_in(Arc::new(Folder::take(path)?), options, first)
    }

    fn begin_in(folder: Arc<Folder>, options: Options, first: u64) -> Result<Self, Error> {
        snapshot::remove_all(&folder)?;
        let log = Log::begin_at(Arc::clone(&folder), options, first)?;
        Ok(Self::new(log, folder))
    }

    /// What the start found of the state before.
    pub fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    pub(crate) fn set_recovery(&mut self, recovery: Recovery) {
        self.recovery = recovery;
    }

    /// The log.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Where the files are.
    pub fn folder(&self) -> &Arc<Folder> {
        &self.folder
    }
}

impl Journal for Durable {
    fn append(&self, fact: &[u8]) -> u64 {
        self.log.append(fact)
    }

    fn commit(&self, number: u64) -> io::Result<()> {
        let committed = self.log.commit(number);
        if let Err(error) = &committed {
            *self.failure.lock() = Some(error.to_string());
        }
        committed.map_err(|error| match error {
            Error::Io { problem, .. } => problem,
            other => io::Error::other(other),
        })
    }

    fn may_answer(&self) -> io::Result<()> {
        if self.log.waiting_bytes() > MOST_WAITING { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn may_write(&self) -> bool {
        !self.log.is_failing()
    }

    fn storage(&self) -> Option<StorageStatus> {
        let failure = self.log.is_failing().then(|| self.failure.lock().clone().unwrap_or_default());
        let free_bytes = self.folder.free_bytes().ok();
        let path = self.folder.path().to_owned();
        Some(StorageStatus { path, failure, free_bytes, recovery: self.recovery.clone() })
    }
}
