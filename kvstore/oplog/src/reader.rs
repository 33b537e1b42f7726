//! Reading what is written.

use std::path::PathBuf;

use crate::file::HEADER_SIZE;
use crate::frame::{self, FrameReadResult};
use crate::log::OperationLog;
use crate::{OplogError, io_error};

/// Reads a log's records in order, and may be asked again when more have been written.
#[derive(Debug)]
pub struct LogReader<'a> {
    log: &'a OperationLog,
    next: u64,
    path: PathBuf,
    bytes: Vec<u8>,
    at: usize,
}

impl<'a> LogReader<'a> {
    pub(crate) fn new(log: &'a OperationLog, next: u64) -> Self {
        Self { log, next, path: PathBuf::new(), bytes: Vec::new(), at: 0 }
    }

    /// The next record with its number, or nothing until more is written.
    ///
    /// # Errors
    /// [`OplogError::Damaged`], [`OplogError::Pruned`] if it was slower than the log is pruned, or what the file system says.
    #[expect(
        clippy::should_implement_trait,
        reason = "the record is lent, and there may be more after the last"
    )]
    pub fn next(&mut self) -> Result<Option<(u64, &[u8])>, OplogError> {
        if self.next > self.log.written() {
            return Ok(None);
        }
        let mut loaded = false;
        loop {
            let found = match frame::read(self.bytes.get(self.at..).unwrap_or_default()) {
                FrameReadResult::Record(number, record) => Some((number, record.len())),
                FrameReadResult::End | FrameReadResult::Torn => None,
            };
            let Some((number, length)) = found else {
                // The file's end, or what was half written when it was read.
                if std::mem::replace(&mut loaded, true) {
                    return Err(self.damaged("a record is missing or not what was written"));
                }
                self.load()?;
                continue;
            };
            if number > self.next {
                return Err(self.damaged("a record is missing"));
            }
            let begin = self.at + frame::HEADER_SIZE;
            self.at = begin + length;
            if number == self.next {
                self.next += 1;
                return Ok(Some((number, &self.bytes[begin..self.at])));
            }
        }
    }

    fn load(&mut self) -> Result<(), OplogError> {
        let Some(path) = self.log.file_with(self.next)? else {
            return Err(OplogError::Pruned { first: self.log.oldest(), wanted: self.next });
        };
        let again = path == self.path;
        self.bytes = match self.log.folder().disk().read(&path) {
            Ok(bytes) => bytes,
            Err(problem) if problem.kind() == std::io::ErrorKind::NotFound => {
                return Err(OplogError::Pruned { first: self.log.oldest(), wanted: self.next });
            }
            Err(problem) => return Err(io_error(path)(problem)),
        };
        self.path = path;
        // The same file has grown since it was read: go on where it ended.
        if !again {
            self.at = self.log.offset_in(&self.path, self.next).unwrap_or(HEADER_SIZE);
        }
        Ok(())
    }

    fn damaged(&self, what: &'static str) -> OplogError {
        OplogError::Damaged { path: self.path.clone(), offset: self.at as u64, reason: what }
    }
}
