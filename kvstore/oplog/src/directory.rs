//! Directory of a log, locked by one process.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::disk::{DirectoryLock, LocalFileSystem, LogStorage};

/// A directory locked by this process, and its storage.
pub struct LogDirectory {
    path: PathBuf,
    disk: Arc<dyn LogStorage>,
    _lock: DirectoryLock,
}

impl LogDirectory {
    /// Locks a directory, which is created if it does not exist.
    ///
    /// # Errors
    /// [`crate::OplogError::InUse`], or errors of the file system.
    pub fn lock(path: &Path) -> Result<Self, crate::OplogError> {
        Self::lock_on(Arc::new(LocalFileSystem), path)
    }

    /// As [`Self::lock`], with another storage.
    ///
    /// # Errors
    /// As [`Self::lock`].
    pub fn lock_on(disk: Arc<dyn LogStorage>, path: &Path) -> Result<Self, crate::OplogError> {
        disk.create_folder(path).map_err(crate::io_error(path))?;
        let lock_path = path.join("lock");
        match disk.lock(&lock_path) {
            Ok(lock) => Ok(Self { path: path.to_owned(), disk, _lock: lock }),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(crate::OplogError::InUse(path.to_owned()))
            }
            Err(error) => Err(crate::io_error(lock_path)(error)),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Free bytes on the disk.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn free_bytes(&self) -> io::Result<u64> {
        self.disk.free_bytes(&self.path)
    }

    pub(crate) fn disk(&self) -> &dyn LogStorage {
        &*self.disk
    }

    pub(crate) fn flush(&self) -> io::Result<()> {
        self.disk.flush_folder(&self.path)
    }

    /// Replaces a file atomically: after a crash it has either the old or the new content.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn put(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.replace(name, bytes)?;
        self.flush()
    }

    /// As [`Self::put`], but without flushing the directory: a later crash of the machine may restore the old content.
    pub(crate) fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let unfinished = self.path.join(format!("{name}.tmp"));
        let mut file = self.disk.open(&unfinished)?;
        file.truncate(0)?;
        file.append(bytes)?;
        file.flush()?;
        self.disk.rename(&unfinished, &self.path.join(name))
    }

    /// The content of a file; `None` if it does not exist.
    pub(crate) fn get(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        match self.disk.read(&self.path.join(name)) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Files named `PREFIX-NUMBER.SUFFIX`, sorted by number.
    pub(crate) fn numbered(&self, prefix: &str, suffix: &str) -> io::Result<Vec<(u64, PathBuf)>> {
        let number = |name: &str| {
            let digits =
                name.strip_prefix(prefix)?.strip_prefix('-')?.strip_suffix(suffix)?.strip_suffix('.')?;
            digits.parse().ok()
        };
        let names = self.disk.list(&self.path)?;
        let mut files: Vec<(u64, PathBuf)> =
            names.iter().filter_map(|name| Some((number(name)?, self.path.join(name)))).collect();
        files.sort();
        Ok(files)
    }

    /// Path of the file `PREFIX-NUMBER.SUFFIX`.
    pub(crate) fn file(&self, prefix: &str, number: u64, suffix: &str) -> PathBuf {
        self.path.join(format!("{prefix}-{number:020}.{suffix}"))
    }
}

impl std::fmt::Debug for LogDirectory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogDirectory").field("path", &self.path).finish_non_exhaustive()
    }
}
