//! The log: opening, appending, committing and pruning.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::damage::LogDamage;
use crate::directory::LogDirectory;
use crate::disk::AppendFile;
use crate::file::{HEADER_SIZE, LogFileHeader, PREFIX, SUFFIX};
use crate::log_files::LogFiles;
use crate::options::OplogOptions;
use crate::pending::PendingRecords;
use crate::scan::RecordRun;
use crate::synced_mark::SyncedMark;
use crate::{OplogError, io_error, shutdown_mark};

/// State of a log when it was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRecoveryReport {
    /// Number of the oldest record.
    pub first: u64,
    /// Number of the next record.
    pub next: u64,
    /// Bytes of an incompletely written last record.
    pub torn_bytes: u64,
    /// Whether committed records may be lost because the machine crashed before they were flushed.
    pub may_lack_records: bool,
    /// Written records that cannot be read.
    pub damage: Option<LogDamage>,
    /// No record is missing from this number to the end.
    pub contiguous_from: u64,
}

/// A log, open for writing. Records are numbered from 1.
pub struct OperationLog {
    folder: Arc<LogDirectory>,
    options: OplogOptions,
    pending: Mutex<PendingRecords>,
    active: Mutex<ActiveLogFile>,
    /// Number of the last written record.
    written: AtomicU64,
    oldest: AtomicU64,
    /// Number of the last record covered by the file `synced`.
    synced_through: Mutex<u64>,
    /// Bytes that the last attempt to write could not write.
    unwritten_bytes: AtomicUsize,
    /// Whether the last attempt to write failed.
    failing: AtomicBool,
    /// The records after the last damage, while damaged files exist.
    intact_tail: Option<RecordRun>,
}

/// The newest file, and the records being written to it.
struct ActiveLogFile {
    file: Box<dyn AppendFile>,
    path: PathBuf,
    length: u64,
    /// Whether the last write may be incomplete: the file must be truncated before the next one.
    torn: bool,
    bytes: Vec<u8>,
    /// Number of the last record in `bytes`.
    last: u64,
}

