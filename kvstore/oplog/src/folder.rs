//! Where files are made. A test can put a disk of its own in its place.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// A file that grows.
pub trait Growing: Send {
    /// Writes at its end.
    ///
    /// # Errors
    /// As the file system. Then a part may have been written.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Cuts it off.
    ///
    /// # Errors
    /// As the file system.
    fn cut(&mut self, length: u64) -> io::Result<()>;

    /// Flushes its bytes to the disk.
    ///
    /// # Errors
    /// As the file system.
    fn flush(&mut self) -> io::Result<()>;

    /// What flushes the bytes written so far, while more are written.
    ///
    /// # Errors
    /// As the file system.
    fn flusher(&self) -> io::Result<Flush>;
}

/// Flushes a file.
pub type Flush = Box<dyn FnOnce() -> io::Result<()> + Send>;

impl Growing for File {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.set_len(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sync_data()
    }

    fn flusher(&self) -> io::Result<Flush> {
        let file = self.try_clone()?;
        Ok(Box::new(move || file.sync_data()))
    }
}

/// How files are opened for writing.
pub trait Disk: Send + Sync {
    /// Opens a file at its end, or makes it.
    ///
    /// # Errors
    /// As the file system.
    fn open(&self, path: &Path) -> io::Result<Box<dyn Growing>>;
}

/// The file system.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FileSystem;

impl Disk for FileSystem {
    fn open(&self, path: &Path) -> io::Result<Box<dyn Growing>> {
        Ok(Box::new(OpenOptions::new().append(true).create(true).open(path)?))
    }
}

/// A folder that belongs to one process.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// Locked as long as this lives.
    _lock: File,
}

impl Folder {
    /// Takes a folder, which is made if it is not there.
    ///
    /// # Errors
    /// [`crate::Error::InUse`], or what the file system says.
    pub fn take(path: &Path) -> Result<Self, crate::Error> {
        fs::create_dir_all(path).map_err(crate::failed(path))?;
        let lock_path = path.join("lock");
        let lock = OpenOptions::new().write(true).create(true).truncate(false).open(&lock_path);
        let lock = lock.map_err(crate::failed(&lock_path))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), _lock: lock }),
            Err(fs::TryLockError::WouldBlock) => Err(crate::Error::InUse(path.to_owned())),
            Err(fs::TryLockError::Error(problem)) => Err(crate::failed(lock_path)(problem)),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Flushes what files there are.
    pub(crate) fn flush(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    /// Puts a whole file in place of the one of that name. After a crash it is the old one or the new one.
    ///
    /// # Errors
    /// As the file system.
    pub fn put(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let unfinished = self.path.join(format!("{name}.tmp"));
        let mut file = File::create(&unfinished)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&unfinished, self.path.join(name))?;
        self.flush()
    }

    /// The files called `PREFIX-NUMBER.SUFFIX`, by number.
    pub(crate) fn numbered(&self, prefix: &str, suffix: &str) -> io::Result<Vec<(u64, PathBuf)>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            let number = path.file_name().and_then(|name| name.to_str()).and_then(|name| {
                let digits =
                    name.strip_prefix(prefix)?.strip_prefix('-')?.strip_suffix(suffix)?.strip_suffix('.')?;
                digits.parse().ok()
            });
            files.extend(number.map(|number| (number, path)));
        }
        files.sort();
        Ok(files)
    }

    /// The path of such a file.
    pub(crate) fn file(&self, prefix: &str, number: u64, suffix: &str) -> PathBuf {
        self.path.join(format!("{prefix}-{number:020}.{suffix}"))
    }
}
