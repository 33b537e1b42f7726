//! A folder that belongs to one process.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::disk::{DirectoryLock, LocalFileSystem, LogStorage};

/// A folder that belongs to one process, and the disk that it is on.
pub struct LogDirectory {
    path: PathBuf,
    disk: Arc<dyn LogStorage>,
    /// Locked as long as this lives.
    _lock: DirectoryLock,
}

impl LogDirectory {
    /// Takes a folder, which is made if it is not there.
    ///
    /// # Errors
    /// [`crate::OplogError::InUse`], or what the file system says.
    pub fn lock(path: &Path) -> Result<Self, crate::OplogError> {
        Self::lock_on(Arc::new(LocalFileSystem), path)
    }

    /// The same on another disk.
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

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that can still be written.
    ///
    /// # Errors
    /// As the file system.
    pub fn free_bytes(&self) -> io::Result<u64> {
        self.disk.free_bytes(&self.path)
    }

    pub(crate) fn disk(&self) -> &dyn LogStorage {
        &*self.disk
    }

    /// Flushes what files there are.
    pub(crate) fn flush(&self) -> io::Result<()> {
        self.disk.flush_folder(&self.path)
    }

    /// Puts a whole file in place of the one of that name. After a crash it is the old one or the new one.
    ///
    /// # Errors
    /// As the file system.
    pub fn put(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.replace(name, bytes)?;
        self.flush()
    }

    /// [`Self::put`], but a crash of the machine some time later may still bring the old one back.
    pub(crate) fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let unfinished = self.path.join(format!("{name}.tmp"));
        let mut file = self.disk.open(&unfinished)?;
        file.truncate(0)?;
        file.append(bytes)?;
        file.flush()?;
        self.disk.rename(&unfinished, &self.path.join(name))
    }

    /// The content of a file, none if it is not there.
    pub(crate) fn get(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        match self.disk.read(&self.path.join(name)) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The files called `PREFIX-NUMBER.SUFFIX`, by number.
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

    /// The path of such a file.
    pub(crate) fn file(&self, prefix: &str, number: u64, suffix: &str) -> PathBuf {
        self.path.join(format!("{prefix}-{number:020}.{suffix}"))
    }
}

impl std::fmt::Debug for LogDirectory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Folder").field("path", &self.path).finish_non_exhaustive()
    }
}
