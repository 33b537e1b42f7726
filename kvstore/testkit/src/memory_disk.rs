//! A disk in memory that can lose unflushed data and ignore flushes.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use moongate_oplog::{AppendFile, DirectoryLock, FlushOperation, LogStorage};
use parking_lot::Mutex;

/// Contents of the disk's files by path.
pub type FileContents = BTreeMap<PathBuf, Vec<u8>>;

/// Kind of a disk operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskOperation {
    Write,
    Flush,
}

#[derive(Default)]
struct MemoryDiskState {
    visible: FileContents,
    /// Contents after a crash of the machine.
    durable: FileContents,
    /// Writes and flushes so far, in order.
    operations: Vec<DiskOperation>,
    /// Index of the flush operation that is ignored.
    dropped: Option<usize>,
    /// Index of the misdirected write operation, and its offset in the file.
    misdirected: Option<(usize, usize)>,
    /// Free bytes; `None` for no limit.
    free_bytes: Option<usize>,
}

/// A disk in memory. Renames, removals and links are durable immediately.
#[derive(Clone, Default)]
pub struct MemoryDisk(Arc<Mutex<MemoryDiskState>>);

impl MemoryDisk {
    /// A disk with these files.
    pub fn with(files: FileContents) -> Self {
        let disk = Self::default();
        disk.0.lock().durable.clone_from(&files);
        disk.0.lock().visible = files;
        disk
    }

    pub fn files(&self) -> FileContents {
        self.0.lock().visible.clone()
    }

    /// Contents after a crash of the machine.
    pub fn durable_files(&self) -> FileContents {
        self.0.lock().durable.clone()
    }

    /// Writes and flushes so far, in order.
    pub fn operations(&self) -> Vec<DiskOperation> {
        self.0.lock().operations.clone()
    }

    /// Ignores the flush with this operation index.
    pub fn drop_flush(&self, nth: usize) {
        self.0.lock().dropped = Some(nth);
    }

    /// Misdirects the write with this operation index to another offset of its file.
    pub fn misdirect(&self, nth: usize, offset: usize) {
        self.0.lock().misdirected = Some((nth, offset));
    }

    /// Sets the free bytes; `None` for no limit.
    pub fn set_free_bytes(&self, bytes: Option<usize>) {
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
        inner.free_bytes = inner.free_bytes.map(|free| free - fits);
        let misdirected = inner.misdirected.filter(|(index, _)| *index == nth).map(|(_, offset)| offset);
        let file = inner.visible.get_mut(&self.path).ok_or_else(absent)?;
        let end = file.len();
        file.extend_from_slice(&bytes[..fits]);
        if let Some(offset) = misdirected.filter(|offset| *offset < end) {
            // The intended range stays empty (zeros).
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
        inner.free_bytes = inner.free_bytes.map(|free| free + freed);
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
        // A file that was never flushed is empty after a crash.
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
