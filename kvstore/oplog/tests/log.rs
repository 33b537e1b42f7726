//! Logs and snapshots, with all that can happen to them.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

#[allow(dead_code, reason = "another test uses the rest of it")]
mod memory_disk;
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
    OplogOptions { file_bytes: 300, boot_id: "this start".to_owned(), ..OplogOptions::default() }
}

fn open(at: &Path) -> Result<(OperationLog, LogRecoveryReport), OplogError> {
    OperationLog::open(Arc::new(LogDirectory::lock(at)?), options())
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

fn newest_file(at: &Path) -> PathBuf {
    let mut logs: Vec<PathBuf> = fs::read_dir(at).unwrap().map(|entry| entry.unwrap().path()).collect();
    logs.retain(|path| path.extension().is_some_and(|suffix| suffix == "log"));
    logs.sort();
    logs.pop().unwrap()
}

#[test]
fn what_was_committed_is_read_again() {
    let folder = TempDir::new().unwrap();
    let (log, opened) = open(folder.path()).unwrap();
    let nothing = LogRecoveryReport {
        first: 1,
        next: 1,
        torn_bytes: 0,
        may_lack_records: false,
        damage: None,
        contiguous_from: 1,
    };
    assert_eq!(opened, nothing);
    write(&log, (0..50).map(record)).unwrap();
    log.append(b"never committed");
    assert_eq!(read(&log).unwrap().len(), 50);
    drop(log);
    let (log, opened) = open(folder.path()).unwrap();
    assert_eq!((opened.next, opened.torn_bytes), (51, 0));
    write(&log, [record(50)]).unwrap();
    let expected: Vec<_> = (0..=50).map(|at| (at as u64 + 1, record(at))).collect();
    assert_eq!(read(&log).unwrap(), expected);
}

#[test]
fn a_folder_belongs_to_one() {
    let folder = TempDir::new().unwrap();
    let (log, _) = open(folder.path()).unwrap();
    assert!(matches!(open(folder.path()), Err(OplogError::InUse(_))));
    drop(log);
    assert!(open(folder.path()).is_ok());
}

#[test]
fn only_the_death_of_the_machine_is_doubted() {
    let folder = TempDir::new().unwrap();
    let open = |boot: &str, flush_always| {
        let options = OplogOptions { boot_id: boot.to_owned(), flush_always, ..options() };
        OperationLog::open(Arc::new(LogDirectory::lock(folder.path()).unwrap()), options).unwrap()
    };
    let doubts = |boot: &str, flush_always| {
        let (log, opened) = open(boot, flush_always);
        write(&log, [record(1)]).unwrap();
        opened.may_lack_records
    };
    assert!(!doubts("a", false));
    assert!(!doubts("a", false), "only the process has died");
    assert!(doubts("b", false), "the machine has died");
    assert!(doubts("", false), "nothing is known of the machine");
    let (log, _) = open("", true);
    write(&log, [record(1)]).unwrap();
    drop(log);
    assert!(!doubts("c", false), "all was flushed");
    let (log, _) = open("c", false);
    log.append(&record(2));
    log.close().unwrap();
    drop(log);
    assert!(!doubts("d", false), "it was closed");
    assert!(doubts("e", false), "it was closed once, and opened again");
}

#[test]
fn a_damaged_file_in_the_middle_is_told() {
    let folder = TempDir::new().unwrap();
    let (log, _) = open(folder.path()).unwrap();
    write(&log, (0..5).map(record)).unwrap();
    let file = newest_file(folder.path());
    for at in 0..20 {
        write(&log, [record(80 + at)]).unwrap();
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
    for at in 0..40 {
        write(&log, [record(at)]).unwrap();
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
fn many_may_write_and_read() {
    let folder = TempDir::new().unwrap();
    let (log, _) = open(folder.path()).unwrap();
    let done = AtomicBool::new(false);
    let read_meanwhile = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut reader, mut seen) = (log.reader(1).unwrap(), 0);
            while seen < 2000 {
                match reader.next().unwrap() {
                    Some((number, record)) => {
                        seen += 1;
                        assert_eq!((number, record.len()), (seen, 8));
                    }
                    None if done.load(SeqCst) && log.written() == seen => break,
                    None => std::thread::yield_now(),
                }
            }
            seen
        });
        let writers: Vec<_> = (0..4_u64)
            .map(|writer| {
                let log = &log;
                scope.spawn(move || {
                    for at in 0..500_u64 {
                        let number = log.append(&(writer << 32 | at).to_le_bytes());
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
        assert_eq!(value as u32, next[writer], "each writer's records are in its order");
        next[writer] += 1;
    }
    assert_eq!(next, [500; 4]);
}

/// A disk with room for some bytes.
#[derive(Clone, Default)]
struct SmallDisk {
    free_bytes: Arc<AtomicI64>,
    /// Whether even cutting fails.
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
        let room = usize::try_from(self.disk.free_bytes.load(SeqCst)).unwrap().min(bytes.len());
        self.file.append(&bytes[..room])?;
        self.disk.free_bytes.fetch_sub(room as i64, SeqCst);
        if room < bytes.len() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
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
        let taken = Arc::new(LogDirectory::lock_on(Arc::new(disk.clone()), folder.path()).unwrap());
        let (log, _) = OperationLog::open(taken, options()).unwrap();
        let mut expected = Vec::new();
        let mut answered = 0;
        for (records, room, stuck) in steps {
            disk.fail_truncate.store(stuck, SeqCst);
            for _ in 0..records {
                let next = record(expected.len());
                expected.push((log.append(&next), next));
            }
            if log.commit(expected.len() as u64).is_ok() {
                answered = expected.len();
            }
            prop_assert!(log.written() as usize >= answered);
            prop_assert_eq!(&read(&log).unwrap()[..], &expected[..log.written() as usize]);
            disk.free_bytes.fetch_add(room, SeqCst);
        }
        // A crash now keeps what was answered for.
        let copy = TempDir::new().unwrap();
        for entry in fs::read_dir(folder.path()).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
        }
        let (after, _) = open(copy.path()).unwrap();
        let kept = read(&after).unwrap();
        prop_assert!(kept.len() >= answered);
        prop_assert_eq!(&kept[..], &expected[..kept.len()]);
        disk.fail_truncate.store(false, SeqCst);
        disk.free_bytes.store(1 << 20, SeqCst);
        log.commit(expected.len() as u64).unwrap();
        prop_assert_eq!(read(&log).unwrap(), expected);
        prop_assert_eq!(log.unwritten_bytes(), 0);
    }

    /// What a killed process leaves of its last write is a beginning of it.
    #[test]
    fn a_torn_tail_is_cut_off(sizes in prop::collection::vec(0..60_usize, 1..20), lost in 1..80_usize) {
        let folder = TempDir::new().unwrap();
        let (log, _) = open(folder.path()).unwrap();
        let records: Vec<_> = sizes.iter().enumerate().map(|(at, size)| vec![at as u8; *size]).collect();
        for record in &records {
            write(&log, [record.clone()]).unwrap();
        }
        drop(log);
        let newest = newest_file(folder.path());
        let bytes = fs::read(&newest).unwrap();
        // Never across the end of the record before.
        let kept = bytes.len() - lost.min(sizes[sizes.len() - 1] + 16);
        fs::write(&newest, &bytes[..kept]).unwrap();
        let (log, opened) = open(folder.path()).unwrap();
        prop_assert_eq!((&opened.damage, opened.next as usize), (&None, records.len()));
        prop_assert_eq!(opened.torn_bytes as usize, (sizes[sizes.len() - 1] + 16).saturating_sub(lost));
        let kept = read(&log).unwrap();
        let expected: Vec<_> = records.iter().zip(1..).map(|(record, number)| (number, record.clone())).collect();
        prop_assert_eq!(&kept[..], &expected[..records.len() - 1]);
        write(&log, [b"more".to_vec()]).unwrap();
        prop_assert_eq!(read(&log).unwrap().pop(), Some((opened.next, b"more".to_vec())));
    }

    /// After a machine failure, bytes behind the last record were not flushed.
    #[test]
    fn any_tail_may_be_torn_when_the_machine_died(garbage in prop::collection::vec(any::<u8>(), 0..200)) {
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
    fn no_wrong_record_is_read(at in 0..2000_usize, bit in 0..8_u32) {
        let folder = TempDir::new().unwrap();
        let (log, _) = open(folder.path()).unwrap();
        for seed in 0..8 {
            write(&log, [record(seed * 7)]).unwrap();
        }
        drop(log);
        let newest = newest_file(folder.path());
        let mut bytes = fs::read(&newest).unwrap();
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        fs::write(&newest, bytes).unwrap();
        let (log, opened) = open(folder.path()).unwrap();
        let damage = opened.damage.expect("reported");
        prop_assert!(damage.offset as usize <= at, "{}", damage);
        // What follows the damage can be read, and it is what was written.
        let mut reader = log.reader(opened.contiguous_from).unwrap();
        while let Some((number, kept)) = reader.next().unwrap() {
            prop_assert_eq!(kept, record((number as usize - 1) * 7));
        }
    }
}

#[test]
fn the_newest_whole_snapshot_counts() {
    let folder = TempDir::new().unwrap();
    let taken = Arc::new(LogDirectory::lock(folder.path()).unwrap());
    let entries = |path: &PathBuf| {
        let mut all = Vec::new();
        snapshot::read(&taken, path, |entry| all.push(entry.to_vec())).map(|()| all)
    };
    for number in [10, 20, 30] {
        let mut writer = snapshot::SnapshotWriter::begin(Arc::clone(&taken), number).unwrap();
        (0..3).for_each(|at| writer.write(&record(number as usize + at)).unwrap());
        let needed = writer.finish().unwrap();
        assert_eq!(needed, number.max(20) - 10 + 1);
    }
    // One that was not finished does not count.
    snapshot::SnapshotWriter::begin(Arc::clone(&taken), 40).unwrap().write(b"x").unwrap();
    let all = snapshot::list(&taken).unwrap();
    assert_eq!(all.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [30, 20]);
    assert_eq!(entries(&all[0].1).unwrap(), (30..33).map(record).collect::<Vec<_>>());
    let whole = fs::read(&all[0].1).unwrap();
    for length in 0..whole.len() {
        fs::write(&all[0].1, &whole[..length]).unwrap();
        assert!(matches!(entries(&all[0].1), Err(OplogError::Damaged { .. })), "cut at {length}");
    }
    snapshot::remove_all(&taken).unwrap();
    assert!(snapshot::list(&taken).unwrap().is_empty());
}
