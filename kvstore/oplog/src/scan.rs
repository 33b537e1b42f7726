//! What the files of a log hold: which records can be read, and what is wrong with the rest.
//!
//! A crash of the process leaves of the last write a beginning and nothing else: the system has taken bytes in their order. So under the
//! same start of the machine a tail is *torn* only if it is the beginning of the record that was next. All else is *damage*: a record
//! with a wrong checksum, one that others follow, or a log that ends before the last flush
//! ([`crate::mark`]). After the machine has died, an unreadable tail may be anything that was not flushed.

use std::path::{Path, PathBuf};

use crate::MAX_RECORD;
use crate::damage::LogDamage;
use crate::file::{HEADER_SIZE, LogFileHeader};
use crate::frame::{self, FrameReadResult};

/// Records that may be missing between two readable ones of a file.
const MAX_GAP: u64 = 1 << 32;
/// Bytes that are checksummed per byte of a file in search of the next readable record.
const MAX_CHECKSUM_FACTOR: usize = 16;

/// Records that follow each other without a gap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecordRun {
    pub(crate) first: u64,
    pub(crate) last: u64,
    /// Where the first one is.
    pub(crate) path: PathBuf,
    pub(crate) offset: usize,
}

/// The last writer of the newest file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LastWriterState {
    /// Whether the machine runs since the file was written.
    pub(crate) same_start: bool,
    /// The last record that was flushed.
    pub(crate) flushed_through: u64,
}

/// Looks at files in their order.
#[derive(Debug, Default)]
pub(crate) struct LogScan {
    runs: Vec<RecordRun>,
    damage: Option<LogDamage>,
    /// The record after those of the files so far.
    expected: Option<u64>,
    /// Whether something is wrong behind the last run.
    damaged_tail: bool,
    /// Where the readable part of the newest file ends.
    pub(crate) length: usize,
    pub(crate) torn_bytes: u64,
}

impl LogScan {
    /// The last record that can be read, before `first` if there is none.
    pub(crate) fn last(&self, first: u64) -> u64 {
        self.runs.last().map_or(first.saturating_sub(1), |run| run.last)
    }

    /// The records to the end that nothing is missing between, if there are any.
    pub(crate) fn end_run(&self) -> Option<&RecordRun> {
        self.runs.last().filter(|_| !self.damaged_tail)
    }

    /// What is wrong, if anything is.
    pub(crate) fn damage(&self) -> Option<&LogDamage> {
        self.damage.as_ref()
    }

    /// Something is wrong behind the last run.
    fn damaged(&mut self, path: &Path, at: usize, bytes: usize, what: &'static str) {
        self.add_record(path, at, bytes, what);
        self.damaged_tail = true;
    }

    /// Something is wrong that no record is missing for.
    pub(crate) fn add_record(&mut self, path: &Path, at: usize, bytes: usize, what: &'static str) {
        let damage = self.damage.get_or_insert_with(|| LogDamage {
            path: path.to_owned(),
            offset: at as u64,
            reason: what,
            unreadable_bytes: 0,
            missing_records: 0,
            readable_to: self.runs.last().map_or(0, |run| run.last),
        });
        damage.unreadable_bytes += bytes as u64;
    }

    fn missing(&mut self, records: u64) {
        if let Some(damage) = &mut self.damage {
            damage.missing_records = damage.missing_records.saturating_add(records);
        }
    }

    /// Looks at the next file, whose first record has this number.
    pub(crate) fn file(&mut self, path: &Path, first: u64, bytes: &[u8]) -> Option<LogFileHeader> {
        let head = LogFileHeader::read(bytes).filter(|head| head.first == first);
        if head.is_none() {
            self.add_record(
                path,
                0,
                bytes.len().min(HEADER_SIZE),
                "the head of the file is not what was written",
            );
        }
        if let Some(expected) = self.expected
            && expected != first
        {
            self.damaged(path, 0, 0, "records between two files are missing");
            self.missing(first.saturating_sub(expected));
        }
        let mut at = HEADER_SIZE.min(bytes.len());
        // A file's first record continues the run of the file before.
        let mut joins = !self.runs.is_empty() && !self.damaged_tail;
        let mut last = first.saturating_sub(1);
        loop {
            match frame::read(&bytes[at..]) {
                FrameReadResult::Record(number, record) if number == last.saturating_add(1) => {
                    self.take(path, at, number, joins);
                    joins = true;
                    last = number;
                    at += frame::HEADER_SIZE + record.len();
                }
                FrameReadResult::End => break,
                _ => {
                    self.length = at;
                    let Some(next) = next_record(bytes, at, last) else { break };
                    self.damaged(path, at, next.offset - at, "a record is not what was written, or missing");
                    self.missing(next.number - 1 - last);
                    (at, last, joins) = (next.offset, next.number - 1, false);
                }
            }
        }
        self.length = at;
        self.expected = Some(last.saturating_add(1));
        head
    }

