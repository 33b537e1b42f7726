//! A master whose state survives: its facts are logged, and now and then the whole state is written as a snapshot.
//!
//! Nobody is told of a change before its facts are in the log ([`Journal::commit`]). [`Durable::open`] makes the last snapshot's facts
//! true in a new master, and those of the log that follow it. What a machine that died may have lost of the log could have been
//! that an object's space was given to another; so where that is possible ([`moongate_oplog::Opened::may_lack_records`]) objects are
//! not trusted, and the master begins empty.

mod keeper;
mod restore;

use std::io;
use std::path::Path;
use std::sync::Arc;

use moongate_kvcore::Settings;
use moongate_oplog::{Error, Folder, Log, Options, snapshot};

use crate::journal::Journal;
use crate::state::State;

pub(crate) use keeper::Piece;
pub use keeper::{Keeper, Pace};
pub use restore::{Loaded, Restored};

/// Bytes of facts that may wait for a full disk before nobody is answered any more.
const MOST_WAITING: usize = 64 << 20;

/// The log and the snapshots of one master.
#[derive(Debug)]
pub struct Durable {
    log: Log,
    folder: Arc<Folder>,
}

impl Durable {
    /// Opens a folder and builds the master whose facts it has, ready to serve from `now_ms` on.
    ///
    /// # Errors
    /// When the folder cannot be used. Damaged files are no error if something older can be used, or if the master can begin empty:
    /// [`Restored`] tells.
    pub fn open(
        path: &Path,
        options: Options,
        settings: &Settings,
        now_ms: u64,
    ) -> Result<(Self, State, Restored), Error> {
        let (durable, state, restored) = match Self::load(path, options.clone(), settings)? {
            Loaded::Trusted(loaded) => *loaded,
            Loaded::Doubted(why) => {
                let restored = Restored { began_empty: Some(why), ..Restored::default() };
                (Self::begin(path, options, 1)?, State::empty(settings), restored)
            }
        };
        state.master.finish_replay(now_ms);
        Ok((durable, state, restored))
    }

    /// Opens a folder and builds a state that can be gone on with: facts may follow until
    /// [`Master::finish_replay`](moongate_kvcore::Master::finish_replay).
    ///
    /// # Errors
    /// When the folder cannot be used. Damaged files are no error.
    pub fn load(path: &Path, options: Options, settings: &Settings) -> Result<Loaded, Error> {
        let folder = Arc::new(Folder::take(path)?);
        match Log::may_lack_records(&folder, &options) {
            Ok(false) => {}
            Ok(true) => return Ok(Loaded::Doubted(restore::MACHINE_DIED)),
            Err(error) => return Loaded::damaged(error),
        }
        match Log::open(Arc::clone(&folder), options) {
            Ok((log, _)) => Self { log, folder }.restore(settings),
            Err(error) => Loaded::damaged(error),
        }
    }

    /// Takes a folder for a log that begins with the record `first`. What it has is forgotten.
    ///
    /// # Errors
    /// What the file system says.
    pub fn begin(path: &Path, options: Options, first: u64) -> Result<Self, Error> {
        let folder = Arc::new(Folder::take(path)?);
        snapshot::remove_all(&folder)?;
        let log = Log::begin_at(Arc::clone(&folder), options, first)?;
        Ok(Self { log, folder })
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
        self.log.commit(number).map_err(|error| match error {
            Error::Io { problem, .. } => problem,
            other => io::Error::other(other),
        })
    }

    fn may_answer(&self) -> io::Result<()> {
        if self.log.waiting_bytes() > MOST_WAITING { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}
