//! Transfers of chunks of the file: what every I/O engine reads or writes.

use std::io;

/// A range of the file, aligned for direct I/O.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IoChunk {
    pub(crate) offset: u64,
    pub(crate) len: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IoDirection {
    Read,
    Write,
}

/// Callbacks of a transfer, in arbitrary order of its chunks.
pub(crate) trait IoVisitor {
    /// Fills a chunk that is about to be written.
    fn fill(&mut self, chunk: usize, bytes: &mut [u8]);
    /// Called when a chunk was read or written, with its bytes or the error.
    fn complete(&mut self, chunk: usize, outcome: io::Result<&[u8]>);
}
