//! From files to a master.

use std::fmt;

use moongate_kvcore::Settings;
use moongate_oplog::{Error, snapshot};

use super::Durable;
use crate::state::State;

/// What became of a master's state when it was started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Objects that are there again.
    pub keys: u64,
    /// Facts of the log that were made true again.
    pub facts: u64,
    /// Facts that did not fit: they are about what is gone by now.
    pub left_out: u64,
    /// The last record of the snapshot that was used.
    pub snapshot: Option<u64>,
    /// Why earlier objects are not there, if they are not.
    pub began_empty: Option<&'static str>,
}

/// What became of a folder's state.
#[derive(Debug)]
pub enum Loaded {
    /// It has all that was answered for.
    Trusted(Box<(Durable, State, Restored)>),
    /// It may lack something, because of this. The files are as they were.
    Doubted(&'static str),
}

const LOG_DAMAGED: &str = "the log of changes is damaged";
pub(super) const MACHINE_DIED: &str = "the machine has died since, and the last changes may not have reached its disk: an object's memory may hold another by now";
const LOG_SHORT: &str = "the log of changes ends before the newest snapshot";
const SNAPSHOTS_DAMAGED: &str = "the snapshots are damaged, and the log does not go back to the beginning";

impl Loaded {
    pub(super) fn damaged(error: Error) -> Result<Self, Error> {
        if matches!(error, Error::Damaged { .. }) {
            tracing::error!(%error, "the log of changes cannot be read");
            Ok(Self::Doubted(LOG_DAMAGED))
        } else {
            Err(error)
        }
    }
}

impl Durable {
    pub(super) fn restore(self, settings: &Settings) -> Result<Loaded, Error> {
        for (number, path) in snapshot::list(&self.folder)? {
            let mut state = State { last: number, ..State::empty(settings) };
            let mut restored = Restored { snapshot: Some(number), ..Restored::default() };
            let read = snapshot::read(&path, |entry| restored.took(state.apply(entry)));
            match read.and_then(|()| self.replay(&mut state, &mut restored)) {
                Ok(()) => return Ok(self.trusted(state, restored)),
                Err(error @ (Error::Damaged { .. } | Error::Pruned { .. })) => {
                    tracing::error!(%error, snapshot = %path.display(), "a snapshot cannot be used");
                }
                Err(error) => return Err(error),
            }
        }
        let (mut state, mut restored) = (State::empty(settings), Restored::default());
        match self.replay(&mut state, &mut restored) {
            Ok(()) => Ok(self.trusted(state, restored)),
            Err(Error::Pruned { .. }) => Ok(Loaded::Doubted(SNAPSHOTS_DAMAGED)),
            Err(error) => Loaded::damaged(error),
        }
    }

    fn trusted(self, state: State, restored: Restored) -> Loaded {
        if self.log.next() != state.last + 1 {
            return Loaded::Doubted(LOG_SHORT);
        }
        let keys = state.master.key_count();
        Loaded::Trusted(Box::new((self, state, Restored { keys, ..restored })))
    }

    fn replay(&self, state: &mut State, restored: &mut Restored) -> Result<(), Error> {
        let mut reader = self.log.reader(state.last + 1)?;
        while let Some((_, record)) = reader.next()? {
            restored.took(state.next(record));
            restored.facts += 1;
        }
        Ok(())
    }
}

impl Restored {
    fn took(&mut self, fits: bool) {
        self.left_out += u64::from(!fits);
    }
}

impl fmt::Display for Restored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.began_empty, self.snapshot) {
            (Some(why), _) => write!(f, "begins empty: {why}"),
            (None, None) => write!(f, "{} keys from {} logged changes", self.keys, self.facts),
            (None, Some(_)) => {
                write!(f, "{} keys from a snapshot and {} logged changes", self.keys, self.facts)
            }
        }
    }
}
