//! Snapshots: the state at a record, each in a separate file.
//!
//! A snapshot is written under a temporary name and renamed when it is complete, so every snapshot that is found is complete. The
//! previous one is retained in case the newest is damaged.

use std::path::{Path, PathBuf};
use std::sync::Arc;

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

/// Calls `take` with a snapshot's entries in order. If the file is damaged, `take` may have been called for some of them.
///
/// # Errors
/// [`OplogError::Damaged`], or errors of the file system.
pub fn read(folder: &LogDirectory, path: &Path, mut take: impl FnMut(&[u8])) -> Result<(), OplogError> {
    let bytes = folder.disk().read(path).map_err(io_error(path))?;
    let (mut offset, mut entries) = (0, 0_u64);
    loop {
        let damaged = |reason| OplogError::Damaged { path: path.to_owned(), offset: offset as u64, reason };
        match frame::read(&bytes[offset..]) {
            FrameReadResult::Record(END, count) if count == entries.to_le_bytes() => return Ok(()),
            FrameReadResult::Record(number, entry) if number == entries => {
                take(entry);
                entries += 1;
                offset += frame::HEADER_SIZE + entry.len();
            }
            FrameReadResult::Record(..) => return Err(damaged("an entry is missing")),
            FrameReadResult::End => return Err(damaged("the snapshot is truncated")),
            FrameReadResult::Torn => return Err(damaged("an entry is corrupt")),
        }
    }
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
