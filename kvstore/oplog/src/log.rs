//! Appending and committing.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::damage::LogDamage;
use crate::directory::LogDirectory;
use crate::disk::AppendFile;
use crate::file::{HEADER_SIZE, LogFileHeader};
use crate::frame;
use crate::reader::LogReader;
use crate::scan::{LastWriterState, LogScan, RecordRun};
use crate::synced_mark::SyncedMark;
use crate::{OplogError, io_error};

const PREFIX: &str = "log";
const SUFFIX: &str = "log";
/// Tells that the log was closed, by the number of its last record.
pub(crate) const CLEAN_SHUTDOWN_FILE: &str = "closed";

/// How a log is kept.
#[derive(Debug, Clone)]
pub struct OplogOptions {
    /// Bytes after which a new file is begun.
    pub file_bytes: u64,
    /// Whether a commit waits for the disk. Otherwise it waits for the operating system, which outlives the process.
    pub flush_always: bool,
    /// What names this start of the machine; see [`boot_id`].
    pub boot_id: String,
}

impl Default for OplogOptions {
    fn default() -> Self {
        Self { file_bytes: 64 << 20, flush_always: false, boot_id: boot_id() }
    }
}

/// The name of this start of the machine, empty where there is none.
fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default()
}

/// What was there when a log was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRecoveryReport {
    /// The oldest record.
    pub first: u64,
    /// The number that the next one will have.
    pub next: u64,
    /// Bytes of a record that was not written to its end.
    pub torn_bytes: u64,
    /// Whether the machine may have died with committed records that were not on its disk.
    pub may_lack_records: bool,
    /// Records that had been written and cannot be read any more.
    pub damage: Option<LogDamage>,
    /// Nothing is missing between this record and the end.
    pub contiguous_from: u64,
}

/// A log, open for writing. Records are numbered from 1.
pub struct OperationLog {
    folder: Arc<LogDirectory>,
    options: OplogOptions,
    pending: Mutex<PendingRecords>,
    active: Mutex<ActiveLogFile>,
    /// The last record that is written.
    written: AtomicU64,
    oldest: AtomicU64,
    /// The last record that the file `synced` covers.
    synced_through: Mutex<u64>,
    /// Bytes that could not be written the last time that it was tried.
    unwritten_bytes: AtomicUsize,
    /// Whether the last attempt to write failed.
    failing: AtomicBool,
    /// The records after the last damage, as long as damaged files are there.
    intact_tail: Option<RecordRun>,
}

/// Records that nobody has begun to write.
struct PendingRecords {
    bytes: Vec<u8>,
    next: u64,
}

/// The newest file, and what is being written to it.
struct ActiveLogFile {
    file: Box<dyn AppendFile>,
    path: PathBuf,
    length: u64,
    /// Written in part, maybe: the file must be cut before anything else.
    torn: bool,
    bytes: Vec<u8>,
    /// The last record in `bytes`.
    last: u64,
}

/// The files of a log, as they are found before it is opened.
pub struct LogFiles {
    all: Vec<(u64, PathBuf)>,
    /// Files that a crash left before they had a head.
    unfinished: Vec<PathBuf>,
    /// Of the newest.
    head: Option<LogFileHeader>,
    scan: LogScan,
    closed_at: Option<u64>,
}

impl LogFiles {
    /// Reads the files. Nothing is changed.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn read(folder: &LogDirectory, options: &OplogOptions) -> Result<Self, OplogError> {
        let (mut all, mut unfinished) =
            (folder.numbered(PREFIX, SUFFIX).map_err(io_error(folder.path()))?, Vec::new());
        while let Some((_, path)) = all.last()
            && is_unfinished(folder, path)?
        {
            unfinished.extend(all.pop().map(|(_, path)| path));
        }
        let closed =
            folder.get(CLEAN_SHUTDOWN_FILE).map_err(io_error(folder.path().join(CLEAN_SHUTDOWN_FILE)))?;
        let closed_at = closed.and_then(|bytes| String::from_utf8(bytes).ok()?.trim().parse::<u64>().ok());
        let marked = SyncedMark::read(folder)?;
        let flushed_through = marked.number().max(closed_at.unwrap_or(0));
        let (mut scan, mut head) = (LogScan::default(), None);
        for (nth, (first, path)) in all.iter().enumerate() {
            let bytes = folder.disk().read(path).map_err(io_error(path))?;
            head = scan.file(path, *first, &bytes);
            if nth + 1 < all.len() {
                scan.rest_of_older(path, &bytes);
                continue;
            }
            let same_start = head.as_ref().is_some_and(|head| is_same_start(head, options));
            scan.rest_of_newest(path, *first, &bytes, LastWriterState { same_start, flushed_through });
        }
        if all.is_empty() {
            scan.ends_too_early(folder.path(), 0, 0, flushed_through);
        }
        if marked == SyncedMark::Damaged {
            scan.add_record(
                &folder.path().join(crate::synced_mark::NAME),
                0,
                0,
                "it is not what was written",
            );
        }
        Ok(Self { all, unfinished, head, scan, closed_at })
    }

    /// The last record that can be read.
    fn last(&self) -> u64 {
        self.all.last().map_or(0, |(first, _)| self.scan.last(*first).max(first.saturating_sub(1)))
    }

    /// Records that had been written and cannot be read any more.
    pub fn damage(&self) -> Option<&LogDamage> {
        self.scan.damage()
    }

    /// Whether the machine may have died with committed records that were not on its disk. Once the log has been opened, that is
    /// forgotten.
    pub fn may_lack_records(&self, options: &OplogOptions) -> bool {
        if self.all.is_empty() || self.closed_at == Some(self.last()) {
            return false;
        }
        let Some(head) = &self.head else { return true };
        !is_same_start(head, options) && !head.flushed
    }
}

