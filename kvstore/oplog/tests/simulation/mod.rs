//! All disk faults in a history of 20 records: every record read equals the written one, and every loss is reported.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use moongate_oplog::{LogDirectory, LogRecoveryReport, OperationLog, OplogOptions, snapshot};
use moongate_store_testkit::memory_disk::{DiskOperation, FileContents, MemoryDisk};

const FOLDER: &str = "/log";
const RECORDS: u64 = 20;
/// Tests every fault; under Miri as many as run in a minute.
const STEP: usize = if cfg!(miri) { 499 } else { 1 };

fn options(boot: &str, flush_always: bool) -> OplogOptions {
    // About six records per file.
    OplogOptions { file_bytes: 250, flush_always, boot_id: boot.to_owned() }
}

fn record(number: u64) -> Vec<u8> {
    (0..number % 7 * 5).map(|index| (number * 31 + index) as u8).collect()
}

fn open(disk: &MemoryDisk, options: OplogOptions) -> (OperationLog, LogRecoveryReport) {
    let folder = LogDirectory::lock_on(Arc::new(disk.clone()), Path::new(FOLDER)).unwrap();
    OperationLog::open(Arc::new(folder), options).unwrap()
}

/// Writes the history, with a flush after every fifth record (including the last).
fn write_history(disk: &MemoryDisk, flush_always: bool) {
    let (log, _) = open(disk, options("a", flush_always));
    for number in 1..=RECORDS {
        assert_eq!(log.append(&record(number)), number);
        log.commit(number).unwrap();
        if number % 5 == 0 {
            log.flush().unwrap();
        }
    }
}

/// Opens the log after a fault. Returns the contiguous records up to the end, and whether a loss is reported.
fn check(files: FileContents, options: OplogOptions, fault: &str) -> (Vec<u64>, bool) {
    let (log, opened) = open(&MemoryDisk::with(files), options);
    let mut found = Vec::new();
    let mut reader = log.reader(opened.contiguous_from).unwrap();
    while let Some((number, found_record)) = reader.next().unwrap_or_else(|error| panic!("{fault}: {error}"))
    {
        assert_eq!(found_record, record(number), "{fault}: corrupt record");
        found.push(number);
    }
    assert!(found.windows(2).all(|pair| pair[1] == pair[0] + 1), "{fault}: not in order: {found:?}");
    if let Some(last) = found.last() {
        assert_eq!(last + 1, opened.next, "{fault}");
    }
    // Numbers of lost records are never reused.
    let is_reported = opened.damage.is_some() || opened.may_lack_records || opened.first > 1;
    if is_reported {
        assert!(opened.next > *found.last().unwrap_or(&0), "{fault}");
    }
    let is_complete = found.len() as u64 == RECORDS;
    assert!(is_complete || is_reported, "{fault}: unreported loss, {found:?}, {opened:?}");
    (found, is_reported)
}

fn history() -> FileContents {
    let disk = MemoryDisk::default();
    write_history(&disk, false);
    let files = disk.files();
    assert!(files.len() > 3, "{:?}", files.keys());
    assert_eq!(check(files.clone(), options("a", false), "none"), ((1..=RECORDS).collect(), false));
    files
}

fn is_log(path: &Path) -> bool {
    path.extension().is_some_and(|suffix| suffix == "log")
}

#[test]
fn every_flipped_bit_is_reported() {
    let files = history();
    let mut incomplete = 0;
    for (path, bytes) in &files {
        for bit in (0..bytes.len() * 8).step_by(STEP) {
            let mut files = files.clone();
            files.get_mut(path).unwrap()[bit / 8] ^= 1 << (bit % 8);
            let fault = format!("bit {bit} of {}", path.display());
            let (found, is_reported) = check(files, options("a", false), &fault);
            assert!(is_reported, "{fault}: not reported");
            incomplete += usize::from(found.len() as u64 != RECORDS);
        }
    }
    assert!(incomplete > 1000);
}

#[test]
fn every_truncated_or_missing_file_is_reported() {
    let files = history();
    for (path, bytes) in files.iter().filter(|(path, _)| is_log(path)) {
        for length in (0..bytes.len()).step_by(STEP) {
            let mut files = files.clone();
            files.get_mut(path).unwrap().truncate(length);
            check(files, options("a", false), &format!("{} truncated at {length}", path.display()));
        }
        let mut files = files.clone();
        files.remove(path);
        check(files, options("a", false), &format!("{} missing", path.display()));
    }
}

/// The machine crashes after a history in which the disk ignored one flush.
#[test]
fn every_ignored_flush_is_reported_or_harmless() {
    let disk = MemoryDisk::default();
    write_history(&disk, true);
    let operations = disk.operations();
    let flushes = (0..operations.len()).filter(|nth| operations[*nth] == DiskOperation::Flush);
    for nth in flushes {
        let disk = MemoryDisk::default();
        disk.drop_flush(nth);
        write_history(&disk, true);
        check(disk.durable_files(), options("b", true), &format!("flush {nth} ignored"));
    }
}

#[test]
fn every_misdirected_write_is_reported() {
    let disk = MemoryDisk::default();
    write_history(&disk, false);
    let operations = disk.operations();
    for nth in (0..operations.len()).filter(|nth| operations[*nth] == DiskOperation::Write) {
        for offset in (0..300).step_by(7 * STEP) {
            let disk = MemoryDisk::default();
            disk.misdirect(nth, offset);
            write_history(&disk, false);
            check(disk.files(), options("a", false), &format!("write {nth} misdirected to {offset}"));
        }
    }
}

/// Without the file `synced`, as in logs of older releases, every fault except a truncation between two records is reported.
#[test]
fn a_log_of_an_older_release_is_read() {
    let mut files = history();
    files.remove(&PathBuf::from(FOLDER).join("synced")).unwrap();
    assert_eq!(check(files.clone(), options("a", false), "none"), ((1..=RECORDS).collect(), false));
    for (path, bytes) in files.iter().filter(|(path, _)| is_log(path)) {
        for bit in (0..bytes.len() * 8).step_by(STEP) {
            let mut files = files.clone();
            files.get_mut(path).unwrap()[bit / 8] ^= 1 << (bit % 8);
            check(files, options("a", false), &format!("bit {bit} of {}", path.display()));
        }
    }
}

#[test]
fn corrupt_snapshot_entries_are_never_read() {
    let disk = MemoryDisk::default();
    let folder = Arc::new(LogDirectory::lock_on(Arc::new(disk.clone()), Path::new(FOLDER)).unwrap());
    let mut writer = snapshot::SnapshotWriter::begin(Arc::clone(&folder), RECORDS).unwrap();
    (1..=RECORDS).for_each(|number| writer.write(&record(number)).unwrap());
    writer.finish().unwrap();
    let path = snapshot::list(&folder).unwrap().remove(0).1;
    let complete = disk.files()[&path].clone();
    let read = |bytes: Vec<u8>| {
        let disk = MemoryDisk::with([(path.clone(), bytes)].into());
        let folder = LogDirectory::lock_on(Arc::new(disk), Path::new(FOLDER)).unwrap();
        let mut entries = Vec::new();
        snapshot::read(&folder, &path, |entry| entries.push(entry.to_vec())).map(|()| entries)
    };
    assert_eq!(read(complete.clone()).unwrap(), (1..=RECORDS).map(record).collect::<Vec<_>>());
    for bit in (0..complete.len() * 8).step_by(STEP) {
        let mut bytes = complete.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(read(bytes).is_err(), "bit {bit}");
    }
    assert!((0..complete.len()).all(|length| read(complete[..length].to_vec()).is_err()));
}
