//! Transfers of objects block by block, in both directions.

use std::io;
use std::path::Path;
use std::sync::Arc;

use moongate_memory::Crc32c;

use crate::TierError;
use crate::block::{BlockIndex, TierLayout};
use crate::index::TierObject;
use crate::io_chunk::IoVisitor;

/// Number of object bytes in its block with this number.
pub(crate) fn part_len(len: u64, number: usize, block_size: u32) -> u64 {
    let before = number as u64 * u64::from(block_size);
    len.saturating_sub(before).min(u64::from(block_size))
}

/// Writes the blocks of an object.
pub(crate) struct BlockWriter<F> {
    pub(crate) len: u64,
    pub(crate) block_size: u32,
    /// CRC-32C of each filled part.
    pub(crate) crcs: Vec<u32>,
    pub(crate) problem: Option<io::Error>,
    pub(crate) fill: F,
}

impl<F: FnMut(u64, &mut [u8])> IoVisitor for BlockWriter<F> {
    fn fill(&mut self, chunk: usize, bytes: &mut [u8]) {
        let len = usize::try_from(part_len(self.len, chunk, self.block_size)).unwrap_or(usize::MAX);
        let (part, padding) = bytes.split_at_mut(len.min(bytes.len()));
        (self.fill)(chunk as u64 * u64::from(self.block_size), part);
        padding.fill(0);
        self.crcs.push(Crc32c::of(part));
    }

    fn complete(&mut self, _: usize, outcome: io::Result<&[u8]>) {
        if let Err(problem) = outcome {
            self.problem = Some(problem);
        }
    }
}

/// A block of an object: index of the requested object, and number of its block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ObjectBlock {
    pub(crate) object: usize,
    pub(crate) number: usize,
}

/// Why a block could not be read.
#[derive(Debug)]
pub(crate) enum BlockReadError {
    Io(io::Error),
    Damaged { len: u64, block: BlockIndex },
}

impl BlockReadError {
    pub(crate) fn into_error(self, path: &Path) -> TierError {
        match self {
            Self::Io(problem) => TierError::Io { path: path.to_owned(), problem },
            Self::Damaged { len, block } => TierError::Damaged { len, block: block.0 },
        }
    }
}

/// Reads the blocks of several objects.
pub(crate) struct BlocksReader<'a, F> {
    pub(crate) layout: TierLayout,
    /// Object block of each chunk.
    pub(crate) parts: Vec<ObjectBlock>,
    pub(crate) failures: Vec<(usize, BlockReadError)>,
    pub(crate) objects: &'a [Option<Arc<TierObject>>],
    pub(crate) take: F,
}

impl<F: FnMut(usize, u64, &[u8])> IoVisitor for BlocksReader<'_, F> {
    fn fill(&mut self, _: usize, _: &mut [u8]) {}

    fn complete(&mut self, chunk: usize, outcome: io::Result<&[u8]>) {
        let Some(&ObjectBlock { object, number }) = self.parts.get(chunk) else { return };
        let Some(stored) = self.objects.get(object).and_then(Option::as_ref) else { return };
        let bytes = match outcome {
            Ok(bytes) => bytes,
            Err(problem) => return self.failures.push((object, BlockReadError::Io(problem))),
        };
        let len = usize::try_from(part_len(stored.len, number, self.layout.block_size)).unwrap_or(usize::MAX);
        let part = bytes.get(..len).unwrap_or_default();
        if Some(&Crc32c::of(part)) == stored.crcs.get(number) {
            (self.take)(object, number as u64 * u64::from(self.layout.block_size), part);
        } else {
            let block = stored.blocks.blocks.get(number).copied().unwrap_or_default();
            self.failures.push((object, BlockReadError::Damaged { len: stored.len, block }));
        }
    }
}
