//! Opening, locking and reserving the file.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, OFlags};

use crate::TierError;
use crate::buffer::ALIGN;
use crate::engine::IoEngine;
use crate::io_chunk::{IoChunk, IoDirection, IoVisitor};
use crate::superblock::Superblock;

/// Time allowed for a disk to finish the I/O of a killed process.
const LOCK_WAIT: Duration = Duration::from_secs(3);

/// Opens the file with direct I/O: the tier is a cache itself, and its blocks are read once.
pub(crate) fn open_direct(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    let flag = i32::try_from(OFlags::DIRECT.bits()).unwrap_or(0);
    match options.clone().custom_flags(flag).open(path) {
        Err(problem) if problem.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {
            tracing::info!(
                "{}: direct I/O is not supported; the file is also cached by the system",
                path.display()
            );
            options.open(path)
        }
        opened => opened,
    }
}

/// Locks the file. The I/O of a killed process, and so its lock, may end a little later than the process.
pub(crate) fn lock(file: &File, path: &Path) -> Result<(), TierError> {
    let started = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(problem)) => {
                return Err(TierError::Io { path: path.to_owned(), problem });
            }
            Err(TryLockError::WouldBlock) if started.elapsed() > LOCK_WAIT => {
                return Err(TierError::InUse(path.to_owned()));
            }
            Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Reserves the file's space on its disk.
pub(crate) fn reserve(file: &File, len: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len) {
        Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(len),
        reserved => Ok(reserved?),
    }
}

/// Content of the file's first page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileStart {
    /// No content: the file is new.
    Empty,
    Superblock(Superblock),
    /// Corrupt, or not a tier's file.
    Damaged,
}

/// Reads the first page of the file.
pub(crate) fn read_start(file: &File, engine: &IoEngine) -> io::Result<FileStart> {
    struct FirstPageReader(FileStart, Option<io::Error>);
    impl IoVisitor for FirstPageReader {
        fn fill(&mut self, _: usize, _: &mut [u8]) {}
        fn complete(&mut self, _: usize, outcome: io::Result<&[u8]>) {
            match outcome {
                Ok(bytes) => {
                    self.0 = match Superblock::decode(bytes) {
                        Some(superblock) => FileStart::Superblock(superblock),
                        // A file whose space was reserved, but whose first start was interrupted.
                        None if bytes.iter().all(|byte| *byte == 0) => FileStart::Empty,
                        None => FileStart::Damaged,
                    };
                }
                // The file is shorter than a superblock.
                Err(problem) if problem.kind() == io::ErrorKind::UnexpectedEof => {}
                Err(problem) => self.1 = Some(problem),
            }
        }
    }
    let length = file.metadata()?.len();
    let mut first = FirstPageReader(FileStart::Empty, None);
    engine.transfer(file, IoDirection::Read, &[IoChunk { offset: 0, len: ALIGN }], &mut first)?;
    match first {
        FirstPageReader(_, Some(problem)) => Err(problem),
        FirstPageReader(FileStart::Empty, None) if length > 0 && length < ALIGN as u64 => {
            Ok(FileStart::Damaged)
        }
        FirstPageReader(start, None) => Ok(start),
    }
}
