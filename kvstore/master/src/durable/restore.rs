//! From files to a master.

use std::fmt;

use moongate_kvcore::{Fact, Master, Settings, decode};
use moongate_oplog::{Error, Opened, snapshot};

use super::Durable;

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

const LOG_DAMAGED: &str = "the log of changes is damaged";
const MACHINE_DIED: &str = "the machine has died since, and the last changes may not have reached its disk: an object's memory may hold another by now";
const SNAPSHOTS_DAMAGED: &str = "the snapshots are damaged, and the log does not go back to the beginning";

impl Durable {
    pub(super) fn restore(
        &self,
        opened: Option<Opened>,
        settings: &Settings,
        now_ms: u64,
    ) -> Result<(Master, Restored), Error> {
        let refused = match opened {
            None => Some(LOG_DAMAGED),
            Some(opened) if opened.may_lack_records => Some(MACHINE_DIED),
            Some(_) => None,
        };
        if let Some(why) = refused {
            return self.begin_empty(settings, now_ms, why);
        }
        for (number, path) in snapshot::list(&self.folder)? {
            let (master, mut restored) =
                (Master::new(settings.clone()), Restored { snapshot: Some(number), ..Restored::default() });
            let read = snapshot::read(&path, |entry| restored.take(&master, entry));
            match read.and_then(|()| self.replay(&master, number + 1, &mut restored)) {
                Ok(()) => return Ok(finished(master, restored, now_ms)),
                Err(error @ (Error::Damaged { .. } | Error::Pruned { .. })) => {
                    tracing::error!(%error, snapshot = %path.display(), "a snapshot cannot be used");
                }
                Err(error) => return Err(error),
            }
        }
        let (master, mut restored) = (Master::new(settings.clone()), Restored::default());
        match self.replay(&master, 1, &mut restored) {
            Ok(()) => Ok(finished(master, restored, now_ms)),
            Err(Error::Pruned { .. }) => self.begin_empty(settings, now_ms, SNAPSHOTS_DAMAGED),
            Err(error @ Error::Damaged { .. }) => {
                tracing::error!(%error, "the log of changes cannot be read");
                self.begin_empty(settings, now_ms, LOG_DAMAGED)
            }
            Err(error) => Err(error),
        }
    }

    fn replay(&self, master: &Master, first: u64, restored: &mut Restored) -> Result<(), Error> {
        let mut reader = self.log.reader(first)?;
        while let Some((_, record)) = reader.next()? {
            restored.take(master, record);
            restored.facts += 1;
        }
        Ok(())
    }

    /// The files' facts are of no use: a snapshot of nothing takes their place.
    fn begin_empty(
        &self,
        settings: &Settings,
        now_ms: u64,
        why: &'static str,
    ) -> Result<(Master, Restored), Error> {
        snapshot::remove_all(&self.folder)?;
        let last = self.log.next() - 1;
        let needed = snapshot::Writer::begin(&self.folder, last)?.finish()?;
        self.log.prune(needed)?;
        let restored = Restored { began_empty: Some(why), ..Restored::default() };
        Ok(finished(Master::new(settings.clone()), restored, now_ms))
    }
}

fn finished(master: Master, restored: Restored, now_ms: u64) -> (Master, Restored) {
    master.finish_replay(now_ms);
    let keys = master.key_count();
    (master, Restored { keys, ..restored })
}

impl Restored {
    fn take(&mut self, master: &Master, encoded: &[u8]) {
        let applied = decode(encoded).is_ok_and(|(fact, _): (Fact<'_>, _)| master.apply(&fact).is_ok());
        self.left_out += u64::from(!applied);
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
