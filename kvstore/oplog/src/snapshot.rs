//! A state at some record, in a file of its own.
//!
//! It is written under another name and renamed when it is whole, so a snapshot that can be found has been written to its end. The one
//! before it is kept, in case that the newest cannot be read.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::directory::LogDirectory;
use crate::disk::AppendFile;
use crate::frame::{self, FrameReadResult};
use crate::{OplogError, io_error};

const PREFIX: &str = "snapshot";
const SUFFIX: &str = "snap";
const UNFINISHED: &str = "snapshot.tmp";
/// The number of the last entry, whose content is how many were before it.
const END: u64 = u64::MAX;
/// Snapshots that are kept.
const RETAINED_SNAPSHOTS: usize = 2;
/// Bytes that are written at a time.
const BUFFER: usize = 1 << 20;

/// A snapshot that is being written.
pub struct SnapshotWriter {
    folder: Arc<LogDirectory>,
    /// The last record that it contains.
    number: u64,
    path: PathBuf,
    file: Box<dyn AppendFile>,
    entries: u64,
    /// What is not written yet.
    buffer: Vec<u8>,
}

impl std::fmt::Debug for SnapshotWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer")
            .field("number", &self.number)
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl SnapshotWriter {
    /// Begins a snapshot that contains all records up to `number`, and maybe some of the later ones.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn begin(folder: Arc<LogDirectory>, number: u64) -> Result<Self, OplogError> {
        let path = folder.path().join(UNFINISHED);
        let opened = folder.disk().open(&path).and_then(|mut file| file.truncate(0).map(|()| file));
        let file = opened.map_err(io_error(&path))?;
        Ok(Self { folder, number, path, file, entries: 0, buffer: Vec::new() })
    }

    /// Writes a part of the state, of at most [`crate::MAX_RECORD`] bytes.
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

    /// Makes it the newest snapshot. Older ones but one are removed. Returns from which record on the log is still needed.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn finish(mut self) -> Result<u64, OplogError> {
        let entries = self.entries;
        self.put(END, &entries.to_le_bytes())?;
        self.write_buffer()?;
        let Self { folder, number, path, mut file, .. } = self;
        file.flush().map_err(io_error(&path))?;
        let whole = folder.file(PREFIX, number, SUFFIX);
        folder.disk().rename(&path, &whole).map_err(io_error(&whole))?;
        folder.flush().map_err(io_error(folder.path()))?;
        let mut all = folder.numbered(PREFIX, SUFFIX).map_err(io_error(folder.path()))?;
        while all.len() > RETAINED_SNAPSHOTS {
            let (_, path) = all.remove(0);
            folder.disk().remove(&path).map_err(io_error(path))?;
        }
        Ok(all.first().map_or(0, |(number, _)| number + 1))
    }
}

/// The snapshots in a folder, the newest first: of each the last record that it contains, and its file.
///
/// # Errors
/// Errors of the file system.
pub fn list(folder: &LogDirectory) -> Result<Vec<(u64, PathBuf)>, OplogError> {
    let mut all = folder.numbered(PREFIX, SUFFIX).map_err(io_error(folder.path()))?;
    all.reverse();
    Ok(all)
}

/// Reads a snapshot's entries in order. `take` may have been given some when it turns out that the file is damaged.
///
/// # Errors
/// [`OplogError::Damaged`], or what the file system says.
pub fn read(folder: &LogDirectory, path: &Path, mut take: impl FnMut(&[u8])) -> Result<(), OplogError> {
    let bytes = folder.disk().read(path).map_err(io_error(path))?;
    let (mut at, mut entries) = (0, 0_u64);
    loop {
        let damaged = |what| OplogError::Damaged { path: path.to_owned(), offset: at as u64, reason: what };
        match frame::read(&bytes[at..]) {
            FrameReadResult::Record(END, count) if count == entries.to_le_bytes() => return Ok(()),
            FrameReadResult::Record(number, entry) if number == entries => {
                take(entry);
                entries += 1;
                at += frame::HEADER_SIZE + entry.len();
            }
            FrameReadResult::Record(..) => return Err(damaged("an entry is missing")),
            FrameReadResult::End => return Err(damaged("it ends too early")),
            FrameReadResult::Torn => return Err(damaged("an entry is not what was written")),
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

/// Removes all snapshots but one.
///
/// # Errors
/// Errors of the file system.
pub fn remove_others(folder: &LogDirectory, kept: Option<u64>) -> Result<(), OplogError> {
    for (number, path) in list(folder)? {
        if Some(number) != kept {
            folder.disk().remove(&path).map_err(io_error(path))?;
        }
    }
    Ok(())
}
