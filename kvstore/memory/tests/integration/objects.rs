//! The object catalog under disk and memory faults: every offered object is proven, and every loss is counted.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;

use moongate_memory::catalog::{self, CatalogCounts};
use moongate_memory::ledger::{Ledger, OpenedLedger, RecordOutcome, SegmentIdentity, bytes_for};
use moongate_memory::numa::NumaPlacement;
use moongate_memory::{
    Crc32c, MappedRegion, ObjectRecord, ObjectVersion, PageMode, SegmentBacking, SegmentMemory,
    SegmentOptions, memfd, reopen,
};

const SIZE: u64 = 1 << 16;
/// Size of the file area with injected faults: all bytes written by the history.
const USED: u64 = 4096 + 4096;

/// Written bytes by key and version.
type WrittenVersions = BTreeMap<(String, u64), Vec<u8>>;

/// Files and memory of a segment.
struct SegmentTestFiles {
    ledger: OwnedFd,
    catalog: OwnedFd,
    region: MappedRegion,
}

/// All written bytes of a segment's files at one point in time.
#[derive(Clone)]
struct SegmentFilesSnapshot {
    ledger: Vec<u8>,
    catalog: Vec<u8>,
    region: Vec<u8>,
    /// Version and bytes of each recorded object that was not dropped.
    objects: BTreeMap<String, (u64, Vec<u8>)>,
}

impl SegmentTestFiles {
    fn new() -> Self {
        let file = |len| memfd("moongate-test-objects", len, PageMode::Normal).unwrap().0;
        Self {
            ledger: file(bytes_for(SIZE)),
            catalog: file(catalog::bytes_for(SIZE)),
            region: MappedRegion::anonymous(SIZE, PageMode::Normal).unwrap(),
        }
    }

    fn from_snapshot(snapshot: &SegmentFilesSnapshot) -> Self {
        let files = Self::new();
        files.restore(snapshot);
        files
    }

    fn restore(&self, snapshot: &SegmentFilesSnapshot) {
        self.restore_files(snapshot);
        self.region.write_at(0, &snapshot.region).unwrap();
    }

    fn restore_files(&self, snapshot: &SegmentFilesSnapshot) {
        let ledger = reopen(self.ledger.as_fd()).unwrap();
        ledger.write_all_at(&snapshot.ledger, 0).unwrap();
        reopen(self.catalog.as_fd()).unwrap().write_all_at(&snapshot.catalog, 0).unwrap();
    }

