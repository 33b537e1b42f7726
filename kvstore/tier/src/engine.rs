//! How pieces of the file are read and written: rings that threads take turns with, or threads.

use std::fs::File;
use std::io;

use crate::ring_pool::IoRingPool;
use crate::threads;

/// A part of the file. Both numbers are multiples of what direct I/O wants.
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

/// What is done with the bytes of a transfer, in whichever order its pieces come.
pub(crate) trait IoVisitor {
    /// Gives the bytes of a piece to be written.
    fn fill(&mut self, piece: usize, bytes: &mut [u8]);
    /// Takes the bytes of a piece that was read, or hears that it was written, or what went wrong.
    fn complete(&mut self, piece: usize, outcome: io::Result<&[u8]>);
}

pub(crate) struct IoEngine {
    /// Of a piece, at most.
    bytes: usize,
    /// Without them, threads read and write.
    rings: Option<IoRingPool>,
}

impl std::fmt::Debug for IoEngine {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Engine").field("bytes", &self.bytes).field("io_uring", &self.is_ring()).finish()
    }
}

impl IoEngine {
    /// For pieces of at most `bytes` bytes.
    pub(crate) fn new(bytes: usize, io_uring: bool) -> Self {
        let lanes = if io_uring {
            IoRingPool::new(bytes).map_err(|problem| problem.to_string())
        } else {
            Err("off".into())
        };
        if let Err(why) = &lanes {
            tracing::info!("the tier does without io_uring ({why}): it reads and writes with threads");
        }
        Self { bytes, rings: lanes.ok() }
    }

    pub(crate) fn is_ring(&self) -> bool {
        self.rings.is_some()
    }

    /// Buffers that are out of use because io_uring has failed and the kernel may still use them.
    pub(crate) fn quarantined_buffers(&self) -> usize {
        self.rings.as_ref().map_or(0, IoRingPool::quarantined)
    }

    /// Transfers all pieces, and returns when each is over.
    ///
    /// # Errors
    /// When the means itself fails. What a piece comes to is told to `visit`.
    pub(crate) fn transfer(
        &self,
        file: &File,
        direction: IoDirection,
        pieces: &[IoChunk],
        visit: &mut dyn IoVisitor,
    ) -> io::Result<()> {
        match &self.rings {
            Some(lanes) => lanes.transfer(file, direction, pieces, visit),
            None => {
                threads::transfer(file, direction, pieces, self.bytes, visit);
                Ok(())
            }
        }
    }
}
