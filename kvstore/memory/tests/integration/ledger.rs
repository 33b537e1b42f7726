//! The ledger against a model, with processes that end at any time and memory whose bits change.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;

use moongate_memory::ledger::{
    Ledger, LedgerError, LedgerWriteOutcome, OpenedLedger, SegmentIdentity, bytes_for,
};
use moongate_memory::{Crc32c, MappedRegion, PageMode, Scrubber, memfd};
use proptest::prelude::*;

const SIZE: u64 = 1 << 16;

fn memory(size: u64) -> OwnedFd {
    memfd("moongate-test-ledger", bytes_for(size), PageMode::Normal).unwrap().0
}

fn identity(name: &str) -> SegmentIdentity {
    SegmentIdentity { segment: [1, 2], client: [3, 4], name: name.to_owned(), base: 0x5000, size: SIZE }
}

fn start(memory: &OwnedFd, size: u64) -> Ledger {
    match Ledger::open(memory, size).unwrap() {
        OpenedLedger::Empty(empty) => empty.start(SegmentIdentity { size, ..identity("a") }, false).unwrap(),
        OpenedLedger::Existing(_) => unreachable!("new memory"),
    }
}

fn reopen(memory: &OwnedFd, size: u64) -> Ledger {
    match Ledger::open(memory, size).unwrap() {
        OpenedLedger::Existing(ledger) => ledger,
        OpenedLedger::Empty(_) => unreachable!("the ledger exists"),
    }
}

fn write(ledger: &Ledger, region: &MappedRegion, offset: u64, bytes: &[u8]) -> LedgerWriteOutcome {
    let writing = ledger.begin(offset, bytes.len() as u64).unwrap();
    region.write_at(offset, bytes).unwrap();
    writing.finish(Crc32c::of(bytes))
}

#[test]
fn only_one_process_can_open_a_ledger() {
    let memory = memory(SIZE);
    let ledger = start(&memory, SIZE);
    assert!(matches!(Ledger::open(&memory, SIZE), Err(LedgerError::InUse)));
    drop(ledger);
    let empty = reopen(&memory, SIZE).wipe();
    assert!(matches!(Ledger::open(&memory, SIZE), Err(LedgerError::InUse)));
    drop(empty);
    reopen(&memory, SIZE);
}

#[test]
fn the_last_identity_is_restored() {
    let memory = memory(SIZE);
    let ledger = start(&memory, SIZE);
    ledger.set_identity(identity("b")).unwrap();
    ledger.set_identity(SegmentIdentity { client: [9, 9], ..identity("c") }).unwrap();
    assert!(matches!(ledger.set_identity(identity(&"n".repeat(2000))), Err(LedgerError::Name(2000))));
    drop(ledger);
    assert_eq!(reopen(&memory, SIZE).identity(), SegmentIdentity { client: [9, 9], ..identity("c") });
}

#[test]
fn a_segment_of_another_size_is_empty() {
    let big = memory(1 << 30);
    start(&big, 1 << 29);
    assert!(matches!(Ledger::open(&big, 1 << 30).unwrap(), OpenedLedger::Empty(_)));
    assert!(Ledger::open(memory(SIZE), 1 << 30).is_err(), "not enough memory for its slots");
}

#[test]
fn a_wiped_ledger_is_empty_after_reopening() {
    let memory = memory(SIZE);
    let region = MappedRegion::anonymous(SIZE, PageMode::Normal).unwrap();
    let ledger = start(&memory, SIZE);
    write(&ledger, &region, 0, b"moon");
    let ledger = ledger.wipe().start(identity("b"), false).unwrap();
    assert_eq!(ledger.counts().entries, 0);
    drop(ledger);
    assert_eq!(reopen(&memory, SIZE).entries(0, 9), []);
}

#[test]
fn adjacent_entries_cover_a_range_together() {
    let memory = memory(SIZE);
    let region = MappedRegion::anonymous(SIZE, PageMode::Normal).unwrap();
    let ledger = start(&memory, SIZE);
    write(&ledger, &region, 100, &[1; 100]);
    write(&ledger, &region, 200, &[1; 50]);
    write(&ledger, &region, 251, &[1; 50]);
    assert!(ledger.covers(100, 150));
    assert!(ledger.covers(120, 100));
    assert!(!ledger.covers(99, 100));
    assert!(!ledger.covers(100, 151));
    assert!(!ledger.covers(200, 101));
    assert!(!ledger.covers(u64::MAX, 2));
    assert!(ledger.find(100, 100).is_some());
    assert!(ledger.find(100, 150).is_none());
    assert_eq!(ledger.remove(249, 3), 2);
    assert_eq!(ledger.counts().bytes, 100);
}

