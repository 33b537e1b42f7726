//! A log of numbered records and snapshots in a folder.
//!
//! Whoever changes a state appends what has become true ([`Log::append`]) and answers for it once it is written ([`Log::commit`]).
//! Those who append meanwhile are written with it. After a crash the records are read again ([`Log::reader`]), from the last
//! snapshot on ([`snapshot`]); older ones are then of no use ([`Log::prune`]).
//!
//! - A record is written or not: each has a checksum, and what a crash left of the last one is cut off when the log is opened.
//! - Damage is distinguished from such a torn tail. A log with missing or unreadable records reports them
//!   ([`Opened::damage`]), and nothing is truncated: the log continues in a new file, and [`Folder::preserve`] keeps the old ones.
//! - A disk that is full makes [`Log::commit`] fail and loses nothing: what could not be written stays in memory, in its order, and is
//!   written when there is room.
//! - A process that dies loses nothing that was committed. A machine that dies may lose what was not yet flushed to its disk, unless
//!   [`Options::flush_always`] is set; the log knows when it is opened whether that can have happened ([`Opened::may_lack_records`]).

mod damage;
mod disk;
mod file;
mod folder;
mod frame;
mod log;
mod mark;
mod reader;
mod scan;
pub mod snapshot;

pub use damage::LogDamage;
pub use disk::{Disk, FileSystem, Flush, FolderLock, Growing};
pub use folder::Folder;
pub use log::{Log, LogFiles, Opened, Options};
pub use reader::Reader;

use std::io;
use std::path::PathBuf;

/// Longest record in bytes.
pub const MAX_RECORD: usize = 16 << 20;

/// Why a log or a snapshot cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
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
    #[error("{path} is damaged at byte {at}: {what}; move the folder away to begin anew", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where.
        at: u64,
        /// What is wrong.
        what: &'static str,
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

pub(crate) fn failed(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
    let path = path.into();
    move |problem| Error::Io { path, problem }
}
