//! Logs and snapshots: recovery, damage, pruning, full disks and concurrency.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod simulation;

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::SeqCst};

use moongate_oplog::{
    AppendFile, FlushOperation, LogDirectory, LogRecoveryReport, LogStorage, OperationLog, OplogError,
    OplogOptions, snapshot,
};
use proptest::prelude::*;
use tempfile::TempDir;

fn options() -> OplogOptions {
    OplogOptions { file_bytes: 300, boot_id: "this boot".to_owned(), ..OplogOptions::default() }
}

fn open(path: &Path) -> Result<(OperationLog, LogRecoveryReport), OplogError> {
    OperationLog::open(Arc::new(LogDirectory::lock(path)?), options())
}

fn read(log: &OperationLog) -> Result<Vec<(u64, Vec<u8>)>, OplogError> {
    let (mut reader, mut all) = (log.reader(log.oldest())?, Vec::new());
    while let Some((number, record)) = reader.next()? {
        all.push((number, record.to_vec()));
    }
    Ok(all)
}

fn write(log: &OperationLog, records: impl IntoIterator<Item = Vec<u8>>) -> Result<(), OplogError> {
    let numbers: Vec<u64> = records.into_iter().map(|record| log.append(&record)).collect();
    log.commit(numbers.last().copied().unwrap_or(0))
}

fn record(seed: usize) -> Vec<u8> {
    vec![seed as u8; seed % 90]
}

fn newest_file(folder: &Path) -> PathBuf {
    let mut logs: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    logs.retain(|path| path.extension().is_some_and(|suffix| suffix == "log"));
    logs.sort();
    logs.pop().unwrap()
}

#[test]
fn committed_records_are_read_after_reopening() {
    let folder = TempDir::new().unwrap();
    let (log, opened) = open(folder.path()).unwrap();
    let empty = LogRecoveryReport {
        first: 1,
        next: 1,
        torn_bytes: 0,
        may_lack_records: false,
        damage: None,
        contiguous_from: 1,
    };
    assert_eq!(opened, empty);
    write(&log, (0..50).map(record)).unwrap();
    log.append(b"never committed");
    assert_eq!(read(&log).unwrap().len(), 50);
    drop(log);
    let (log, opened) = open(folder.path()).unwrap();
    assert_eq!((opened.next, opened.torn_bytes), (51, 0));
    write(&log, [record(50)]).unwrap();
    let expected: Vec<_> = (0..=50).map(|seed| (seed as u64 + 1, record(seed))).collect();
    assert_eq!(read(&log).unwrap(), expected);
}

#[test]
fn a_directory_is_locked_by_one_log() {
    let folder = TempDir::new().unwrap();
    let (log, _) = open(folder.path()).unwrap();
    assert!(matches!(open(folder.path()), Err(OplogError::InUse(_))));
    drop(log);
    assert!(open(folder.path()).is_ok());
}

#[test]
fn only_a_crash_of_the_machine_may_lose_records() {
    let folder = TempDir::new().unwrap();
    let open = |boot: &str, flush_always| {
        let options = OplogOptions { boot_id: boot.to_owned(), flush_always, ..options() };
        OperationLog::open(Arc::new(LogDirectory::lock(folder.path()).unwrap()), options).unwrap()
    };
    let may_lack = |boot: &str, flush_always| {
        let (log, opened) = open(boot, flush_always);
        write(&log, [record(1)]).unwrap();
        opened.may_lack_records
    };
    assert!(!may_lack("a", false));
    assert!(!may_lack("a", false), "only the process crashed");
    assert!(may_lack("b", false), "the machine restarted");
    assert!(may_lack("", false), "the boot id is unknown");
    let (log, _) = open("", true);
    write(&log, [record(1)]).unwrap();
    drop(log);
    assert!(!may_lack("c", false), "every commit was flushed");
    let (log, _) = open("c", false);
    log.append(&record(2));
    log.close().unwrap();
    drop(log);
    assert!(!may_lack("d", false), "the log was closed");
    assert!(may_lack("e", false), "the log was closed, and opened again");
}

#[test]
fn damage_in_an_older_file_is_reported_by_the_reader() {
    let folder = TempDir::new().unwrap();
    let (log, _) = open(folder.path()).unwrap();
    write(&log, (0..5).map(record)).unwrap();
    let file = newest_file(folder.path());
    for seed in 0..20 {
        write(&log, [record(80 + seed)]).unwrap();
    }
    let mut bytes = fs::read(&file).unwrap();
    bytes[70] ^= 1;
    fs::write(&file, bytes).unwrap();
    assert!(matches!(read(&log), Err(OplogError::Damaged { offset: 64, .. })));
}

