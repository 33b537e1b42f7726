//! Blocks of consecutive records: found by one thread, verified by others.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::directory::LogDirectory;
use crate::frame::{self, FrameReadResult, RecordHeader};
use crate::{MAX_RECORD, OplogError, io_error};

/// Size of the reads in bytes.
const READ: u64 = 1 << 20;

/// Reads the frames of a file in blocks.
pub(crate) struct BlockReader {
    path: Arc<PathBuf>,
    file: Box<dyn Read + Send>,
    /// Offset in the file of the next block.
    pub(crate) offset: u64,
    /// What was read of the next block with the last one.
    begun: Vec<u8>,
}

/// What to do with a frame.
pub(crate) enum FrameDecision {
    Take,
    /// Not possible after one that was taken.
    Skip,
    /// It is for the next call, and so is all that follows.
    Stop,
}

impl BlockReader {
    /// # Errors
    /// Errors of the file system.
    pub(crate) fn open(folder: &LogDirectory, path: &Path, offset: u64) -> Result<Self, OplogError> {
        let mut file = folder.disk().open_to_read(path).map_err(io_error(path))?;
        let skipped = std::io::copy(&mut (&mut file).take(offset), &mut std::io::sink());
        skipped.map_err(io_error(path))?;
        Ok(Self { path: Arc::new(path.to_owned()), file, offset, begun: Vec::new() })
    }

    /// Calls `decide` with each frame, and returns a block of those that it takes, in the memory of `buffer`. The block is only empty
    /// if there is no further complete frame.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(crate) fn next_block(
        &mut self,
        mut buffer: Vec<u8>,
        mut decide: impl FnMut(RecordHeader, &[u8]) -> FrameDecision,
    ) -> Result<RecordBlock, OplogError> {
        buffer.clear();
        buffer.append(&mut self.begun);
        let (mut bounds, mut end, mut stopped) = (Vec::new(), 0, false);
        while bounds.is_empty() && !stopped {
            let size = buffer.len();
            (&mut self.file).take(READ).read_to_end(&mut buffer).map_err(io_error(&*self.path))?;
            while let Some((header, frame)) = first_frame(&buffer[end..]) {
                match decide(header, frame) {
                    FrameDecision::Take => bounds.push(end),
                    FrameDecision::Skip => {}
                    FrameDecision::Stop => {
                        stopped = true;
                        break;
                    }
                }
                end += frame.len();
            }
            if buffer.len() == size {
                break;
            }
        }
        if !bounds.is_empty() {
            bounds.push(end);
        }
        self.begun.extend_from_slice(&buffer[end..]);
        let (path, offset) = (Arc::clone(&self.path), self.offset);
        self.offset += end as u64;
        Ok(RecordBlock { path, offset, first: 0, bytes: buffer, bounds })
    }

    /// Whether there are bytes after the last block.
    pub(crate) fn has_rest(&self) -> bool {
        !self.begun.is_empty()
    }

    /// Damage at the start of the next block.
    pub(crate) fn damaged(&self, reason: &'static str) -> OplogError {
        OplogError::Damaged { path: self.path.to_path_buf(), offset: self.offset, reason }
    }
}

/// The frame at the start of `bytes`, if it is complete. It is not verified.
fn first_frame(bytes: &[u8]) -> Option<(RecordHeader, &[u8])> {
    let header = frame::header(bytes).filter(|header| header.length <= MAX_RECORD)?;
    Some((header, bytes.get(..frame::HEADER_SIZE + header.length)?))
}

/// Consecutive records of a file. Their checksums are not verified yet.
#[derive(Debug)]
pub struct RecordBlock {
    pub(crate) path: Arc<PathBuf>,
    /// Offset of `bytes` in the file.
    pub(crate) offset: u64,
    /// Number of the first record.
    pub(crate) first: u64,
    pub(crate) bytes: Vec<u8>,
    /// Where each record's frame begins in `bytes`, and the end of the last one.
    pub(crate) bounds: Vec<usize>,
}

impl RecordBlock {
    /// Number of the first record in the log, or of the first entry in the snapshot.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Number of records.
    pub fn count(&self) -> usize {
        self.bounds.len().saturating_sub(1)
    }

    fn frame(&self, nth: usize) -> (usize, &[u8]) {
        match self.bounds.get(nth..) {
            Some([begin, end, ..]) => (*begin, self.bytes.get(*begin..*end).unwrap_or_default()),
            _ => (0, &[]),
        }
    }

    /// A record, which may be corrupt. Empty if there are fewer records.
    pub fn unverified(&self, nth: usize) -> &[u8] {
        self.frame(nth).1.get(frame::HEADER_SIZE..).unwrap_or_default()
    }

    /// A record.
    ///
    /// # Errors
    /// [`OplogError::Damaged`] if its checksum is wrong.
    pub fn record(&self, nth: usize) -> Result<&[u8], OplogError> {
        let (begin, bytes) = self.frame(nth);
        match frame::read(bytes) {
            FrameReadResult::Record(_, record) => Ok(record),
            FrameReadResult::End | FrameReadResult::Torn => Err(OplogError::Damaged {
                path: self.path.to_path_buf(),
                offset: self.offset + begin as u64,
                reason: "an entry is corrupt",
            }),
        }
    }

    /// The memory of the block, for another one.
    pub fn into_buffer(self) -> Vec<u8> {
        self.bytes
    }
}
