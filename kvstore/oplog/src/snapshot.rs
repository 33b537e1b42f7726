//! A state at some record, in a file of its own.
//!
//! It is written under another name and renamed when it is whole, so a snapshot that can be found has been written to its end. The one
//! before it is kept, in case that the newest cannot be read.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::PathBuf;
use std::sync::Arc;

use crate::folder::Folder;
use crate::frame::{self, Found};
use crate::{Error, failed};

const PREFIX: &str = "snapshot";
const SUFFIX: &str = "snap";
const UNFINISHED: &str = "snapshot.tmp";
/// The number of the last entry, whose content is how many were before it.
const END: u64 = u64::MAX;
/// Snapshots that are kept.
const KEPT: usize = 2;

/// A snapshot that is being written.
#[derive(Debug)]
pub struct Writer {
    folder: Arc<Folder>,
    /// The last record that it contains.
    number: u64,
    path: PathBuf,
    file: BufWriter<File>,
    entries: u64,
    frame: Vec<u8>,
}

impl Writer {
    /// Begins a snapshot that contains all records up to `number`, and maybe some of the later ones.
    ///
    /// # Errors
    /// What the file system says.
    pub fn begin(folder: Arc<Folder>, number: u64) -> Result<Self, Error> {
        let path = folder.path().join(UNFINISHED);
        let file = BufWriter::with_capacity(1 << 20, File::create(&path).map_err(failed(&path))?);
        Ok(Self { folder, number, path, file, entries: 0, frame: Vec::new() })
    }

    /// Writes a part of the state, of at most [`crate::MAX_RECORD`] bytes.
    ///
    /// # Errors
    /// What the file system says.
    pub fn write(&mut self, entry: &[u8]) -> Result<(), Error> {
        let number = self.entries;
        self.entries += 1;
        self.put(number, entry)
    }

    fn put(&mut self, number: u64, entry: &[u8]) -> Result<(), Error> {
        self.frame.clear();
        frame::write(number, entry, &mut self.frame);
        self.file.write_all(&self.frame).map_err(failed(&self.path))
    }

    /// Makes it the newest snapshot. Older ones but one are removed. Returns from which record on the log is still needed.
    ///
    /// # Errors
    /// What the file system says.
    pub fn finish(mut self) -> Result<u64, Error> {
        let entries = self.entries;
        self.put(END, &entries.to_le_bytes())?;
        let Self { folder, number, path, file, .. } = self;
        let file = file.into_inner().map_err(|error| failed(&path)(error.into_error()))?;
        file.sync_all().map_err(failed(&path))?;
        let whole = folder.file(PREFIX, number, SUFFIX);
        fs::rename(&path, &whole).map_err(failed(&whole))?;
        folder.flush().map_err(failed(folder.path()))?;
        let mut all = folder.numbered(PREFIX, SUFFIX).map_err(failed(folder.path()))?;
        while all.len() > KEPT {
            let (_, path) = all.remove(0);
            fs::remove_file(&path).map_err(failed(path))?;
        }
        Ok(all.first().map_or(0, |(number, _)| number + 1))
    }
}

/// The snapshots in a folder, the newest first: of each the last record that it contains, and its file.
///
/// # Errors
/// What the file system says.
pub fn list(folder: &Folder) -> Result<Vec<(u64, PathBuf)>, Error> {
    let mut all = folder.numbered(PREFIX, SUFFIX).map_err(failed(folder.path()))?;
    all.reverse();
    Ok(all)
}

/// Reads a snapshot's entries in order. `take` may have been given some when it turns out that the file is damaged.
///
/// # Errors
/// [`Error::Damaged`], or what the file system says.
pub fn read(path: &PathBuf, mut take: impl FnMut(&[u8])) -> Result<(), Error> {
    let bytes = fs::read(path).map_err(failed(path))?;
    let (mut at, mut entries) = (0, 0_u64);
    loop {
        let damaged = |what| Error::Damaged { path: path.clone(), at: at as u64, what };
        match frame::read(&bytes[at..]) {
            Found::Record(END, count) if count == entries.to_le_bytes() => return Ok(()),
            Found::Record(number, entry) if number == entries => {
                take(entry);
                entries += 1;
                at += frame::HEADER + entry.len();
            }
            Found::Record(..) => return Err(damaged("an entry is missing")),
            Found::End => return Err(damaged("it ends too early")),
            Found::Torn => return Err(damaged("an entry is not what was written")),
        }
    }
}

/// Removes all snapshots.
///
/// # Errors
/// What the file system says.
pub fn remove_all(folder: &Folder) -> Result<(), Error> {
    for (_, path) in list(folder)? {
        fs::remove_file(&path).map_err(failed(path))?;
    }
    Ok(())
}
