//! A log of numbered records and snapshots in a folder.
//!
//! Whoever changes a state appends what has become true ([`OperationLog::append`]) and answers for it once it is written ([`OperationLog::commit`]).
//! Those who append meanwhile are written with it. After a crash the records are read again ([`OperationLog::reader`]), from the last
//! snapshot on ([`snapshot`]); older ones are then of no use ([`OperationLog::prune`]).
//!
//! - A record is written or not: each has a checksum, and what a crash left of the last one is cut off when the log is opened.
//! - Damage is distinguished from such a torn tail. A log with missing or unreadable records reports them
//!   ([`LogRecoveryReport::damage`]), and nothing is truncated: the log continues in a new file, and [`LogDirectory::preserve`] keeps the old ones.
//! - A disk that is full makes [`OperationLog::commit`] fail and loses nothing: what could not be written stays in memory, in its order, and is
//!   written when there is room.
//! - A process that dies loses nothing that was committed. A machine that dies may lose what was not yet flushed to its disk, unless
//!   [`OplogOptions::flush_always`] is set; the log knows when it is opened whether that can have happened ([`LogRecoveryReport::may_lack_records`]).

mod damage;
mod directory;
mod disk;
mod file;
mod frame;
mod log;
mod reader;
mod scan;
pub mod snapshot;
mod synced_mark;

pub use damage::LogDamage;
pub use directory::LogDirectory;
pub use disk::{AppendFile, DirectoryLock, FlushOperation, LocalFileSystem, LogStorage};
pub use log::{LogFiles, LogRecoveryReport, OperationLog, OplogOptions};
pub use reader::LogReader;

use std::io;
use std::path::PathBuf;

/// Longest record in bytes.
pub const MAX_RECORD: usize = 16 << 20;

/// Why a log or a snapshot cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OplogError {
    /// The file system says no.
    #[error("{path}: {problem}", path = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What it says.
        problem: io::Error,
    },
    /// Another process has the folder open.
    #[error("{path} is in use by another process; give each its own folder", path = .0.display())]
    InUse(PathBuf),
    /// A file is not what was written. What follows it cannot be trusted either.
    #[error("{path} is damaged at byte {offset}: {reason}; move the folder away to begin anew", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where.
        offset: u64,
        /// What is wrong.
        reason: &'static str,
    },
    /// Records that were asked for have been pruned.
    #[error("the log begins with record {first}, and {wanted} was asked for")]
    Pruned {
        /// The oldest that there is.
        first: u64,
        /// The one wanted.
        wanted: u64,
    },
}

pub(crate) fn io_error(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> OplogError {
    let path = path.into();
    move |problem| OplogError::Io { path, problem }
}