impl OperationLog {
    /// Opens a directory's log, or creates one. An incompletely written last record is truncated. If written records are missing,
    /// nothing is truncated: the log continues in a new file, after all used numbers.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn open(
        folder: Arc<LogDirectory>,
        options: OplogOptions,
    ) -> Result<(Self, LogRecoveryReport), OplogError> {
        let files = LogFiles::read(&folder, &options)?;
        Self::open_read(folder, options, &files)
    }

    /// [`Self::open`] with the result of [`LogFiles::read`].
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_read(
        folder: Arc<LogDirectory>,
        options: OplogOptions,
        files: &LogFiles,
    ) -> Result<(Self, LogRecoveryReport), OplogError> {
        for path in &files.unfinished {
            folder.disk().remove(path).map_err(io_error(path))?;
        }
        let may_lack_records = files.may_lack_records(&options);
        let (last, damage) = (files.last(), files.scan.damage().cloned());
        let is_closed = files.closed_at.is_some();
        let end = files.scan.end_run().cloned();
        let is_broken = damage.is_some() && end.is_none();
        let missing = damage.as_ref().map_or(0, |damage| damage.missing_records);
        let log = match (files.all.first(), files.all.last()) {
            (Some((first, _)), Some((_, newest))) if !is_broken => {
                let mut log = Self::resume(&folder, options, (newest, files), *first)?;
                log.intact_tail = end.clone().filter(|_| damage.is_some());
                log
            }
            (oldest, _) => {
                // Skips the name of an existing file, which must stay unmodified.
                let used = files.all.last().map_or(0, |(first, _)| *first);
                let next = last.saturating_add(missing).max(used).saturating_add(1);
                let mut log = Self::begin(Arc::clone(&folder), options, next)?;
                log.oldest = AtomicU64::new(oldest.map_or(next, |(first, _)| *first));
                log
            }
        };
        if is_closed {
            shutdown_mark::remove(&folder)?;
        }
        let first = log.oldest();
        let next = log.next();
        let contiguous_from = match (&damage, end) {
            (None, _) => first,
            (Some(_), Some(run)) => run.first,
            (Some(_), None) => next,
        };
        let torn_bytes = files.scan.torn_bytes;
        Ok((log, LogRecoveryReport { first, next, torn_bytes, may_lack_records, damage, contiguous_from }))
    }

    /// Resumes appending after the newest file.
    fn resume(
        folder: &Arc<LogDirectory>,
        options: OplogOptions,
        (newest, files): (&Path, &LogFiles),
        oldest: u64,
    ) -> Result<Self, OplogError> {
        let (last, length) = (files.last(), files.scan.length as u64);
        let size = folder.disk().length(newest).map_err(io_error(newest))?;
        let mut file = folder.disk().open(newest).map_err(io_error(newest))?;
        if size > length {
            file.truncate(length).map_err(io_error(newest))?;
        }
        let active =
            ActiveLogFile { file, path: newest.to_owned(), length, torn: false, bytes: Vec::new(), last };
        let is_damaged = files.scan.damage().is_some();
        let can_append = files.header.as_ref().is_some_and(|header| {
            header.is_from_boot(&options.boot_id) && header.flushed == options.flush_always && !is_damaged
        });
        let log = Self::new(Arc::clone(folder), options, active, oldest);
        // The header contains the boot id, so each start of the machine needs a new file. A damaged file is not extended, so that it
        // can be preserved.
        if !can_append {
            log.next_file(&mut log.active.lock(), last + 1)?;
        }
        Ok(log)
    }

    fn new(folder: Arc<LogDirectory>, options: OplogOptions, active: ActiveLogFile, oldest: u64) -> Self {
        Self {
            folder,
            options,
            pending: Mutex::new(PendingRecords::starting_at(active.last + 1)),
            written: AtomicU64::new(active.last),
            active: Mutex::new(active),
            oldest: AtomicU64::new(oldest),
            synced_through: Mutex::new(0),
            unwritten_bytes: AtomicUsize::new(0),
            failing: AtomicBool::new(false),
            intact_tail: None,
        }
    }

    /// Removes all records, and starts a new log at the number `first`.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn begin_at(
        folder: Arc<LogDirectory>,
        options: OplogOptions,
        first: u64,
    ) -> Result<Self, OplogError> {
        // The mark goes first: without it, the removed records are not reported as lost.
        SyncedMark::remove(&folder)?;
        for (_, path) in folder.numbered(PREFIX, SUFFIX).map_err(io_error(folder.path()))? {
            folder.disk().remove(&path).map_err(io_error(path))?;
        }
        Self::begin(folder, options, first)
    }

    fn begin(folder: Arc<LogDirectory>, options: OplogOptions, first: u64) -> Result<Self, OplogError> {
        let (file, path) = new_file(&folder, &options, first)?;
        let last = first - 1;
        let active =
            ActiveLogFile { file, path, length: HEADER_SIZE as u64, torn: false, bytes: Vec::new(), last };
        Ok(Self::new(folder, options, active, first))
    }

    /// Appends a record of at most [`crate::MAX_RECORD`] bytes in memory and returns its number. [`Self::commit`] writes it.
    pub fn append(&self, record: &[u8]) -> u64 {
        self.pending.lock().append(record)
    }

    /// Writes all records up to `number`; returns when they are written.
    ///
    /// # Errors
    /// Errors of the file system. The records stay in memory, and the next commit retries.
    pub fn commit(&self, number: u64) -> Result<(), OplogError> {
        if self.written() >= number {
            return Ok(());
        }
        let mut active = self.active.lock();
        // Another thread may have written them in the meantime.
        if self.written() >= number { Ok(()) } else { self.write(&mut active) }
    }

    /// Number of the last written record.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// Number of the next record.
    pub fn next(&self) -> u64 {
        self.pending.lock().next()
    }

    /// Number of the oldest readable record.
    pub fn oldest(&self) -> u64 {
        self.oldest.load(Ordering::Acquire)
    }

    /// Bytes that the last attempt to write could not write. Grows while the disk is full.
    pub fn unwritten_bytes(&self) -> usize {
        self.unwritten_bytes.load(Ordering::Relaxed)
    }

    /// Whether the last attempt to write failed.
    pub fn is_failing(&self) -> bool {
        self.failing.load(Ordering::Relaxed)
    }

    fn write(&self, active: &mut ActiveLogFile) -> Result<(), OplogError> {
        let written = self.try_to_write(active);
        self.unwritten_bytes.store(active.bytes.len(), Ordering::Relaxed);
        self.failing.store(written.is_err(), Ordering::Relaxed);
        written
    }

    fn try_to_write(&self, active: &mut ActiveLogFile) -> Result<(), OplogError> {
        active.last = self.pending.lock().move_to(&mut active.bytes);
        if active.torn {
            active.file.truncate(active.length).map_err(io_error(&active.path))?;
            active.torn = false;
        }
        if active.length >= self.options.file_bytes {
            self.next_file(active, self.written() + 1)?;
        }
        let flushed = active.file.append(&active.bytes).and_then(|()| match self.options.flush_always {
            true => active.file.flush(),
            false => Ok(()),
        });
        if let Err(problem) = flushed {
            active.torn = active.file.truncate(active.length).is_err();
            return Err(io_error(&active.path)(problem));
        }
        active.length += active.bytes.len() as u64;
        active.bytes.clear();
        // Frees the buffer of a burst.
        active.bytes.shrink_to(1 << 20);
        self.written.store(active.last, Ordering::Release);
        Ok(())
    }

    fn next_file(&self, active: &mut ActiveLogFile, first: u64) -> Result<(), OplogError> {
        active.file.flush().map_err(io_error(&active.path))?;
        let (file, path) = new_file(&self.folder, &self.options, first)?;
        (active.file, active.path, active.length) = (file, path, HEADER_SIZE as u64);
        Ok(())
    }

    /// Flushes the written records to the disk, and updates the file `synced`.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn flush(&self) -> Result<(), OplogError> {
        let (flush, path, last) = {
            let active = self.active.lock();
            (active.file.flush_operation(), active.path.clone(), self.written())
        };
        // Without the lock, so that other threads can write.
        flush.and_then(|flush| flush()).map_err(io_error(path))?;
        self.write_synced_mark(last);
        Ok(())
    }

    /// Records in the file `synced` that the log is flushed up to a record.
    fn write_synced_mark(&self, last: u64) {
        let mut marked = self.synced_through.lock();
        // On a full disk the older mark stays, which is still correct.
        if last > *marked && SyncedMark::write(&self.folder, last).is_ok() {
            *marked = last;
        }
    }

    /// Writes and flushes all records, and marks a clean shutdown.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn close(&self) -> Result<(), OplogError> {
        let mut active = self.active.lock();
        self.write(&mut active)?;
        active.file.flush().map_err(io_error(&active.path))?;
        self.write_synced_mark(self.written());
        shutdown_mark::write(&self.folder, self.written())
    }

    /// Path of the file that contains a record.
    pub(crate) fn file_with(&self, number: u64) -> Result<Option<PathBuf>, OplogError> {
        let files = self.folder.numbered(PREFIX, SUFFIX).map_err(io_error(self.folder.path()))?;
        Ok(files.into_iter().rev().find(|(first, _)| *first <= number).map(|(_, path)| path))
    }

    /// Removes files that contain only records before `number`.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn prune(&self, number: u64) -> Result<(), OplogError> {
        let files = self.folder.numbered(PREFIX, SUFFIX).map_err(io_error(self.folder.path()))?;
        for pair in files.windows(2) {
            let [(_, path), (next, _)] = pair else { break };
            if *next > number {
                break;
            }
            self.oldest.store(*next, Ordering::Release);
            self.folder.disk().remove(path).map_err(io_error(path))?;
        }
        Ok(())
    }

    /// The directory of the log.
    pub fn folder(&self) -> &LogDirectory {
        &self.folder
    }

    /// Offset at which to start reading a damaged file, if the record follows its damage.
    pub(crate) fn offset_in(&self, path: &Path, number: u64) -> Option<usize> {
        let run = self.intact_tail.as_ref()?;
        (run.path == path && number >= run.first).then_some(run.offset)
    }
}

impl std::fmt::Debug for OperationLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OperationLog")
            .field("folder", &self.folder.path())
            .field("written", &self.written())
            .finish_non_exhaustive()
    }
}

fn new_file(
    folder: &LogDirectory,
    options: &OplogOptions,
    first: u64,
) -> Result<(Box<dyn AppendFile>, PathBuf), OplogError> {
    let path = folder.file(PREFIX, first, SUFFIX);
    let header = LogFileHeader { first, boot_id: options.boot_id.clone(), flushed: options.flush_always };
    let created = folder.disk().open(&path).and_then(|mut file| {
        // A file with this number contains only a header: it was created when the disk was full.
        file.truncate(0)?;
        file.append(&header.write())?;
        file.flush()?;
        folder.flush()?;
        Ok(file)
    });
    Ok((created.map_err(io_error(&path))?, path))
}
