//! A disk in memory, which can lose what was not flushed, and flushes.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use moongate_oplog::{AppendFile, DirectoryLock, FlushOperation, LogStorage};
use parking_lot::Mutex;

/// The files of a disk, by their paths.
pub(crate) type FileContents = BTreeMap<PathBuf, Vec<u8>>;

/// What one write or flush was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DiskOperation {
    Write,
    Flush,
}

#[derive(Default)]
struct MemoryDiskState {
    /// What programs see.
    visible: FileContents,
    /// What a crash of the machine leaves.
    durable: FileContents,
    /// Writes and flushes so far.
    operations: Vec<DiskOperation>,
    /// The flush, by its number among the operations, that does nothing.
    dropped: Option<usize>,
    /// The write that goes elsewhere: by its number, and to which offset of its file.
    misdirected: Option<(usize, usize)>,
    /// Bytes that still fit.
    free_bytes: Option<usize>,
}

/// A disk in memory. Renaming, removing and linking reach the disk at once.
#[derive(Clone, Default)]
pub(crate) struct MemoryDisk(Arc<Mutex<MemoryDiskState>>);

impl MemoryDisk {
    /// A disk with these files.
    pub(crate) fn with(files: FileContents) -> Self {
        let disk = Self::default();
        disk.0.lock().durable.clone_from(&files);
        disk.0.lock().visible = files;
        disk
    }

    /// What programs see.
    pub(crate) fn files(&self) -> FileContents {
        self.0.lock().visible.clone()
    }

    /// What is left when the machine dies.
    pub(crate) fn durable_files(&self) -> FileContents {
        self.0.lock().durable.clone()
    }

    /// Writes and flushes so far.
    pub(crate) fn operations(&self) -> Vec<DiskOperation> {
        self.0.lock().operations.clone()
    }

    /// The flush with this number among the operations will do nothing.
    pub(crate) fn drop_flush(&self, nth: usize) {
        self.0.lock().dropped = Some(nth);
    }

    /// The write with this number among the operations will go to another place of its file.
    pub(crate) fn misdirect(&self, nth: usize, offset: usize) {
        self.0.lock().misdirected = Some((nth, offset));
    }

    /// How many bytes still fit; none for any number.
    pub(crate) fn set_free_bytes(&self, bytes: Option<usize>) {
        self.0.lock().free_bytes = bytes;
    }
}

fn absent() -> io::Error {
    io::ErrorKind::NotFound.into()
}

struct MemoryFile {
    disk: MemoryDisk,
    path: PathBuf,
}

impl MemoryFile {
    fn flush_now(&self) {
        let mut inner = self.disk.0.lock();
        let nth = inner.operations.len();
        inner.operations.push(DiskOperation::Flush);
        if inner.dropped != Some(nth)
            && let Some(bytes) = inner.visible.get(&self.path).cloned()
        {
            inner.durable.insert(self.path.clone(), bytes);
        }
    }
}

impl AppendFile for MemoryFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut inner = self.disk.0.lock();
        let nth = inner.operations.len();
        inner.operations.push(DiskOperation::Write);
        let fits = inner.free_bytes.unwrap_or(bytes.len()).min(bytes.len());
        inner.free_bytes = inner.free_bytes.map(|room| room - fits);
        let elsewhere = inner.misdirected.filter(|(it, _)| *it == nth).map(|(_, offset)| offset);
        let file = inner.visible.get_mut(&self.path).ok_or_else(absent)?;
        let end = file.len();
        file.extend_from_slice(&bytes[..fits]);
        if let Some(offset) = elsewhere.filter(|offset| *offset < end) {
            // Its own place keeps what it had: nothing.
            file[end..].fill(0);
            let length = fits.min(end + fits - offset);
            file[offset..offset + length].copy_from_slice(&bytes[..length]);
        }
        if fits < bytes.len() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        let mut inner = self.disk.0.lock();
        let file = inner.visible.get_mut(&self.path).ok_or_else(absent)?;
        let freed = file.len().saturating_sub(length as usize);
        file.resize(length as usize, 0);
        inner.free_bytes = inner.free_bytes.map(|room| room + freed);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.flush_now();
        Ok(())
    }

    fn flush_operation(&self) -> io::Result<FlushOperation> {
        let file = MemoryFile { disk: self.disk.clone(), path: self.path.clone() };
        Ok(Box::new(move || {
            file.flush_now();
            Ok(())
        }))
    }
}

impl LogStorage for MemoryDisk {
    fn open(&self, path: &Path) -> io::Result<Box<dyn AppendFile>> {
        self.0.lock().visible.entry(path.to_owned()).or_default();
        Ok(Box::new(MemoryFile { disk: self.clone(), path: path.to_owned() }))
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.0.lock().visible.get(path).cloned().ok_or_else(absent)
    }

    fn length(&self, path: &Path) -> io::Result<u64> {
        Ok(self.0.lock().visible.get(path).ok_or_else(absent)?.len() as u64)
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<String>> {
        let inner = self.0.lock();
        let mut names: Vec<String> = inner
            .visible
            .keys()
            .filter_map(|path| path.strip_prefix(folder).ok()?.components().next())
            .map(|name| name.as_os_str().to_string_lossy().into_owned())
            .collect();
        names.dedup();
        Ok(names)
    }

    fn create_folder(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn remove_folder(&self, folder: &Path) -> io::Result<()> {
        let mut inner = self.0.lock();
        inner.visible.retain(|path, _| !path.starts_with(folder));
        inner.durable.retain(|path, _| !path.starts_with(folder));
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut inner = self.0.lock();
        inner.durable.remove(path);
        inner.visible.remove(path).map(drop).ok_or_else(absent)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut inner = self.0.lock();
        let file = inner.visible.remove(from).ok_or_else(absent)?;
        inner.visible.insert(to.to_owned(), file);
        // One that was never flushed arrives empty.
        let durable = inner.durable.remove(from).unwrap_or_default();
        inner.durable.insert(to.to_owned(), durable);
        Ok(())
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut inner = self.0.lock();
        let file = inner.visible.get(from).cloned().ok_or_else(absent)?;
        inner.durable.insert(to.to_owned(), file.clone());
        inner.visible.insert(to.to_owned(), file);
        Ok(())
    }

    fn flush_folder(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn free_bytes(&self, _: &Path) -> io::Result<u64> {
        Ok(self.0.lock().free_bytes.unwrap_or(usize::MAX) as u64)
    }

    fn lock(&self, _: &Path) -> io::Result<DirectoryLock> {
        Ok(DirectoryLock::default())
    }
}
