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

use moongate_kvcore::{Master, Settings};
use moongate_oplog::{Error, Folder, Log, Options};

use crate::journal::Journal;

pub use keeper::{Keeper, Pace};
pub use restore::Restored;

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
    ) -> Result<(Self, Master, Restored), Error> {
        let folder = Arc::new(Folder::take(path)?);
        let (log, opened) = match Log::open(Arc::clone(&folder), options.clone()) {
            Ok((log, opened)) => (log, Some(opened)),
            Err(error @ Error::Damaged { .. }) => {
                tracing::error!(%error, "the log of changes cannot be read");
                (Log::begin_at(Arc::clone(&folder), options, 1)?, None)
            }
            Err(error) => return Err(error),
        };
        let durable = Self { log, folder };
        let (master, restored) = durable.restore(opened, settings, now_ms)?;
        Ok((durable, master, restored))
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