impl OperationLog {
    /// Opens a folder's log, or begins one. What a crash left of the last record is cut off. Where records are missing that had been
    /// written, nothing is truncated: the log continues in a new file, after all numbers that were used.
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

    /// [`Self::open`] with files that have just been read.
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
        let closed = folder.path().join(CLEAN_SHUTDOWN_FILE);
        let is_closed = files.closed_at.is_some();
        let end = files.scan.end_run().cloned();
        let is_broken = damage.is_some() && end.is_none();
        let missing = damage.as_ref().map_or(0, |it| it.missing_records);
        let log = match (files.all.first(), files.all.last()) {
            (Some((first, _)), Some((_, newest))) if !is_broken => {
                let mut log = Self::resume(&folder, options, (newest, files), *first)?;
                log.intact_tail = end.clone().filter(|_| damage.is_some());
                log
            }
            (oldest, _) => {
                // Never the name of a file that is there: that one stays as it is.
                let used = files.all.last().map_or(0, |(first, _)| *first);
                let next = last.saturating_add(missing).max(used).saturating_add(1);
                let mut log = Self::begin(Arc::clone(&folder), options, next)?;
                log.oldest = AtomicU64::new(oldest.map_or(next, |(first, _)| *first));
                log
            }
        };
        if is_closed {
            folder.disk().remove(&closed).map_err(io_error(closed))?;
        }
        let first = log.oldest();
        let next = log.next();
        let unbroken_from = match (&damage, end) {
            (None, _) => first,
            (Some(_), Some(run)) => run.first,
            (Some(_), None) => next,
        };
        let torn_bytes = files.scan.torn_bytes;
        Ok((
            log,
            LogRecoveryReport {
                first,
                next,
                torn_bytes,
                may_lack_records,
                damage,
                contiguous_from: unbroken_from,
            },
        ))
    }

    /// Goes on with the newest file.
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
        let goes_on = files.head.as_ref().is_some_and(|head| {
            is_same_start(head, &options) && head.flushed == options.flush_always && !is_damaged
        });
        let log = Self::new(Arc::clone(folder), options, active, oldest);
        // The head has the machine's boot id, so this start gets a file of its own. So that a damaged
        // file can be put aside, nothing more is written to it.
        if !goes_on {
            log.next_file(&mut log.active.lock(), last + 1)?;
        }
        Ok(log)
    }

    fn new(folder: Arc<LogDirectory>, options: OplogOptions, active: ActiveLogFile, oldest: u64) -> Self {
        Self {
            folder,
            options,
            pending: Mutex::new(PendingRecords { bytes: Vec::new(), next: active.last + 1 }),
            written: AtomicU64::new(active.last),
            active: Mutex::new(active),
            oldest: AtomicU64::new(oldest),
            synced_through: Mutex::new(0),
            unwritten_bytes: AtomicUsize::new(0),
            failing: AtomicBool::new(false),
            intact_tail: None,
        }
    }

    /// Forgets all records, and begins with the number `first`.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn begin_at(
        folder: Arc<LogDirectory>,
        options: OplogOptions,
        first: u64,
    ) -> Result<Self, OplogError> {
        // What is about to go was not lost.
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

    /// Puts a record of at most [`crate::MAX_RECORD`] bytes behind the others. Returns its number. Quick: nothing is written yet.
    pub fn append(&self, record: &[u8]) -> u64 {
        let mut pending = self.pending.lock();
        let number = pending.next;
        frame::write(number, record, &mut pending.bytes);
        pending.next += 1;
        number
    }

    /// Returns once all records up to `number` are written.
    ///
    /// # Errors
    /// Errors of the file system. The records stay, and the next commit tries again.
    pub fn commit(&self, number: u64) -> Result<(), OplogError> {
        if self.written() >= number {
            return Ok(());
        }
        let mut active = self.active.lock();
        // Another thread may have written them meanwhile.
        if self.written() >= number { Ok(()) } else { self.write(&mut active) }
    }

    /// The last record that is written.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// The number that the next record will have.
    pub fn next(&self) -> u64 {
        self.pending.lock().next
    }

    /// The oldest record that can be read.
    pub fn oldest(&self) -> u64 {
        self.oldest.load(Ordering::Acquire)
    }

    /// Bytes that could not be written the last time that it was tried: more and more while the disk is full.
    pub fn unwritten_bytes(&self) -> usize {
        self.unwritten_bytes.load(Ordering::Relaxed)
    }

    /// Whether the last attempt to write failed, and has not been repeated with success.
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
        {
            let mut pending = self.pending.lock();
            if active.bytes.is_empty() {
                std::mem::swap(&mut active.bytes, &mut pending.bytes);
            } else {
                active.bytes.append(&mut pending.bytes);
            }
            active.last = pending.next - 1;
        }
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
        // A burst's buffer is not kept.
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

    /// Flushes what is written to the disk, and remembers how far that is.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn flush(&self) -> Result<(), OplogError> {
        let (flush, path, last) = {
            let active = self.active.lock();
            (active.file.flush_operation(), active.path.clone(), self.written())
        };
        // Others can go on writing.
        flush.and_then(|flush| flush()).map_err(io_error(path))?;
        self.write_synced_mark(last);
        Ok(())
    }

    /// Remembers that the log is flushed up to a record.
    fn write_synced_mark(&self, last: u64) {
        let mut marked = self.synced_through.lock();
        // Where there is no room for it the older mark stays, which is as true as before.
        if last > *marked && SyncedMark::write(&self.folder, last).is_ok() {
            *marked = last;
        }
    }

    /// Writes and flushes all, and remembers that nothing is missing.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn close(&self) -> Result<(), OplogError> {
        let mut active = self.active.lock();
        self.write(&mut active)?;
        active.file.flush().map_err(io_error(&active.path))?;
        self.write_synced_mark(self.written());
        self.folder
            .put(CLEAN_SHUTDOWN_FILE, self.written().to_string().as_bytes())
            .map_err(io_error(self.folder.path()))
    }

    /// Reads the records from `number` on that are written.
    ///
    /// # Errors
    /// [`OplogError::Pruned`], or what the file system says.
    pub fn reader(&self, number: u64) -> Result<LogReader<'_>, OplogError> {
        let first = self.oldest();
        if number < first {
            return Err(OplogError::Pruned { first, wanted: number });
        }
        Ok(LogReader::new(self, number))
    }

    /// The file with a record.
    pub(crate) fn file_with(&self, number: u64) -> Result<Option<PathBuf>, OplogError> {
        let files = self.folder.numbered(PREFIX, SUFFIX).map_err(io_error(self.folder.path()))?;
        Ok(files.into_iter().rev().find(|(first, _)| *first <= number).map(|(_, path)| path))
    }

    /// Removes files with nothing but records before `number`.
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

    /// Where the folder is in which it is kept.
    pub fn folder(&self) -> &LogDirectory {
        &self.folder
    }

    /// Where a record is in a file that cannot be read from its beginning.
    pub(crate) fn offset_in(&self, path: &Path, number: u64) -> Option<usize> {
        let run = self.intact_tail.as_ref()?;
        (run.path == path && number >= run.first).then_some(run.offset)
    }
}

impl std::fmt::Debug for LogFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogFiles").field("files", &self.all).field("scan", &self.scan).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for OperationLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log")
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
    let head = LogFileHeader { first, boot_id: options.boot_id.clone(), flushed: options.flush_always };
    let made = folder.disk().open(&path).and_then(|mut file| {
        // A file of that number has nothing but a head: it was made when the disk was full.
        file.truncate(0)?;
        file.append(&head.write())?;
        file.flush()?;
        folder.flush()?;
        Ok(file)
    });
    Ok((made.map_err(io_error(&path))?, path))
}

/// Whether a crash came between making a file and writing its head.
fn is_unfinished(folder: &LogDirectory, path: &Path) -> Result<bool, OplogError> {
    if folder.disk().length(path).map_err(io_error(path))? > HEADER_SIZE as u64 {
        return Ok(false);
    }
    Ok(LogFileHeader::read(&folder.disk().read(path).map_err(io_error(path))?).is_none())
}

fn is_same_start(head: &LogFileHeader, options: &OplogOptions) -> bool {
    !options.boot_id.is_empty() && head.boot_id == options.boot_id
}