    fn snapshot(&self, objects: &BTreeMap<String, (u64, Vec<u8>)>) -> SegmentFilesSnapshot {
        let read = |file: &OwnedFd| {
            let mut bytes = vec![0; USED as usize];
            reopen(file).unwrap().read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        let mut region = vec![0; SIZE as usize];
        self.region.read_at(0, &mut region).unwrap();
        let (ledger, catalog) = (read(&self.ledger), read(&self.catalog));
        SegmentFilesSnapshot { ledger, catalog, region, objects: objects.clone() }
    }

    fn open(&self) -> Option<(Ledger, CatalogCounts)> {
        let ledger = match Ledger::open(&self.ledger, SIZE).unwrap() {
            OpenedLedger::Existing(ledger) => ledger,
            OpenedLedger::Empty(_) => return None,
        };
        let counts = ledger.open_catalog(&self.catalog).unwrap();
        Some((ledger, counts))
    }

    /// Checks that offered objects have the bytes written under their key; returns their number.
    fn check_offered(&self, ledger: &Ledger, written: &WrittenVersions) -> u64 {
        let offered = ledger.objects(0, 1000);
        for record in &offered {
            let mut bytes = vec![0; record.size as usize];
            self.region.read_at(record.offset, &mut bytes).unwrap();
            let expected = written.get(&(record.key.clone(), record.version.sequence));
            assert_eq!(Some(&bytes), expected, "wrong bytes under {} {:?}", record.key, record.version);
        }
        offered.len() as u64
    }
}

fn record(key: &str, offset: u64, size: u64, sequence: u64) -> ObjectRecord {
    let version = ObjectVersion { epoch: 1, sequence };
    ObjectRecord {
        tenant: "default".into(),
        key: key.into(),
        offset,
        size,
        version,
        ..ObjectRecord::default()
    }
}

fn write(ledger: &Ledger, region: &MappedRegion, offset: u64, bytes: &[u8]) {
    let writing = ledger.begin(offset, bytes.len() as u64).unwrap();
    region.write_at(offset, bytes).unwrap();
    writing.finish(Crc32c::of(bytes));
}

/// Writes twenty objects to reused ranges, some in several slices, with a snapshot after each step.
fn history() -> (Vec<SegmentFilesSnapshot>, WrittenVersions) {
    let files = SegmentTestFiles::new();
    let OpenedLedger::Empty(empty) = Ledger::open(&files.ledger, SIZE).unwrap() else {
        unreachable!("new memory")
    };
    let identity = SegmentIdentity { segment: [1, 2], name: "a".into(), ..SegmentIdentity::default() };
    let ledger = empty.start(identity, false).unwrap();
    assert_eq!(ledger.open_catalog(&files.catalog).unwrap(), CatalogCounts::default());
    let (mut live, mut written) = (BTreeMap::new(), BTreeMap::new());
    let mut snapshots = vec![files.snapshot(&live)];
    for number in 0..20_u64 {
        let offset = (number * 7 % 8) * 4096;
        let size = 1000 + number as usize * 37;
        let bytes: Vec<u8> = (0..size).map(|index| (index as u64 * 31 + number) as u8).collect();
        let key = format!("object-{}{}", number % 10, "-long".repeat(number as usize % 4 * 12));
        live.retain(|_, (_, old): &mut (u64, Vec<u8>)| old[0] as u64 != offset / 4096);
        let (first, rest) = bytes.split_at(size / 2);
        write(&ledger, &files.region, offset, first);
        snapshots.push(files.snapshot(&BTreeMap::new()));
        write(&ledger, &files.region, offset + first.len() as u64, rest);
        let object = record(&key, offset, size as u64, number);
        written.insert((key, number), bytes);
        assert_eq!(ledger.record_object(object, ledger.version()), RecordOutcome::Recorded);
        if number % 6 == 5 {
            assert!(ledger.drop_object(offset, ObjectVersion { epoch: 1, sequence: number }));
        }
        live.clear();
        for object in ledger.objects(0, 100) {
            let bytes = written[&(object.key.clone(), object.version.sequence)].clone();
            live.insert(object.key, (object.version.sequence, bytes));
        }
        snapshots.push(files.snapshot(&live));
    }
    (snapshots, written)
}

#[test]
fn a_report_is_rejected_for_newer_bytes() {
    let files = SegmentTestFiles::new();
    let OpenedLedger::Empty(empty) = Ledger::open(&files.ledger, SIZE).unwrap() else {
        unreachable!("new memory")
    };
    let ledger = empty.start(SegmentIdentity::default(), false).unwrap();
    assert_eq!(ledger.record_object(record("a", 0, 10, 1), u64::MAX), RecordOutcome::Unproven);
    write(&ledger, &files.region, 0, &[1; 10]);
    assert_eq!(
        ledger.record_object(record("a", 0, 10, 1), u64::MAX),
        RecordOutcome::Unrecorded,
        "no catalog"
    );
    ledger.open_catalog(&files.catalog).unwrap();
    // The report dates from when the range was a's; another object has replaced it.
    let reported = ledger.version();
    write(&ledger, &files.region, 0, &[2; 10]);
    assert_eq!(ledger.record_object(record("a", 0, 10, 1), reported), RecordOutcome::Unproven);
    assert_eq!(ledger.record_object(record("b", 0, 10, 2), ledger.version()), RecordOutcome::Recorded);
    for (offset, size) in [(0, 9), (0, 11), (1, 9)] {
        let other = record("c", offset, size, 3);
        assert_eq!(ledger.record_object(other, u64::MAX), RecordOutcome::Unproven, "{size} at {offset}");
    }
    assert_eq!(ledger.objects(0, 9)[0].key, "b");
    // It is not offered from the first byte of an overwrite on.
    let writing = ledger.begin(9, 1).unwrap();
    assert_eq!(ledger.objects(0, 9), []);
    drop(writing);
    assert_eq!(ledger.catalog_counts().unwrap().objects, 0);
}

#[test]
fn every_flipped_bit_is_a_counted_loss_or_harmless() {
    let (snapshots, written) = history();
    let last = snapshots.last().unwrap();
    let before = last.objects.len() as u64;
    assert!(before >= 5, "{before} objects");
    let files = SegmentTestFiles::from_snapshot(last);
    let (clean, counts) = files.open().unwrap();
    assert_eq!((files.check_offered(&clean, &written), counts.damaged), (before, 0));
    drop(clean);
    for of_ledger in [false, true] {
        let (file, bytes) =
            if of_ledger { (&files.ledger, &last.ledger) } else { (&files.catalog, &last.catalog) };
        let file = reopen(file).unwrap();
        // One bit per byte, at varying positions: other tests cover all bits of slots and headers.
        let in_use = bytes.iter().rposition(|byte| *byte != 0).unwrap();
        for (at, byte) in bytes.iter().enumerate().take(in_use + 64) {
            if (32..4096).contains(&at) && *byte == 0 {
                continue;
            }
            {
                let bit = at % 8;
                files.restore_files(last);
                file.write_all_at(&[byte ^ (1 << bit)], at as u64).unwrap();
                let Some((ledger, counts)) = files.open() else {
                    assert!(of_ledger && at < 4096, "only with both header copies damaged");
                    continue;
                };
                let offered = files.check_offered(&ledger, &written);
                let counted = counts.damaged + counts.stale + ledger.counts().damaged;
                assert!(offered + counted >= before, "{offered} offered, {counted} counted, byte {at}");
            }
        }
    }
}

/// Pages reach a disk in any order: combine every catalog with every ledger.
#[test]
fn no_mix_of_snapshots_offers_wrong_bytes() {
    let (snapshots, written) = history();
    let files = SegmentTestFiles::new();
    for ledger in &snapshots {
        for catalog in &snapshots {
            files.restore(&SegmentFilesSnapshot { catalog: catalog.catalog.clone(), ..ledger.clone() });
            let (opened, counts) = files.open().unwrap();
            assert_eq!(counts.damaged, 0);
            files.check_offered(&opened, &written);
        }
    }
}

#[test]
fn a_record_in_another_slot_is_damaged() {
    let (snapshots, written) = history();
    let last = snapshots.last().unwrap();
    for (from, to) in (0..40).flat_map(|from| (0..40).map(move |to| (from, to))) {
        let mut moved = last.clone();
        let slot = |number: usize| 4096 + number * 64..4096 + (number + 1) * 64;
        moved.catalog.copy_within(slot(from), slot(to).start);
        let files = SegmentTestFiles::from_snapshot(&moved);
        let (ledger, counts) = files.open().unwrap();
        let offered = files.check_offered(&ledger, &written);
        assert!(offered + counts.damaged + counts.stale >= last.objects.len() as u64, "{from} over {to}");
    }
}

#[test]
fn truncated_files_reset_and_older_folders_open() {
    let folder = tempfile::tempdir().unwrap();
    let options = SegmentOptions {
        backing: SegmentBacking::Folder(folder.path().into()),
        label: "cut".into(),
        size: SIZE,
        pages: PageMode::Normal,
        placement: NumaPlacement::Anywhere,
        direct_writes: false,
    };
    let open = || {
        SegmentMemory::open(&options, |base| SegmentIdentity {
            segment: [3, 4],
            base,
            ..SegmentIdentity::default()
        })
        .unwrap()
    };
    let fill = |segment: &SegmentMemory| {
        write(&segment.ledger, &segment.region, 0, &[7; 100]);
        segment.ledger.record_object(record("a", 0, 100, 1), u64::MAX)
    };
    assert_eq!(fill(&open()), RecordOutcome::Recorded);
    assert_eq!(open().ledger.objects(0, 9).len(), 1);
    // A folder of a release without a catalog: complete ranges stay, and can be recorded.
    let path = folder.path().join("cut.objects");
    std::fs::remove_file(&path).unwrap();
    let segment = open();
    assert!(segment.is_restored && segment.ledger.objects(0, 9).is_empty());
    assert_eq!(segment.ledger.counts().entries, 1);
    segment.ledger.record_object(record("a", 0, 100, 1), u64::MAX);
    drop(segment);
    // An older release overwrites the object; its new bytes must not be served as the old object.
    let older = std::fs::read(&path).unwrap();
    let segment = open();
    write(&segment.ledger, &segment.region, 0, &[8; 100]);
    drop(segment);
    std::fs::write(&path, &older).unwrap();
    let segment = open();
    assert!(segment.ledger.objects(0, 9).is_empty());
    assert_eq!(segment.ledger.catalog_counts().unwrap().stale, 1);
    fill(&segment);
    drop(segment);
    let whole = std::fs::read(&path).unwrap();
    for length in (0..64).chain((4096..4300).step_by(5)) {
        std::fs::write(&path, &whole[..length]).unwrap();
        let segment = open();
        assert!(segment.is_restored && segment.ledger.objects(0, 9).is_empty(), "{length} bytes");
    }
}
