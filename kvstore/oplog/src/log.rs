//! Appending and committing.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::file::{HEAD, Head};
use crate::folder::{Disk, FileSystem, Folder, Growing};
use crate::frame::{self, Found};
use crate::reader::Reader;
use crate::{Error, failed};

const PREFIX: &str = "log";
const SUFFIX: &str = "log";
/// Tells that the log was closed, by the number of its last record.
const CLOSED: &str = "closed";

/// How a log is kept.
#[derive(Debug, Clone)]
pub struct Options {
    /// Bytes after which a new file is begun.
    pub file_bytes: u64,
    /// Whether a commit waits for the disk. Otherwise it waits for the operating system, which outlives the process.
    pub flush_always: bool,
    /// What names this start of the machine; see [`boot_id`].
    pub boot_id: String,
}

impl Default for Options {
    fn default() -> Self {
        Self { file_bytes: 64 << 20, flush_always: false, boot_id: boot_id() }
    }
}

/// The name of this start of the machine, empty where there is none.
fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default()
}

/// What was there when a log was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    /// The oldest record.
    pub first: u64,
    /// The number that the next one will have.
    pub next: u64,
    /// Bytes of a record that was not written to its end.
    pub torn_bytes: u64,
    /// Whether the machine may have died with committed records that were not on its disk.
    pub may_lack_records: bool,
}

/// A log, open for writing. Records are numbered from 1.
pub struct Log {
    folder: Arc<Folder>,
    disk: Box<dyn Disk>,
    options: Options,
    pending: Mutex<Pending>,
    active: Mutex<Active>,
    /// The last record that is written.
    written: AtomicU64,
    oldest: AtomicU64,
    /// Bytes that could not be written the last time that it was tried.
    waiting: AtomicUsize,
}

/// Records that nobody has begun to write.
struct Pending {
    bytes: Vec<u8>,
    next: u64,
}

/// The newest file, and what is being written to it.
struct Active {
    file: Box<dyn Growing>,
    path: PathBuf,
    length: u64,
    /// Written in part, maybe: the file must be cut before anything else.
    torn: bool,
    bytes: Vec<u8>,
    /// The last record in `bytes`.
    last: u64,
}

impl Log {
    /// Opens a folder's log, or begins one. What a crash left of the last record is cut off.
    ///
    /// # Errors
    /// [`Error::Damaged`] if a record before the last file's end is not what was written; what the file system says.
    pub fn open(folder: Arc<Folder>, options: Options) -> Result<(Self, Opened), Error> {
        Self::open_on(Box::new(FileSystem), folder, options)
    }

