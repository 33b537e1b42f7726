//! Block store in a file on NVMe, for objects that do not fit in memory.
//!
//! - [`FileTier::put`] writes an object and evicts the least recently used ones if needed.
//! - [`FileTier::get`] and [`FileTier::get_many`] read many blocks at a time with io_uring, or with threads where it is not permitted.
//! - Each block has a checksum. A corrupt object is dropped and reported, never served.
//! - A killed process loses no complete object and leaves no partial one. After a power loss it is unknown what had reached the disk: then
//!   the tier starts empty. It is a cache.

mod block;
mod block_io;
mod buffer;
mod engine;
mod eviction;
mod file;
mod index;
mod io_chunk;
mod page;
mod ring;
mod ring_pool;
mod scan;
mod superblock;
mod threads;
mod tier;

use std::io;
use std::path::PathBuf;

pub use page::{MAX_BLOCKS, MAX_KEY};
pub use tier::{FileTier, TierCounts};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierOptions {
    /// Path of the file, created if missing.
    pub path: PathBuf,
    /// Size of the file in bytes, reserved at once.
    pub capacity: u64,
    /// Block size in bytes, a multiple of 4096. An object uses whole blocks, at most [`MAX_BLOCKS`].
    pub block: u32,
    /// Whether to use io_uring where it is permitted.
    pub io_uring: bool,
}

impl TierOptions {
    /// Options for a file of `capacity` bytes with blocks of 256 KiB.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, capacity: u64) -> Self {
        Self { path: path.into(), capacity, block: 256 << 10, io_uring: true }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TierError {
    /// The file system or the disk returned an error.
    #[error("{path}: {problem}", path = path.display())]
    Io {
        /// Path of the tier's file.
        path: PathBuf,
        /// Error of the operating system.
        problem: io::Error,
    },
    /// Another process has the file open.
    #[error("{path} is in use by another process; use a separate file per process", path = .0.display())]
    InUse(PathBuf),
    #[error("{0}")]
    Options(&'static str),
    /// The key has an invalid length.
    #[error("a key of {0} bytes; the limit is 1 to {MAX_KEY}")]
    Key(usize),
    /// The object has an invalid length.
    #[error("an object of {len} bytes; the limit is 1 to {max}")]
    Length {
        /// Length of the object in bytes.
        len: u64,
        max: u64,
    },
    /// All blocks are being read or written.
    #[error("all blocks are being read or written; retry later")]
    Busy,
    /// The object failed its checksum and was dropped.
    #[error("an object of {len} bytes failed its checksum and was dropped (block {block} of the file)")]
    Damaged {
        /// Length of the object in bytes.
        len: u64,
        /// Number of the corrupt block.
        block: u32,
    },
}
