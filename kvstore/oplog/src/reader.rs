//! Reading records of a log.

use std::path::PathBuf;

use crate::block::{BlockReader, FrameDecision, RecordBlock};
use crate::file::HEADER_SIZE;
use crate::frame::{self, FrameReadResult};
use crate::log::OperationLog;
use crate::{OplogError, io_error};

/// Reads a log's records in order. After the last one it can be called again when more are written.
#[derive(Debug)]
pub struct LogReader<'a> {
    log: &'a OperationLog,
    next: u64,
    path: PathBuf,
    bytes: Vec<u8>,
    offset: usize,
}

impl OperationLog {
    /// A reader of the written records from `number`.
    ///
    /// # Errors
    /// [`OplogError::Pruned`], or errors of the file system.
    pub fn reader(&self, number: u64) -> Result<LogReader<'_>, OplogError> {
        let first = self.oldest();
        if number < first {
            return Err(OplogError::Pruned { first, wanted: number });
        }
        Ok(LogReader::new(self, number))
    }

    /// As [`Self::reader`], in blocks.
    ///
    /// # Errors
    /// As [`Self::reader`].
    pub fn block_reader(&self, number: u64) -> Result<LogBlockReader<'_>, OplogError> {
        let first = self.oldest();
        if number < first {
            return Err(OplogError::Pruned { first, wanted: number });
        }
        Ok(LogBlockReader { log: self, next: number, frames: None })
    }
}

/// Reads a log's records in blocks.
pub struct LogBlockReader<'a> {
    log: &'a OperationLog,
    next: u64,
    frames: Option<BlockReader>,
}

impl std::fmt::Debug for LogBlockReader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogBlockReader").field("next", &self.next).finish_non_exhaustive()
    }
}

impl LogBlockReader<'_> {
    /// The next written records, in the memory of `buffer`; `None` after the last ones.
    ///
    /// # Errors
    /// As [`LogReader::next`].
    pub fn next_block(&mut self, mut buffer: Vec<u8>) -> Result<Option<RecordBlock>, OplogError> {
        let written = self.log.written();
        let mut opened = false;
        while self.next <= written {
            let mut frames = match self.frames.take() {
                Some(frames) => frames,
                None => {
                    opened = true;
                    self.open()?
                }
            };
            let first = self.next;
            let mut is_missing = false;
            let block = frames.next_block(buffer, |header, _| {
                is_missing = header.number > self.next;
                if header.number < self.next {
                    FrameDecision::Skip
                } else if is_missing || self.next > written {
                    FrameDecision::Stop
                } else {
                    self.next += 1;
                    FrameDecision::Take
                }
            })?;
            if block.count() > 0 {
                self.frames = Some(frames);
                return Ok(Some(RecordBlock { first, ..block }));
            }
            // The end of a file, unless it should have the next record.
            if is_missing {
                return Err(frames.damaged("a record is missing"));
            }
            if opened {
                return Err(frames.damaged("a record is missing or corrupt"));
            }
            buffer = block.into_buffer();
        }
        Ok(None)
    }

    /// Opens the file with the next record.
    fn open(&self) -> Result<BlockReader, OplogError> {
        let Some(path) = self.log.file_with(self.next)? else {
            return Err(OplogError::Pruned { first: self.log.oldest(), wanted: self.next });
        };
        let offset = self.log.offset_in(&path, self.next).unwrap_or(HEADER_SIZE);
        BlockReader::open(self.log.folder(), &path, offset as u64)
    }
}

impl<'a> LogReader<'a> {
    fn new(log: &'a OperationLog, next: u64) -> Self {
        Self { log, next, path: PathBuf::new(), bytes: Vec::new(), offset: 0 }
    }

    /// The next record with its number; `None` until more records are written.
    ///
    /// # Errors
    /// [`OplogError::Damaged`], [`OplogError::Pruned`] if the record was pruned before it was read, or errors of the file system.
    #[expect(
        clippy::should_implement_trait,
        reason = "the record is borrowed, and more may follow after the last"
    )]
    pub fn next(&mut self) -> Result<Option<(u64, &[u8])>, OplogError> {
        if self.next > self.log.written() {
            return Ok(None);
        }
        let mut loaded = false;
        loop {
            let found = match frame::read(self.bytes.get(self.offset..).unwrap_or_default()) {
                FrameReadResult::Record(number, record) => Some((number, record.len())),
                FrameReadResult::End | FrameReadResult::Torn => None,
            };
            let Some((number, length)) = found else {
                // End of the file, or a record that was written partly when the file was read.
                if std::mem::replace(&mut loaded, true) {
                    return Err(self.damaged("a record is missing or corrupt"));
                }
                self.load()?;
                continue;
            };
            if number > self.next {
                return Err(self.damaged("a record is missing"));
            }
            let begin = self.offset + frame::HEADER_SIZE;
            self.offset = begin + length;
            if number == self.next {
                self.next += 1;
                return Ok(Some((number, &self.bytes[begin..self.offset])));
            }
        }
    }

    fn load(&mut self) -> Result<(), OplogError> {
        let Some(path) = self.log.file_with(self.next)? else {
            return Err(OplogError::Pruned { first: self.log.oldest(), wanted: self.next });
        };
        let is_same_file = path == self.path;
        self.bytes = match self.log.folder().disk().read(&path) {
            Ok(bytes) => bytes,
            Err(problem) if problem.kind() == std::io::ErrorKind::NotFound => {
                return Err(OplogError::Pruned { first: self.log.oldest(), wanted: self.next });
            }
            Err(problem) => return Err(io_error(path)(problem)),
        };
        self.path = path;
        // If the same file has grown since it was read, reading continues at the former end.
        if !is_same_file {
            self.offset = self.log.offset_in(&self.path, self.next).unwrap_or(HEADER_SIZE);
        }
        Ok(())
    }

    fn damaged(&self, reason: &'static str) -> OplogError {
        OplogError::Damaged { path: self.path.clone(), offset: self.offset as u64, reason }
    }
}