#[test]
fn writes_that_overlap_each_other_leave_no_entry() {
    let memory = memory(SIZE);
    let ledger = start(&memory, SIZE);
    let first = ledger.begin(0, 100).unwrap();
    let second = ledger.begin(50, 100).unwrap();
    let adjacent = ledger.begin(150, 10).unwrap();
    let nothing = ledger.begin(20, 0).unwrap();
    assert_eq!(nothing.finish(0), LedgerWriteOutcome::Recorded);
    assert_eq!(first.finish(1), LedgerWriteOutcome::Overlapped);
    assert_eq!(second.finish(2), LedgerWriteOutcome::Overlapped);
    assert_eq!(adjacent.finish(3), LedgerWriteOutcome::Recorded);
    assert_eq!(ledger.counts().unrecorded, 2);
    let entries = ledger.entries(0, 9);
    assert_eq!(entries.iter().map(|entry| (entry.offset, entry.crc)).collect::<Vec<_>>(), [(150, 3)]);
    // An unfinished write does not affect later ones.
    drop(ledger.begin(0, 100).unwrap());
    assert_eq!(ledger.begin(0, 100).unwrap().finish(4), LedgerWriteOutcome::Recorded);
}

#[test]
fn a_full_ledger_reports_it_and_keeps_working() {
    let memory = memory(SIZE);
    let ledger = start(&memory, SIZE);
    let outcomes: Vec<_> = (0..1030).map(|at| ledger.begin(at * 8, 8).unwrap().finish(0)).collect();
    assert!(outcomes[..1024].iter().all(|&outcome| outcome == LedgerWriteOutcome::Recorded));
    assert!(outcomes[1024..].iter().all(|&outcome| outcome == LedgerWriteOutcome::NoFreeSlot));
    // Entries without a slot are valid as long as this process lives.
    assert!(ledger.covers(8192, 48) && ledger.find(8192, 8).is_some());
    assert_eq!((ledger.counts().entries, ledger.counts().unrecorded), (1030, 6));
    assert_eq!(ledger.remove(8192, 16), 2);
    assert!(!ledger.covers(8192, 8));
    assert_eq!(ledger.begin(0, 8).unwrap().finish(0), LedgerWriteOutcome::Recorded, "in its own slot");
    assert_eq!(ledger.begin(8000, 8).unwrap().finish(0), LedgerWriteOutcome::Recorded);
    drop(ledger);
    assert_eq!(reopen(&memory, SIZE).counts().entries, 1024);
}

#[test]
fn entries_without_a_slot_live_in_the_process_only() {
    let memory = memory(SIZE);
    let ledger = start(&memory, SIZE);
    for at in 0..1024 {
        assert_eq!(ledger.begin(at * 8, 8).unwrap().finish(0), LedgerWriteOutcome::Recorded);
    }
    drop(ledger);
    let ledger = reopen(&memory, SIZE);
    assert_eq!(ledger.begin(9000, 100).unwrap().finish(7), LedgerWriteOutcome::NoFreeSlot);
    assert!(ledger.covers(9000, 100));
    assert_eq!(ledger.find(9000, 100).map(|entry| entry.crc), Some(7));
}

