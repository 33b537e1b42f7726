//! Scan of a log's files: the readable records, and the damage between and after them.
//!
//! A crash of the process leaves a prefix of the last write, since the system writes bytes in order. So under the same boot id, a tail is
//! *torn* only if it is a prefix of the next record. Everything else is *damage*: a record with a wrong checksum, an unreadable record
//! followed by others, or a log that ends before the last flush ([`crate::synced_mark`]). After a crash of the machine, an unreadable
//! tail may be any data that was not flushed.

use std::path::{Path, PathBuf};

use crate::MAX_RECORD;
use crate::damage::LogDamage;
use crate::file::{HEADER_SIZE, LogFileHeader};
use crate::frame::{self, FrameReadResult};

/// Maximum number of missing records between two readable ones of a file.
const MAX_GAP: u64 = 1 << 32;
/// Maximum number of checksummed bytes per byte of a file in the search for the next readable record.
const MAX_CHECKSUM_FACTOR: usize = 16;

/// A run of records without a gap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecordRun {
    pub(crate) first: u64,
    pub(crate) last: u64,
    /// File that contains the first record.
    pub(crate) path: PathBuf,
    pub(crate) offset: usize,
}

/// Conditions under which the newest file was written last.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LastWriterState {
    /// Whether the machine has not restarted since the file was created.
    pub(crate) same_boot: bool,
    /// Number of the last flushed record.
    pub(crate) flushed_through: u64,
}

/// Scan state. Files must be passed in order.
#[derive(Debug, Default)]
pub(crate) struct LogScan {
    runs: Vec<RecordRun>,
    damage: Option<LogDamage>,
    /// Number of the record that must follow the scanned files.
    expected: Option<u64>,
    /// Whether the data after the last run is damaged.
    damaged_tail: bool,
    /// Length of the readable part of the newest file.
    pub(crate) length: usize,
    pub(crate) torn_bytes: u64,
}

impl LogScan {
    /// Number of the last readable record; `first - 1` if there is none.
    pub(crate) fn last(&self, first: u64) -> u64 {
        self.runs.last().map_or(first.saturating_sub(1), |run| run.last)
    }

    /// The run of records up to the end of the log, if there is one.
    pub(crate) fn end_run(&self) -> Option<&RecordRun> {
        self.runs.last().filter(|_| !self.damaged_tail)
    }

    /// The damage found so far.
    pub(crate) fn damage(&self) -> Option<&LogDamage> {
        self.damage.as_ref()
    }

    /// Records damage after the last run.
    fn damaged(&mut self, path: &Path, offset: usize, bytes: usize, reason: &'static str) {
        self.add_record(path, offset, bytes, reason);
        self.damaged_tail = true;
    }

    /// Records damage that does not interrupt a run.
    pub(crate) fn add_record(&mut self, path: &Path, offset: usize, bytes: usize, reason: &'static str) {
        let damage = self.damage.get_or_insert_with(|| LogDamage {
            path: path.to_owned(),
            offset: offset as u64,
            reason,
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

    /// Scans the next file, whose first record has this number.
    pub(crate) fn file(&mut self, path: &Path, first: u64, bytes: &[u8]) -> Option<LogFileHeader> {
        let header = LogFileHeader::read(bytes).filter(|header| header.first == first);
        if header.is_none() {
            self.add_record(path, 0, bytes.len().min(HEADER_SIZE), "the header of the file is corrupt");
        }
        if let Some(expected) = self.expected
            && expected != first
        {
            self.damaged(path, 0, 0, "records between two files are missing");
            self.missing(first.saturating_sub(expected));
        }
        let mut offset = HEADER_SIZE.min(bytes.len());
        // A file's first record continues the run of the file before.
        let mut joins = !self.runs.is_empty() && !self.damaged_tail;
        let mut last = first.saturating_sub(1);
        loop {
            match frame::read(&bytes[offset..]) {
                FrameReadResult::Record(number, record) if number == last.saturating_add(1) => {
                    self.take(path, offset, number, joins);
                    joins = true;
                    last = number;
                    offset += frame::HEADER_SIZE + record.len();
                }
                FrameReadResult::End => break,
                _ => {
                    self.length = offset;
                    let Some(next) = next_record(bytes, offset, last) else { break };
                    self.damaged(path, offset, next.offset - offset, "a record is corrupt or missing");
                    self.missing(next.number - 1 - last);
                    (offset, last, joins) = (next.offset, next.number - 1, false);
                }
            }
        }
        self.length = offset;
        self.expected = Some(last.saturating_add(1));
        header
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

    /// Checks the data after the last record of a file that is not the newest.
    pub(crate) fn rest_of_older(&mut self, path: &Path, bytes: &[u8]) {
        let rest = bytes.len().saturating_sub(self.length);
        if rest > 0 {
            self.damaged(path, self.length, rest, "the end of the file is corrupt");
        }
    }

    /// Checks the data after the last record of the newest file.
    pub(crate) fn rest_of_newest(&mut self, path: &Path, first: u64, bytes: &[u8], writer: LastWriterState) {
        let last = self.last(first).max(first.saturating_sub(1));
        let tail = bytes.get(self.length..).unwrap_or_default();
        let reason = match writer.same_boot {
            true => is_not_torn(tail, last.saturating_add(1)),
            false => None,
        };
        if let Some(reason) = reason {
            self.damaged(path, self.length, tail.len(), reason);
            self.missing(1);
        } else {
            self.torn_bytes = tail.len() as u64;
        }
        self.ends_too_early(path, last, tail.len(), writer.flushed_through);
    }

    /// Records damage if the log ends before the last flush.
    pub(crate) fn ends_too_early(&mut self, path: &Path, last: u64, tail: usize, flushed_through: u64) {
        if flushed_through <= last {
            return;
        }
        let counted = std::mem::take(&mut self.torn_bytes);
        let bytes = if counted > 0 { tail } else { 0 };
        self.damaged(path, self.length, bytes, "the log ends before the last flushed record");
        self.damaged_tail = true;
        if let Some(damage) = &mut self.damage {
            damage.missing_records = damage.missing_records.max(flushed_through - last);
        }
    }
}

/// Why a tail cannot be a prefix of the record with this number, as left by a killed process; `None` if it can.
fn is_not_torn(tail: &[u8], number: u64) -> Option<&'static str> {
    let header = frame::header(tail)?;
    if header.length > MAX_RECORD || header.number != number {
        return Some("the data after the last record is not the start of the next one");
    }
    let rest = tail.len() - frame::HEADER_SIZE;
    let is_complete = header.length <= rest || frame::fits(tail, rest);
    is_complete.then_some("the last record is corrupt")
}

struct NextRecord {
    offset: usize,
    number: u64,
}

/// The next readable record after damage.
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