#[test]
fn old_files_are_pruned() {
    let folder = TempDir::new().unwrap();
    let (log, _) = open(folder.path()).unwrap();
    for seed in 0..40 {
        write(&log, [record(seed)]).unwrap();
    }
    log.prune(20).unwrap();
    assert!(log.oldest() > 1 && log.oldest() <= 20);
    assert_eq!(read(&log).unwrap().last().unwrap().0, 40);
    assert!(matches!(log.reader(1), Err(OplogError::Pruned { wanted: 1, .. })));
    let oldest = log.oldest();
    drop(log);
    let (log, opened) = open(folder.path()).unwrap();
    assert_eq!((opened.first, opened.next, log.oldest()), (oldest, 41, oldest));
}

#[test]
fn concurrent_writers_and_a_reader_see_ordered_records() {
    let folder = TempDir::new().unwrap();
    let (log, _) = open(folder.path()).unwrap();
    let done = AtomicBool::new(false);
    let read_meanwhile = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut reader, mut count) = (log.reader(1).unwrap(), 0);
            while count < 2000 {
                match reader.next().unwrap() {
                    Some((number, record)) => {
                        count += 1;
                        assert_eq!((number, record.len()), (count, 8));
                    }
                    None if done.load(SeqCst) && log.written() == count => break,
                    None => std::thread::yield_now(),
                }
            }
            count
        });
        let writers: Vec<_> = (0..4_u64)
            .map(|writer| {
                let log = &log;
                scope.spawn(move || {
                    for index in 0..500_u64 {
                        let number = log.append(&(writer << 32 | index).to_le_bytes());
                        log.commit(number).unwrap();
                        assert!(log.written() >= number);
                    }
                })
            })
            .collect();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        done.store(true, SeqCst);
        reader.join().unwrap()
    });
    assert_eq!(read_meanwhile, 2000);
    let mut next = [0; 4];
    for (_, record) in read(&log).unwrap() {
        let value = u64::from_le_bytes(record.try_into().unwrap());
        let writer = (value >> 32) as usize;
        assert_eq!(value as u32, next[writer], "the records of each writer must be in order");
        next[writer] += 1;
    }
    assert_eq!(next, [500; 4]);
}

/// A disk with limited space.
#[derive(Clone, Default)]
struct SmallDisk {
    free_bytes: Arc<AtomicI64>,
    fail_truncate: Arc<AtomicBool>,
}

struct SmallFile {
    file: fs::File,
    disk: SmallDisk,
}

impl LogStorage for SmallDisk {
    fn open(&self, path: &Path) -> io::Result<Box<dyn AppendFile>> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        Ok(Box::new(SmallFile { file, disk: self.clone() }))
    }
}