#[test]
fn ledger_memory_grows_with_the_number_of_entries() {
    const LARGE: u64 = 1 << 30;
    let memory = memory(LARGE);
    let allocated = || std::fs::File::from(memory.try_clone().unwrap()).metadata().unwrap().blocks() * 512;
    let ledger = start(&memory, LARGE);
    assert!(allocated() <= 4096, "{}", allocated());
    for at in 0..1000 {
        assert_eq!(ledger.begin(at * 4096, 4096).unwrap().finish(1), LedgerWriteOutcome::Recorded);
    }
    drop(ledger);
    let ledger = reopen(&memory, LARGE);
    assert_eq!(ledger.counts().entries, 1000);
    assert!(allocated() <= 10 * 4096, "{}", allocated());
    assert_eq!(bytes_for(LARGE) / 4096, 2049);
    // Freed slots are reused.
    assert_eq!(ledger.remove(0, 4096 * 1000), 1000);
    for at in 0..1000 {
        assert_eq!(ledger.begin(at * 4096, 4096).unwrap().finish(2), LedgerWriteOutcome::Recorded);
    }
    assert!(allocated() <= 10 * 4096, "{}", allocated());
    drop(ledger);
    let restarted =
        reopen(&memory, LARGE).wipe().start(SegmentIdentity { size: LARGE, ..identity("b") }, false).unwrap();
    assert_eq!(restarted.counts().entries, 0);
    drop(restarted);
    assert_eq!(reopen(&memory, LARGE).counts().entries, 0);
}

#[test]
fn ranges_outside_the_region_are_rejected() {
    let memory = memory(SIZE);
    let ledger = start(&memory, SIZE);
    for (offset, len) in [(SIZE, 1), (0, SIZE + 1), (u64::MAX, 1), (1, u64::MAX)] {
        assert!(ledger.begin(offset, len).is_err());
        assert!(!ledger.covers(offset, len));
        assert_eq!(ledger.remove(offset, len), 0);
    }
}

#[test]
fn the_scrubber_finds_exactly_the_corrupt_ranges() {
    let memory = memory(64 << 20);
    let region = MappedRegion::anonymous(64 << 20, PageMode::Normal).unwrap();
    let ledger = start(&memory, 64 << 20);
    // One entry of several chunks, and small ones.
    write(&ledger, &region, 0, &vec![3; 5 << 20]);
    for at in 0..100 {
        write(&ledger, &region, (8 << 20) + at * 1000, &[at as u8; 1000]);
    }
    let mut scrubber = Scrubber::new();
    let mut steps = 0;
    let mut read = 0;
    loop {
        let step = scrubber.step(&ledger, &region, 1 << 20);
        assert!(step.damaged.is_empty());
        read += step.bytes;
        steps += 1;
        if step.reached_end {
            break;
        }
    }
    assert_eq!(read, ledger.counts().bytes);
    assert!(steps >= 5, "{steps} steps");

    region.write_at((4 << 20) + 77, &[2]).unwrap();
    region.write_at((8 << 20) + 50_999, &[51]).unwrap();
    let all = Scrubber::run_full(&ledger, &region);
    let damaged: Vec<_> = all.damaged.iter().map(|entry| (entry.offset, entry.len)).collect();
    assert_eq!(damaged, [(0, 5 << 20), ((8 << 20) + 50_000, 1000)]);
    assert_eq!(ledger.counts().entries, 99);
    assert!(Scrubber::run_full(&ledger, &region).damaged.is_empty());
}

#[test]
fn a_range_rewritten_during_its_check_is_not_corrupt() {
    let memory = memory(64 << 20);
    let region = MappedRegion::anonymous(64 << 20, PageMode::Normal).unwrap();
    let ledger = start(&memory, 64 << 20);
    write(&ledger, &region, 0, &vec![3; 4 << 20]);
    let mut scrubber = Scrubber::new();
    scrubber.step(&ledger, &region, 1 << 20);
    write(&ledger, &region, 0, &vec![4; 4 << 20]);
    write(&ledger, &region, 0, &vec![3; 4 << 20]);
    region.write_at(100, &[9]).unwrap();
    region.write_at(3 << 20, &[9]).unwrap();
    let step = scrubber.step(&ledger, &region, 100 << 20);
    assert!(step.damaged.is_empty(), "the bytes checked first belonged to another write");
    assert_eq!(Scrubber::run_full(&ledger, &region).damaged.len(), 1);
}

