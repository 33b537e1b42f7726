//! The disk below a folder. A test can put one of its own in the place of the file system's.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

/// A file that grows.
pub trait AppendFile: Send {
    /// Writes at its end.
    ///
    /// # Errors
    /// As the file system. Then a part may have been written.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Cuts it off.
    ///
    /// # Errors
    /// As the file system.
    fn truncate(&mut self, length: u64) -> io::Result<()>;

    /// Flushes its bytes to the disk.
    ///
    /// # Errors
    /// As the file system.
    fn flush(&mut self) -> io::Result<()>;

    /// What flushes the bytes written so far, while more are written.
    ///
    /// # Errors
    /// As the file system.
    fn flush_operation(&self) -> io::Result<FlushOperation>;
}

/// Flushes a file.
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

/// Keeps other processes out of a folder as long as it lives.
#[derive(Debug, Default)]
pub struct DirectoryLock(#[expect(dead_code, reason = "the lock is held by the open file")] Option<File>);

/// What a log needs of a file system. The default of every operation is the machine's own file system.
pub trait LogStorage: Send + Sync {
    /// Opens a file at its end, or creates it.
    ///
    /// # Errors
    /// As the file system.
    fn open(&self, path: &Path) -> io::Result<Box<dyn AppendFile>> {
        Ok(Box::new(OpenOptions::new().append(true).create(true).open(path)?))
    }

    /// The whole content of a file.
    ///
    /// # Errors
    /// As the file system.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        fs::read(path)
    }

    /// The bytes of a file.
    ///
    /// # Errors
    /// As the file system.
    fn length(&self, path: &Path) -> io::Result<u64> {
        Ok(fs::metadata(path)?.len())
    }

    /// The names of the files and folders in a folder.
    ///
    /// # Errors
    /// As the file system.
    fn list(&self, folder: &Path) -> io::Result<Vec<String>> {
        let names = fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
        Ok(names.collect::<io::Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    /// Creates a folder and those above it.
    ///
    /// # Errors
    /// As the file system.
    fn create_folder(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)
    }

    /// Removes a folder with all that is in it.
    ///
    /// # Errors
    /// As the file system.
    fn remove_folder(&self, folder: &Path) -> io::Result<()> {
        fs::remove_dir_all(folder)
    }

    /// Removes a file.
    ///
    /// # Errors
    /// As the file system.
    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    /// Renames a file. One of the new name is replaced at once.
    ///
    /// # Errors
    /// As the file system.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    /// Gives a file another name besides its own, or copies it where files have only one.
    ///
    /// # Errors
    /// As the file system.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to).or_else(|_| fs::copy(from, to).map(drop))
    }

    /// Flushes the names of the files in a folder.
    ///
    /// # Errors
    /// As the file system.
    fn flush_folder(&self, folder: &Path) -> io::Result<()> {
        File::open(folder)?.sync_all()
    }

    /// Bytes that can still be written to the disk of a folder.
    ///
    /// # Errors
    /// As the file system.
    fn free_bytes(&self, folder: &Path) -> io::Result<u64> {
        let found = rustix::fs::statvfs(folder)?;
        Ok(found.f_bavail.saturating_mul(found.f_frsize))
    }

    /// Locks a file, which is created if it is not there.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if another process has it locked; as the file system.
    fn lock(&self, path: &Path) -> io::Result<DirectoryLock> {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
        file.try_lock()?;
        Ok(DirectoryLock(Some(file)))
    }
}

/// The machine's file system.
#[derive(Debug, Clone, Copy, Default)]
pub struct LocalFileSystem;

impl LogStorage for LocalFileSystem {}
