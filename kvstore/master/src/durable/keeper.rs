//! Flushing the log and writing snapshots, on a thread of its own.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use moongate_kvcore::{Effects, Fact, Master, SnapshotCursor, encode};
use moongate_oplog::{Error, snapshot};

use super::Durable;

/// Places of the table that are looked at under one lock: some tens of microseconds.
const PLACES_AT_ONCE: u32 = 64;

/// How often what is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Between two flushes of the log to the disk.
    pub flush_every: Duration,
    /// Between two snapshots.
    pub snapshot_every: Duration,
    /// Records after which a snapshot is written before its time, and without which none is written.
    pub records: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            flush_every: Duration::from_secs(1),
            snapshot_every: Duration::from_mins(10),
            records: 2_000_000,
        }
    }
}

/// Keeps a master's files short and flushed.
#[derive(Debug)]
pub struct Keeper<'a> {
    durable: &'a Durable,
    master: &'a Master,
    pace: Pace,
}

impl<'a> Keeper<'a> {
    /// A keeper of this master's files.
    pub fn new(durable: &'a Durable, master: &'a Master, pace: Pace) -> Self {
        Self { durable, master, pace }
    }

    /// Works until the other end of `stop` is dropped; then writes all that is left, so that nothing is doubted at the next start.
    ///
    /// # Errors
    /// When the log cannot be closed.
    pub fn run(&self, stop: &Receiver<()>) -> Result<(), Error> {
        let (mut last, mut last_number) = (Instant::now(), self.durable.log.oldest());
        let mut failing = false;
        while stop.recv_timeout(self.pace.flush_every) == Err(RecvTimeoutError::Timeout) {
            let number = self.durable.log.next() - 1;
            let records = number.saturating_sub(last_number);
            let due =
                records >= self.pace.records || (records > 0 && last.elapsed() >= self.pace.snapshot_every);
            let done = self.durable.log.commit(number).and_then(|()| self.durable.log.flush());
            let done = done.and_then(|()| if due { self.snapshot().map(drop) } else { Ok(()) });
            if due {
                (last, last_number) = (Instant::now(), number);
            }
            // Told once, not every second.
            match done {
                Err(error) if !std::mem::replace(&mut failing, true) => {
                    tracing::error!(%error, "changes cannot be saved; new objects are refused until they can");
                }
                Ok(()) if std::mem::take(&mut failing) => tracing::info!("changes are saved again"),
                _ => {}
            }
        }
        self.durable.log.close()
    }

    /// Writes a snapshot, and removes what is not needed any more. Returns how many facts it has.
    ///
    /// # Errors
    /// What the file system says. The snapshot before stays the newest.
    pub fn snapshot(&self) -> Result<u64, Error> {
        let Durable { log, folder } = self.durable;
        // All facts up to this one are true already: each is appended while what it is about is locked.
        let mut writer = snapshot::Writer::begin(folder, log.next() - 1)?;
        let (mut cursor, mut facts) = (Some(SnapshotCursor::default()), 0);
        let mut piece = Piece::default();
        while let Some(from) = cursor {
            cursor = self.master.snapshot(from, PLACES_AT_ONCE, &mut piece);
            for range in piece.ends.windows(2) {
                writer.write(&piece.bytes[range[0]..range[1]])?;
                facts += 1;
            }
            piece.clear();
        }
        // Its pieces are of different moments: what came in between must not be missing.
        log.commit(log.next() - 1)?;
        log.flush()?;
        log.prune(writer.finish()?)?;
        Ok(facts)
    }
}

/// Encoded facts. They are written when nothing is locked.
struct Piece {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Default for Piece {
    fn default() -> Self {
        Self { bytes: Vec::new(), ends: vec![0] }
    }
}

impl Piece {
    fn clear(&mut self) {
        self.bytes.clear();
        self.ends.truncate(1);
    }
}

impl Effects for Piece {
    fn fact(&mut self, fact: Fact<'_>) {
        encode(&fact, &mut self.bytes);
        self.ends.push(self.bytes.len());
    }
}