#[derive(Debug, Clone)]
enum LedgerStep {
    Write { offset: u64, len: u64, byte: u8 },
    InterruptedWrite { offset: u64, len: u64, byte: u8, written: u64 },
    Remove { offset: u64, len: u64 },
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<LedgerStep>> {
    let part = || (0..SIZE / 64, 1..20u64).prop_map(|(at, len)| (at * 64, (len * 61).min(SIZE - at * 64)));
    let step = prop_oneof![
        6 => (part(), any::<u8>()).prop_map(|((offset, len), byte)| LedgerStep::Write { offset, len, byte }),
        2 => (part(), any::<u8>(), 0..64u64).prop_map(|((offset, len), byte, written)| {
            LedgerStep::InterruptedWrite { offset, len, byte, written: written.min(len) }
        }),
        1 => part().prop_map(|(offset, len)| LedgerStep::Remove { offset, len }),
        1 => Just(LedgerStep::Reopen),
    ];
    prop::collection::vec(step, 1..120)
}

/// Offset → length and byte of the expected content.
type LedgerModel = BTreeMap<u64, (u64, u8)>;

fn drop_overlapping(model: &mut LedgerModel, offset: u64, len: u64) {
    model.retain(|&at, &mut (size, _)| at + size <= offset || offset + len <= at);
}

fn compare(ledger: &Ledger, region: &MappedRegion, model: &LedgerModel) {
    let entries = ledger.entries(0, usize::MAX);
    let actual: Vec<_> = entries.iter().map(|entry| (entry.offset, entry.len, entry.crc)).collect();
    let expected: Vec<_> = model
        .iter()
        .map(|(&offset, &(len, byte))| (offset, len, Crc32c::of(&vec![byte; len as usize])))
        .collect();
    assert_eq!(actual, expected);
    assert_eq!(ledger.counts().damaged, 0);
    assert!(Scrubber::run_full(ledger, region).damaged.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_ledger_matches_the_model(steps in steps()) {
        let memory = memory(SIZE);
        let region = MappedRegion::anonymous(SIZE, PageMode::Normal).unwrap();
        let mut ledger = start(&memory, SIZE);
        let mut model = LedgerModel::new();
        for step in steps {
            match step {
                LedgerStep::Write { offset, len, byte } => {
                    drop_overlapping(&mut model, offset, len);
                    model.insert(offset, (len, byte));
                    prop_assert_eq!(
                        write(&ledger, &region, offset, &vec![byte; len as usize]),
                        LedgerWriteOutcome::Recorded
                    );
                }
                LedgerStep::InterruptedWrite { offset, len, byte, written } => {
                    drop_overlapping(&mut model, offset, len);
                    let writing = ledger.begin(offset, len).unwrap();
                    region.write_at(offset, &vec![byte; written as usize]).unwrap();
                    drop(writing);
                }
                LedgerStep::Remove { offset, len } => {
                    drop_overlapping(&mut model, offset, len);
                    ledger.remove(offset, len);
                }
                LedgerStep::Reopen => {
                    drop(ledger);
                    ledger = reopen(&memory, SIZE);
                }
            }
        }
        compare(&ledger, &region, &model);
        drop(ledger);
        compare(&reopen(&memory, SIZE), &region, &model);
    }

    #[test]
    fn flipped_bits_lose_entries_but_never_create_any(
        parts in prop::collection::vec(1..200u64, 1..40),
        flips in prop::collection::vec((0..8192u64, 0..8u32), 1..20),
    ) {
        let memory = memory(SIZE);
        let ledger = start(&memory, SIZE);
        let mut offset = 0;
        let mut actual = Vec::new();
        for (crc, len) in parts.into_iter().enumerate() {
            prop_assert_eq!(ledger.begin(offset, len).unwrap().finish(crc as u32), LedgerWriteOutcome::Recorded);
            actual.push((offset, len, crc as u32));
            offset += len;
        }
        drop(ledger);
        let raw = MappedRegion::from_fd(memory.try_clone().unwrap(), bytes_for(SIZE), None).unwrap();
        for (at, bit) in flips {
            let mut byte = [0];
            raw.read_at(at, &mut byte).unwrap();
            raw.write_at(at, &[byte[0] ^ (1 << bit)]).unwrap();
        }
        if let OpenedLedger::Existing(ledger) = Ledger::open(&memory, SIZE).unwrap() {
            prop_assert_eq!(ledger.identity(), identity("a"));
            for entry in ledger.entries(0, usize::MAX) {
                prop_assert!(actual.contains(&(entry.offset, entry.len, entry.crc)), "{:?}", entry);
            }
        }
    }
}
