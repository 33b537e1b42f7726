//! Storage of a log directory. Tests can replace the machine's file system by an implementation of [`LogStorage`].

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write as _};
use std::path::Path;

/// A file that is written only at its end.
pub trait AppendFile: Send {
    /// Appends bytes to the file.
    ///
    /// # Errors
    /// Errors of the file system. A part of the bytes may be written then.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Truncates the file to this length in bytes.
    ///
    /// # Errors
    /// Errors of the file system.
    fn truncate(&mut self, length: u64) -> io::Result<()>;

    /// Flushes all written bytes to the disk.
    ///
    /// # Errors
    /// Errors of the file system.
    fn flush(&mut self) -> io::Result<()>;

    /// An operation that flushes the bytes written so far, concurrently with further writes.
    ///
    /// # Errors
    /// Errors of the file system.
    fn flush_operation(&self) -> io::Result<FlushOperation>;
}

/// Deferred flush of a file.
pub type FlushOperation = Box<dyn FnOnce() -> io::Result<()> + Send>;

impl AppendFile for File {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.set_len(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sync_data()
    }

    fn flush_operation(&self) -> io::Result<FlushOperation> {
        let file = self.try_clone()?;
        Ok(Box::new(move || file.sync_data()))
    }
}

/// Lock of a directory against other processes, released on drop.
#[derive(Debug, Default)]
pub struct DirectoryLock(#[expect(dead_code, reason = "the lock is held by the open file")] Option<File>);

/// The file system operations of a log. By default every operation uses the machine's file system.
pub trait LogStorage: Send + Sync {
    /// Opens a file for appending, or creates it.
    ///
    /// # Errors
    /// Errors of the file system.
    fn open(&self, path: &Path) -> io::Result<Box<dyn AppendFile>> {
        Ok(Box::new(OpenOptions::new().append(true).create(true).open(path)?))
    }

    /// Reads the whole content of a file.
    ///
    /// # Errors
    /// Errors of the file system.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        fs::read(path)
    }

    /// Opens a file to read it from its start.
    ///
    /// # Errors
    /// Errors of the file system.
    fn open_to_read(&self, path: &Path) -> io::Result<Box<dyn Read + Send>> {
        Ok(Box::new(io::Cursor::new(self.read(path)?)))
    }

    /// Size of a file in bytes.
    ///
    /// # Errors
    /// Errors of the file system.
    fn length(&self, path: &Path) -> io::Result<u64> {
        Ok(fs::metadata(path)?.len())
    }

    /// Names of the files and subdirectories of a directory.
    ///
    /// # Errors
    /// Errors of the file system.
    fn list(&self, folder: &Path) -> io::Result<Vec<String>> {
        let names = fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
        Ok(names.collect::<io::Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    /// Creates a directory and its parents.
    ///
    /// # Errors
    /// Errors of the file system.
    fn create_folder(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)
    }

    /// Removes a directory with its contents.
    ///
    /// # Errors
    /// Errors of the file system.
    fn remove_folder(&self, folder: &Path) -> io::Result<()> {
        fs::remove_dir_all(folder)
    }

    /// Removes a file.
    ///
    /// # Errors
    /// Errors of the file system.
    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    /// Renames a file. A file with the new name is replaced atomically.
    ///
    /// # Errors
    /// Errors of the file system.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    /// Creates a hard link to a file, or copies it on file systems without hard links.
    ///
    /// # Errors
    /// Errors of the file system.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to).or_else(|_| fs::copy(from, to).map(drop))
    }

    /// Flushes the entries of a directory.
    ///
    /// # Errors
    /// Errors of the file system.
    fn flush_folder(&self, folder: &Path) -> io::Result<()> {
        File::open(folder)?.sync_all()
    }

    /// Free bytes on the disk of a directory.
    ///
    /// # Errors
    /// Errors of the file system.
    fn free_bytes(&self, folder: &Path) -> io::Result<u64> {
        let status = rustix::fs::statvfs(folder)?;
        Ok(status.f_bavail.saturating_mul(status.f_frsize))
    }

    /// Locks a file, which is created if it does not exist.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if another process has locked it; errors of the file system.
    fn lock(&self, path: &Path) -> io::Result<DirectoryLock> {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
        file.try_lock()?;
        Ok(DirectoryLock(Some(file)))
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub struct LocalFileSystem;

impl LogStorage for LocalFileSystem {
    fn open_to_read(&self, path: &Path) -> io::Result<Box<dyn Read + Send>> {
        Ok(Box::new(File::open(path)?))
    }
}
