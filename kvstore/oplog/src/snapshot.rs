//! Snapshots: the state at a record, each in a separate file.
//!
//! A snapshot is written under a temporary name and renamed when it is complete, so every snapshot that is found is complete. The
//! previous one is retained in case the newest is damaged.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::block::{BlockReader, FrameDecision, RecordBlock};
use crate::directory::LogDirectory;
use crate::disk::AppendFile;
use crate::frame::{self, FrameReadResult};
use crate::{OplogError, io_error};

const PREFIX: &str = "snapshot";
const SUFFIX: &str = "snap";
const UNFINISHED: &str = "snapshot.tmp";
/// Number of the last entry, which contains the number of entries before it.
const END: u64 = u64::MAX;
const RETAINED_SNAPSHOTS: usize = 2;
/// Buffer size of writes in bytes.
const BUFFER: usize = 1 << 20;
const CORRUPT: &str = "an entry is corrupt";

/// A snapshot that is being written.
pub struct SnapshotWriter {
    folder: Arc<LogDirectory>,
    /// Number of the last record in the snapshot.
    number: u64,
    path: PathBuf,
    file: Box<dyn AppendFile>,
    entries: u64,
    /// Entries that are not written to the file yet.
    buffer: Vec<u8>,
}

impl std::fmt::Debug for SnapshotWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SnapshotWriter")
            .field("number", &self.number)
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl SnapshotWriter {
    /// Starts a snapshot that contains all records up to `number`, and possibly some later ones.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn begin(folder: Arc<LogDirectory>, number: u64) -> Result<Self, OplogError> {
        let path = folder.path().join(UNFINISHED);
        let opened = folder.disk().open(&path).and_then(|mut file| file.truncate(0).map(|()| file));
        let file = opened.map_err(io_error(&path))?;
        Ok(Self { folder, number, path, file, entries: 0, buffer: Vec::new() })
    }

    /// Writes an entry, a part of the state of at most [`crate::MAX_RECORD`] bytes.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn write(&mut self, entry: &[u8]) -> Result<(), OplogError> {
        let number = self.entries;
        self.entries += 1;
        self.put(number, entry)
    }

    fn put(&mut self, number: u64, entry: &[u8]) -> Result<(), OplogError> {
        frame::write(number, entry, &mut self.buffer);
        if self.buffer.len() >= BUFFER { self.write_buffer() } else { Ok(()) }
    }

    fn write_buffer(&mut self) -> Result<(), OplogError> {
        let written = self.file.append(&self.buffer).map_err(io_error(&self.path));
        self.buffer.clear();
        written
    }

    /// Publishes the snapshot as the newest one, and removes all but one of the older ones. Returns the first record of the log that is
    /// still needed.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn finish(mut self) -> Result<u64, OplogError> {
        let entries = self.entries;
        self.put(END, &entries.to_le_bytes())?;
        self.write_buffer()?;
        let Self { folder, number, path, mut file, .. } = self;
        file.flush().map_err(io_error(&path))?;
        let target = folder.file(PREFIX, number, SUFFIX);
        folder.disk().rename(&path, &target).map_err(io_error(&target))?;
        folder.flush().map_err(io_error(folder.path()))?;
        let mut all = folder.numbered(PREFIX, SUFFIX).map_err(io_error(folder.path()))?;
        while all.len() > RETAINED_SNAPSHOTS {
            let (_, path) = all.remove(0);
            folder.disk().remove(&path).map_err(io_error(path))?;
        }
        Ok(all.first().map_or(0, |(number, _)| number + 1))
    }
}

/// Snapshots in a directory, newest first: number of the last record, and path.
///
/// # Errors
/// Errors of the file system.
pub fn list(folder: &LogDirectory) -> Result<Vec<(u64, PathBuf)>, OplogError> {
    let mut all = folder.numbered(PREFIX, SUFFIX).map_err(io_error(folder.path()))?;
    all.reverse();
    Ok(all)
}

/// Reads a snapshot in blocks.
pub struct SnapshotReader {
    frames: BlockReader,
    /// Number of entries so far.
    entries: u64,
    ended: bool,
}

impl std::fmt::Debug for SnapshotReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SnapshotReader").field("entries", &self.entries).finish_non_exhaustive()
    }
}

impl SnapshotReader {
    /// # Errors
    /// Errors of the file system.
    pub fn open(folder: &LogDirectory, path: &Path) -> Result<Self, OplogError> {
        Ok(Self { frames: BlockReader::open(folder, path, 0)?, entries: 0, ended: false })
    }

    /// The next entries, in the memory of `buffer`; `None` after the last ones.
    ///
    /// # Errors
    /// [`OplogError::Damaged`], or errors of the file system.
    pub fn next_block(&mut self, buffer: Vec<u8>) -> Result<Option<RecordBlock>, OplogError> {
        if self.ended {
            return Ok(None);
        }
        let first = self.entries;
        let (mut ended, mut reason) = (false, None);
        let block = self.frames.next_block(buffer, |header, frame| {
            if header.number == self.entries {
                self.entries += 1;
                return FrameDecision::Take;
            }
            match frame::read(frame) {
                FrameReadResult::Record(END, count) if count == self.entries.to_le_bytes() => ended = true,
                FrameReadResult::Record(..) => reason = Some("an entry is missing"),
                FrameReadResult::End | FrameReadResult::Torn => reason = Some(CORRUPT),
            }
            FrameDecision::Stop
        })?;
        self.ended = ended;
        // If an entry is damaged, those before it are returned first: they may be damaged, too.
        match (block.count(), reason) {
            (0, _) if ended => Ok(None),
            (0, Some(reason)) => Err(self.frames.damaged(reason)),
            (0, None) if self.frames.has_rest() => Err(self.frames.damaged(CORRUPT)),
            (0, None) => Err(self.frames.damaged("the snapshot is truncated")),
            _ => Ok(Some(RecordBlock { first, ..block })),
        }
    }
}

/// Calls `take` with a snapshot's entries in order. If the file is damaged, `take` may have been called for some of them.
///
/// # Errors
/// [`OplogError::Damaged`], or errors of the file system.
pub fn read(folder: &LogDirectory, path: &Path, mut take: impl FnMut(&[u8])) -> Result<(), OplogError> {
    let (mut reader, mut buffer) = (SnapshotReader::open(folder, path)?, Vec::new());
    while let Some(block) = reader.next_block(buffer)? {
        for nth in 0..block.count() {
            take(block.record(nth)?);
        }
        buffer = block.into_buffer();
    }
    Ok(())
}

/// Removes all snapshots.
///
/// # Errors
/// Errors of the file system.
pub fn remove_all(folder: &LogDirectory) -> Result<(), OplogError> {
    remove_others(folder, None)
}

/// Removes all snapshots except the one with this number.
///
/// # Errors
/// Errors of the file system.
pub fn remove_others(folder: &LogDirectory, retained: Option<u64>) -> Result<(), OplogError> {
    for (number, path) in list(folder)? {
        if Some(number) != retained {
            folder.disk().remove(&path).map_err(io_error(path))?;
        }
    }
    Ok(())
}