    /// The same on another disk.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_on(
        disk: Box<dyn Disk>,
        folder: Arc<Folder>,
        options: Options,
    ) -> Result<(Self, Opened), Error> {
        let mut files = folder.numbered(PREFIX, SUFFIX).map_err(failed(folder.path()))?;
        let mut torn_bytes = 0;
        while let Some((_, path)) = files.last()
            && is_unfinished(path)?
        {
            fs::remove_file(path).map_err(failed(path))?;
            files.pop();
        }
        let Some((_, newest)) = files.last() else {
            let log = Self::begin(disk, folder, options, 1)?;
            return Ok((log, Opened { first: 1, next: 1, torn_bytes, may_lack_records: false }));
        };
        let first = files[0].0;
        let Scanned { head, length, last } = scan(newest)?;
        let size = fs::metadata(newest).map_err(failed(newest))?.len();
        torn_bytes += size - length;
        let mut file = disk.open(newest).map_err(failed(newest))?;
        if size > length {
            file.cut(length).map_err(failed(newest))?;
        }
        let closed = folder.path().join(CLOSED);
        let same_start = is_same_start(&head, &options);
        let may_lack_records = is_doubted(&folder, &head, last, &options);
        let active = Active { file, path: newest.clone(), length, torn: false, bytes: Vec::new(), last };
        let log = Self {
            disk,
            options,
            pending: Mutex::new(Pending { bytes: Vec::new(), next: last + 1 }),
            active: Mutex::new(active),
            written: AtomicU64::new(last),
            oldest: AtomicU64::new(first),
            waiting: AtomicUsize::new(0),
            folder,
        };
        // The head tells under which start of the machine records were written, so this one gets a file of its own.
        if !same_start || head.flushed != log.options.flush_always {
            log.next_file(&mut log.active.lock(), last + 1)?;
        }
        if closed.exists() {
            fs::remove_file(&closed).map_err(failed(closed))?;
        }
        Ok((log, Opened { first, next: last + 1, torn_bytes, may_lack_records }))
    }

    /// Whether the machine may have died with committed records that were not on its disk. Once the log has been opened, that is
    /// forgotten.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn may_lack_records(folder: &Folder, options: &Options) -> Result<bool, Error> {
        let files = folder.numbered(PREFIX, SUFFIX).map_err(failed(folder.path()))?;
        for (_, path) in files.iter().rev() {
            if !is_unfinished(path)? {
                let Scanned { head, last, .. } = scan(path)?;
                return Ok(is_doubted(folder, &head, last, options));
            }
        }
        Ok(false)
    }

    /// Forgets all records, and begins with the number `first`.
    ///
    /// # Errors
    /// What the file system says.
    pub fn begin_at(folder: Arc<Folder>, options: Options, first: u64) -> Result<Self, Error> {
        for (_, path) in folder.numbered(PREFIX, SUFFIX).map_err(failed(folder.path()))? {
            fs::remove_file(&path).map_err(failed(path))?;
        }
        Self::begin(Box::new(FileSystem), folder, options, first)
    }

    fn begin(disk: Box<dyn Disk>, folder: Arc<Folder>, options: Options, first: u64) -> Result<Self, Error> {
        let (file, path) = new_file(&*disk, &folder, &options, first)?;
        let last = first - 1;
        let active = Active { file, path, length: HEAD as u64, torn: false, bytes: Vec::new(), last };
        Ok(Self {
            folder,
            disk,
            options,
            pending: Mutex::new(Pending { bytes: Vec::new(), next: first }),
            active: Mutex::new(active),
            written: AtomicU64::new(last),
            oldest: AtomicU64::new(first),
            waiting: AtomicUsize::new(0),
        })
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
    /// What the file system says. The records stay, and the next commit tries again.
    pub fn commit(&self, number: u64) -> Result<(), Error> {
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
    pub fn waiting_bytes(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    fn write(&self, active: &mut Active) -> Result<(), Error> {
        let written = self.try_to_write(active);
        self.waiting.store(active.bytes.len(), Ordering::Relaxed);
        written
    }

    fn try_to_write(&self, active: &mut Active) -> Result<(), Error> {
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
            active.file.cut(active.length).map_err(failed(&active.path))?;
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
            active.torn = active.file.cut(active.length).is_err();
            return Err(failed(&active.path)(problem));
        }
        active.length += active.bytes.len() as u64;
        active.bytes.clear();
        // A burst's buffer is not kept.
        active.bytes.shrink_to(1 << 20);
        self.written.store(active.last, Ordering::Release);
        Ok(())
    }

    fn next_file(&self, active: &mut Active, first: u64) -> Result<(), Error> {
        active.file.flush().map_err(failed(&active.path))?;
        let (file, path) = new_file(&*self.disk, &self.folder, &self.options, first)?;
        (active.file, active.path, active.length) = (file, path, HEAD as u64);
        Ok(())
    }

    /// Flushes what is written to the disk.
    ///
    /// # Errors
    /// What the file system says.
    pub fn flush(&self) -> Result<(), Error> {
        let (flush, path) = {
            let active = self.active.lock();
            (active.file.flusher(), active.path.clone())
        };
        // Others can go on writing.
        flush.and_then(|flush| flush()).map_err(failed(path))
    }

    /// Writes and flushes all, and remembers that nothing is missing.
    ///
    /// # Errors
    /// What the file system says.
    pub fn close(&self) -> Result<(), Error> {
        let mut active = self.active.lock();
        self.write(&mut active)?;
        active.file.flush().map_err(failed(&active.path))?;
        self.folder.put(CLOSED, self.written().to_string().as_bytes()).map_err(failed(self.folder.path()))
    }

    /// Reads the records from `number` on that are written.
    ///
    /// # Errors
    /// [`Error::Pruned`], or what the file system says.
    pub fn reader(&self, number: u64) -> Result<Reader<'_>, Error> {
        let first = self.oldest();
        if number < first {
            return Err(Error::Pruned { first, wanted: number });
        }
        Ok(Reader::new(self, number))
    }

    /// The file with a record.
    pub(crate) fn file_with(&self, number: u64) -> Result<Option<PathBuf>, Error> {
        let files = self.folder.numbered(PREFIX, SUFFIX).map_err(failed(self.folder.path()))?;
        Ok(files.into_iter().rev().find(|(first, _)| *first <= number).map(|(_, path)| path))
    }

    /// Removes files with nothing but records before `number`.
    ///
    /// # Errors
    /// What the file system says.
    pub fn prune(&self, number: u64) -> Result<(), Error> {
        let files = self.folder.numbered(PREFIX, SUFFIX).map_err(failed(self.folder.path()))?;
        for pair in files.windows(2) {
            let [(_, path), (next, _)] = pair else { break };
            if *next > number {
                break;
            }
            self.oldest.store(*next, Ordering::Release);
            fs::remove_file(path).map_err(failed(path))?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log")
            .field("folder", &self.folder.path())
            .field("written", &self.written())
            .finish_non_exhaustive()
    }
}

fn new_file(
    disk: &dyn Disk,
    folder: &Folder,
    options: &Options,
    first: u64,
) -> Result<(Box<dyn Growing>, PathBuf), Error> {
    let path = folder.file(PREFIX, first, SUFFIX);
    let head = Head { first, boot_id: options.boot_id.clone(), flushed: options.flush_always };
    let made = disk.open(&path).and_then(|mut file| {
        // A file of that number has nothing but a head: it was made when the disk was full.
        file.cut(0)?;
        file.append(&head.write())?;
        file.flush()?;
        folder.flush()?;
        Ok(file)
    });
    Ok((made.map_err(failed(&path))?, path))
}

/// Whether a crash came between making a file and writing its head.
fn is_unfinished(path: &Path) -> Result<bool, Error> {
    if fs::metadata(path).map_err(failed(path))?.len() > HEAD as u64 {
        return Ok(false);
    }
    Ok(Head::read(&fs::read(path).map_err(failed(path))?).is_none())
}

fn is_same_start(head: &Head, options: &Options) -> bool {
    !options.boot_id.is_empty() && head.boot_id == options.boot_id
}

/// Whether records may be missing behind `last`, the last one of the newest file.
fn is_doubted(folder: &Folder, head: &Head, last: u64, options: &Options) -> bool {
    let closed = fs::read_to_string(folder.path().join(CLOSED)).ok();
    let closed_at = closed.and_then(|number| number.trim().parse::<u64>().ok());
    closed_at != Some(last) && !is_same_start(head, options) && !head.flushed
}

/// What a file has.
struct Scanned {
    head: Head,
    /// Up to where it is whole.
    length: u64,
    last: u64,
}

/// Reads the newest file.
fn scan(path: &Path) -> Result<Scanned, Error> {
    let bytes = fs::read(path).map_err(failed(path))?;
    let damaged = |at: usize, what| Error::Damaged { path: path.to_owned(), at: at as u64, what };
    let head = Head::read(&bytes).ok_or_else(|| damaged(0, "its head is not what was written"))?;
    let (mut at, mut last) = (HEAD, head.first - 1);
    while let Found::Record(number, record) = frame::read(&bytes[at..]) {
        if number != last + 1 {
            return Err(damaged(at, "a record has another number than it should have"));
        }
        (at, last) = (at + frame::HEADER + record.len(), number);
    }
    Ok(Scanned { head, length: at as u64, last })
}