impl AppendFile for SmallFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let free = usize::try_from(self.disk.free_bytes.load(SeqCst)).unwrap().min(bytes.len());
        self.file.append(&bytes[..free])?;
        self.disk.free_bytes.fetch_sub(free as i64, SeqCst);
        if free < bytes.len() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        if self.disk.fail_truncate.load(SeqCst) {
            return Err(io::ErrorKind::Other.into());
        }
        self.disk.free_bytes.fetch_add(self.file.metadata()?.len() as i64 - length as i64, SeqCst);
        self.file.truncate(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }

    fn flush_operation(&self) -> io::Result<FlushOperation> {
        self.file.flush_operation()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_full_disk_loses_nothing(
        steps in prop::collection::vec((1..6_usize, 0..400_i64, any::<bool>()), 1..20),
    ) {
        let folder = TempDir::new().unwrap();
        let disk = SmallDisk::default();
        disk.free_bytes.store(1000, SeqCst);
        let folder_lock = Arc::new(LogDirectory::lock_on(Arc::new(disk.clone()), folder.path()).unwrap());
        let (log, _) = OperationLog::open(folder_lock, options()).unwrap();
        let mut expected = Vec::new();
        let mut committed = 0;
        for (records, free, stuck) in steps {
            disk.fail_truncate.store(stuck, SeqCst);
            for _ in 0..records {
                let next = record(expected.len());
                expected.push((log.append(&next), next));
            }
            if log.commit(expected.len() as u64).is_ok() {
                committed = expected.len();
            }
            prop_assert!(log.written() as usize >= committed);
            prop_assert_eq!(&read(&log).unwrap()[..], &expected[..log.written() as usize]);
            disk.free_bytes.fetch_add(free, SeqCst);
        }
        // A crash at this point preserves all committed records.
        let copy = TempDir::new().unwrap();
        for entry in fs::read_dir(folder.path()).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
        }
        let (after, _) = open(copy.path()).unwrap();
        let remaining = read(&after).unwrap();
        prop_assert!(remaining.len() >= committed);
        prop_assert_eq!(&remaining[..], &expected[..remaining.len()]);
        disk.fail_truncate.store(false, SeqCst);
        disk.free_bytes.store(1 << 20, SeqCst);
        log.commit(expected.len() as u64).unwrap();
        prop_assert_eq!(read(&log).unwrap(), expected);
        prop_assert_eq!(log.unwritten_bytes(), 0);
    }

    /// A killed process leaves a prefix of its last write.
    #[test]
    fn a_torn_tail_is_truncated(sizes in prop::collection::vec(0..60_usize, 1..20), lost in 1..80_usize) {
        let folder = TempDir::new().unwrap();
        let (log, _) = open(folder.path()).unwrap();
        let records: Vec<_> = sizes.iter().enumerate().map(|(index, size)| vec![index as u8; *size]).collect();
        for record in &records {
            write(&log, [record.clone()]).unwrap();
        }
        drop(log);
        let newest = newest_file(folder.path());
        let bytes = fs::read(&newest).unwrap();
        // Truncates only the last record.
        let remaining = bytes.len() - lost.min(sizes[sizes.len() - 1] + 16);
        fs::write(&newest, &bytes[..remaining]).unwrap();
        let (log, opened) = open(folder.path()).unwrap();
        prop_assert_eq!((&opened.damage, opened.next as usize), (&None, records.len()));
        prop_assert_eq!(opened.torn_bytes as usize, (sizes[sizes.len() - 1] + 16).saturating_sub(lost));
        let remaining = read(&log).unwrap();
        let expected: Vec<_> = records.iter().zip(1..).map(|(record, number)| (number, record.clone())).collect();
        prop_assert_eq!(&remaining[..], &expected[..records.len() - 1]);
        write(&log, [b"more".to_vec()]).unwrap();
        prop_assert_eq!(read(&log).unwrap().pop(), Some((opened.next, b"more".to_vec())));
    }

    /// After a machine crash, bytes after the last record are unflushed data.
    #[test]
    fn any_tail_is_torn_after_a_machine_crash(garbage in prop::collection::vec(any::<u8>(), 0..200)) {
        let folder = TempDir::new().unwrap();
        let flushed = |boot: &str| OplogOptions { boot_id: boot.to_owned(), flush_always: true, ..options() };
        let (log, _) = OperationLog::open(Arc::new(LogDirectory::lock(folder.path()).unwrap()), flushed("a")).unwrap();
        write(&log, [record(3)]).unwrap();
        drop(log);
        let newest = newest_file(folder.path());
        let bytes = [&fs::read(&newest).unwrap()[..], &garbage].concat();
        fs::write(&newest, bytes).unwrap();
        let (log, opened) = OperationLog::open(Arc::new(LogDirectory::lock(folder.path()).unwrap()), flushed("b")).unwrap();
        prop_assert_eq!((&opened.damage, opened.torn_bytes as usize), (&None, garbage.len()));
        prop_assert_eq!(read(&log).unwrap(), [(1, record(3))]);
    }

    #[test]
    fn corrupt_records_are_never_read(offset in 0..2000_usize, bit in 0..8_u32) {
        let folder = TempDir::new().unwrap();
        let (log, _) = open(folder.path()).unwrap();
        for seed in 0..8 {
            write(&log, [record(seed * 7)]).unwrap();
        }
        drop(log);
        let newest = newest_file(folder.path());
        let mut bytes = fs::read(&newest).unwrap();
        let offset = offset % bytes.len();
        bytes[offset] ^= 1 << bit;
        fs::write(&newest, bytes).unwrap();
        let (log, opened) = open(folder.path()).unwrap();
        let damage = opened.damage.expect("reported");
        prop_assert!(damage.offset as usize <= offset, "{}", damage);
        // Records after the damage are readable and unchanged.
        let mut reader = log.reader(opened.contiguous_from).unwrap();
        while let Some((number, remaining)) = reader.next().unwrap() {
            prop_assert_eq!(remaining, record((number as usize - 1) * 7));
        }
    }
}

#[test]
fn the_two_newest_complete_snapshots_are_listed() {
    let folder = TempDir::new().unwrap();
    let folder_lock = Arc::new(LogDirectory::lock(folder.path()).unwrap());
    let entries = |path: &PathBuf| {
        let mut all = Vec::new();
        snapshot::read(&folder_lock, path, |entry| all.push(entry.to_vec())).map(|()| all)
    };
    for number in [10, 20, 30] {
        let mut writer = snapshot::SnapshotWriter::begin(Arc::clone(&folder_lock), number).unwrap();
        (0..3).for_each(|index| writer.write(&record(number as usize + index)).unwrap());
        let needed = writer.finish().unwrap();
        assert_eq!(needed, number.max(20) - 10 + 1);
    }
    // An unfinished snapshot is not listed.
    snapshot::SnapshotWriter::begin(Arc::clone(&folder_lock), 40).unwrap().write(b"x").unwrap();
    let all = snapshot::list(&folder_lock).unwrap();
    assert_eq!(all.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [30, 20]);
    assert_eq!(entries(&all[0].1).unwrap(), (30..33).map(record).collect::<Vec<_>>());
    let whole = fs::read(&all[0].1).unwrap();
    for length in 0..whole.len() {
        fs::write(&all[0].1, &whole[..length]).unwrap();
        assert!(matches!(entries(&all[0].1), Err(OplogError::Damaged { .. })), "truncated at {length}");
    }
    snapshot::remove_all(&folder_lock).unwrap();
    assert!(snapshot::list(&folder_lock).unwrap().is_empty());
}
