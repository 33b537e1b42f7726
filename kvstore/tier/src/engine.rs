//! I/O engine of the file: pooled io_uring rings, or threads.

use std::fs::File;
use std::io;

use crate::io_chunk::{IoChunk, IoDirection, IoVisitor};
use crate::ring_pool::IoRingPool;
use crate::threads;

pub(crate) struct IoEngine {
    /// Maximum bytes of a chunk.
    bytes: usize,
    /// `None`: use threads instead.
    rings: Option<IoRingPool>,
}

impl std::fmt::Debug for IoEngine {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("IoEngine").field("bytes", &self.bytes).field("io_uring", &self.is_ring()).finish()
    }
}

impl IoEngine {
    /// Creates an engine for chunks of at most `bytes` bytes.
    pub(crate) fn new(bytes: usize, io_uring: bool) -> Self {
        let rings = io_uring.then(|| IoRingPool::new(bytes)).transpose();
        match &rings {
            Ok(Some(_)) => {}
            Ok(None) => tracing::info!("io_uring is not available (disabled): the tier uses threads"),
            Err(problem) => tracing::info!("io_uring is not available ({problem}): the tier uses threads"),
        }
        Self { bytes, rings: rings.ok().flatten() }
    }

    pub(crate) fn is_ring(&self) -> bool {
        self.rings.is_some()
    }

    /// Buffers quarantined after an io_uring failure, because the kernel may still use them.
    pub(crate) fn quarantined_buffers(&self) -> usize {
        self.rings.as_ref().map_or(0, IoRingPool::quarantined)
    }

    /// Transfers all chunks; returns when all have completed.
    ///
    /// # Errors
    /// When the engine itself fails. Errors of single chunks are passed to `visit`.
    pub(crate) fn transfer(
        &self,
        file: &File,
        direction: IoDirection,
        chunks: &[IoChunk],
        visit: &mut dyn IoVisitor,
    ) -> io::Result<()> {
        match &self.rings {
            Some(rings) => rings.transfer(file, direction, chunks, visit),
            None => {
                threads::transfer(file, direction, chunks, self.bytes, visit);
                Ok(())
            }
        }
    }
}