    fn take(&mut self, path: &Path, offset: usize, number: u64, joins: bool) {
        match self.runs.last_mut().filter(|_| joins) {
            Some(run) => run.last = number,
            None => {
                self.runs.push(RecordRun { first: number, last: number, path: path.to_owned(), offset });
                self.damaged_tail = false;
            }
        }
    }

    /// What is behind the last record of a file that another one follows.
    pub(crate) fn rest_of_older(&mut self, path: &Path, bytes: &[u8]) {
        let rest = bytes.len().saturating_sub(self.length);
        if rest > 0 {
            self.damaged(path, self.length, rest, "the end of the file is not what was written");
        }
    }

    /// What is behind the last record of the newest file.
    pub(crate) fn rest_of_newest(
        &mut self,
        path: &Path,
        first: u64,
        bytes: &[u8],
        circumstances: LastWriterState,
    ) {
        let last = self.last(first).max(first.saturating_sub(1));
        let tail = bytes.get(self.length..).unwrap_or_default();
        let what = match circumstances.same_start {
            true => is_not_torn(tail, last.saturating_add(1)),
            false => None,
        };
        if let Some(what) = what {
            self.damaged(path, self.length, tail.len(), what);
            self.missing(1);
        } else {
            self.torn_bytes = tail.len() as u64;
        }
        self.ends_too_early(path, last, tail.len(), circumstances.flushed_through);
    }

    /// Whether the log ends before the last flush.
    pub(crate) fn ends_too_early(&mut self, path: &Path, last: u64, tail: usize, flushed_through: u64) {
        if flushed_through <= last {
            return;
        }
        let counted = std::mem::take(&mut self.torn_bytes);
        let bytes = if counted > 0 { tail } else { 0 };
        self.damaged(path, self.length, bytes, "the log ends before what had been flushed to the disk");
        self.damaged_tail = true;
        if let Some(damage) = &mut self.damage {
            damage.missing_records = damage.missing_records.max(flushed_through - last);
        }
    }
}

/// Why bytes cannot be the beginning of the record with a number that a killed process left.
fn is_not_torn(tail: &[u8], number: u64) -> Option<&'static str> {
    let header = frame::header(tail)?;
    if header.length > MAX_RECORD || header.number != number {
        return Some("what follows the last record is not the beginning of another");
    }
    let rest = tail.len() - frame::HEADER_SIZE;
    let is_whole = header.length <= rest || frame::fits(tail, rest);
    is_whole.then_some("the last record is not what was written")
}

struct NextRecord {
    offset: usize,
    number: u64,
}

/// The next record after damage, if any can be read.
fn next_record(bytes: &[u8], damaged: usize, last: u64) -> Option<NextRecord> {
    let mut effort = bytes.len().saturating_mul(MAX_CHECKSUM_FACTOR);
    for offset in damaged..bytes.len().saturating_sub(frame::HEADER_SIZE - 1) {
        let Some(rest) = bytes.get(offset..) else { break };
        let Some(header) = frame::header(rest) else { break };
        let is_plausible = header.number > last
            && header.number - last <= MAX_GAP
            && header.length <= MAX_RECORD.min(rest.len() - frame::HEADER_SIZE);
        if !is_plausible {
            continue;
        }
        effort = effort.checked_sub(header.length)?;
        if let FrameReadResult::Record(number, _) = frame::read(rest) {
            return Some(NextRecord { offset, number });
        }
    }
    None
}
