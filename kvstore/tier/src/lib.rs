//! A store of blocks in a file on NVMe, for what has no room in memory.
//!
//! - [`FileTier::put`] writes an object and makes room for it: those that were not asked for longest go first.
//! - [`FileTier::get`] and [`FileTier::get_many`] read through io_uring, many blocks at a time; where that is not permitted, with threads.
//! - Each block has a checksum. What is not what was written is dropped and reported, never served.
//! - A process that is killed loses no object that was put, and leaves none that was half written. After a machine lost its power
//!   nothing is known of what had reached the disk: then the tier begins anew. It is a cache.

mod block;
mod block_io;
mod buffer;
mod engine;
mod eviction;
mod file;
mod index;
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

/// How a tier is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierOptions {
    /// The file; made if it is missing.
    pub path: PathBuf,
    /// Its size in bytes, all of it taken at once.
    pub capacity: u64,
    /// Bytes of a block, a multiple of 4096. An object takes whole blocks, and at most [`MAX_BLOCKS`] of them.
    pub block: u32,
    /// Whether io_uring is used where it is permitted.
    pub io_uring: bool,
}

impl TierOptions {
    /// A file of this many bytes, in blocks of 256 KiB.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, capacity: u64) -> Self {
        Self { path: path.into(), capacity, block: 256 << 10, io_uring: true }
    }
}

/// Why something did not happen.
#[derive(Debug, thiserror::Error)]
pub enum TierError {
    /// The file system or the disk says no.
    #[error("{path}: {problem}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What it says.
        problem: io::Error,
    },
    /// Another process has the file open.
    #[error("{path} is in use by another process; give each its own file", path = .0.display())]
    InUse(PathBuf),
    /// A size that cannot be.
    #[error("{0}")]
    Options(&'static str),
    /// A key that does not fit.
    #[error("a key of {0} bytes; it has 1 to {MAX_KEY}")]
    Key(usize),
    /// An object that does not fit.
    #[error("an object of {len} bytes; it has 1 to {max}")]
    Length {
        /// Its length.
        len: u64,
        /// The longest that fits.
        max: u64,
    },
    /// All blocks are being read or written just now.
    #[error("all blocks are in use just now")]
    Busy,
    /// What was read is not what was written. The object has been dropped.
    #[error("an object of {len} bytes was damaged and is dropped (block {block} of the file)")]
    Damaged {
        /// Its length.
        len: u64,
        /// Which block.
        block: u32,
    },
}
