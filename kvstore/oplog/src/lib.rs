//! An operation log of numbered records, with snapshots, in a directory.
//!
//! A program appends a record for each change of its state ([`OperationLog::append`]) and acknowledges the change after it is written
//! ([`OperationLog::commit`]). Records appended by other threads in the meantime are written in the same batch. After a crash the
//! records are replayed ([`OperationLog::reader`]) from the last snapshot ([`snapshot`]); older ones can be removed
//! ([`OperationLog::prune`]).
//!
//! - Records are atomic: each has a checksum, and an incompletely written last record is truncated when the log is opened.
//! - Damage is distinguished from such a torn tail. A log with missing or unreadable records reports them
//!   ([`LogRecoveryReport::damage`]), and nothing is truncated: the log continues in a new file, and
//!   [`LogDirectory::preserve`] preserves the old ones.
//! - On a full disk [`OperationLog::commit`] fails without loss: records that could not be written stay in memory, in order, and are
//!   written when space is free.
//! - A crash of the process loses no committed record. A crash of the machine may lose records that were not flushed, unless
//!   [`OplogOptions::flush_always`] is set; opening the log reports whether that is possible ([`LogRecoveryReport::may_lack_records`]).

mod block;
mod damage;
mod directory;
mod disk;
mod file;
mod frame;
mod log;
mod log_files;
mod options;
mod pending;
mod reader;
mod scan;
mod shutdown_mark;
pub mod snapshot;
mod synced_mark;

pub use block::RecordBlock;
pub use damage::LogDamage;
pub use directory::LogDirectory;
pub use disk::{AppendFile, DirectoryLock, FlushOperation, LocalFileSystem, LogStorage};
pub use log::{LogRecoveryReport, OperationLog};
pub use log_files::LogFiles;
pub use options::OplogOptions;
pub use reader::{LogBlockReader, LogReader};

use std::io;
use std::path::PathBuf;

/// Maximum size of a record in bytes.
pub const MAX_RECORD: usize = 16 << 20;

/// Why a log or a snapshot cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OplogError {
    /// The file system returned an error.
    #[error("{path}: {problem}", path = path.display())]
    Io {
        /// Path of the file or directory.
        path: PathBuf,
        problem: io::Error,
    },
    /// Another process has locked the directory.
    #[error("{path} is in use by another process; each process needs its own directory", path = .0.display())]
    InUse(PathBuf),
    /// A file is corrupt. Records after the damage may be invalid, too.
    #[error("{path} is damaged at byte {offset}: {reason}; move the directory away to start with an empty log", path = path.display())]
    Damaged {
        path: PathBuf,
        /// Offset of the damage in bytes.
        offset: u64,
        reason: &'static str,
    },
    /// The requested records were pruned.
    #[error("record {wanted} was pruned; the log starts with record {first}")]
    Pruned {
        /// Number of the oldest record.
        first: u64,
        /// Number of the requested record.
        wanted: u64,
    },
}

pub(crate) fn io_error(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> OplogError {
    let path = path.into();
    move |problem| OplogError::Io { path, problem }
}
