//! The files of a segment may be corrupt in any way. They open, and each recovered object has a range that the ledger's entries cover to
//! the byte.

#![no_main]

use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use moongate_memory::ledger::{Ledger, OpenedLedger, RecordOutcome, SegmentIdentity};
use moongate_memory::{Crc32c, ObjectRecord, ObjectVersion, PageMode, catalog, ledger, memfd, reopen};

const SIZE: u64 = 1 << 16;
/// Number of bytes of each file into which faults are injected.
const USED: usize = 8192;

/// The files of a segment with some objects.
fn intact() -> &'static [Vec<u8>; 2] {
    static FILES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    FILES.get_or_init(|| {
        let files = [ledger::bytes_for(SIZE), catalog::bytes_for(SIZE)]
            .map(|length| memfd("fuzz", length, PageMode::Normal).unwrap().0);
        let OpenedLedger::Empty(blank) = Ledger::open(&files[0], SIZE).unwrap() else { unreachable!() };
        let ledger =
            blank.start(SegmentIdentity { segment: [1, 2], ..SegmentIdentity::default() }, false).unwrap();
        ledger.open_catalog(&files[1]).unwrap();
        for number in 0..12_u64 {
            let (offset, size) = (number * 4096, 100 + number);
            ledger.begin(offset, size).unwrap().finish(Crc32c::of(&[number as u8]));
            let record = ObjectRecord {
                key: "key".repeat(1 + number as usize * 3),
                offset,
                size,
                version: ObjectVersion { epoch: 1, sequence: number },
                ..ObjectRecord::default()
            };
            assert_eq!(ledger.record_object(record, u64::MAX), RecordOutcome::Recorded);
        }
        files.map(|file| {
            let mut bytes = vec![0; USED];
            reopen(&file).unwrap().read_exact_at(&mut bytes, 0).unwrap();
            bytes
        })
    })
}

// Each four input bytes change one byte: file, position and value.
fuzz_target!(|faults: &[u8]| {
    let mut bytes = intact().clone();
    let (faults, _) = faults.as_chunks::<4>();
    for [file, high, low, value] in faults {
        let at = usize::from(u16::from_le_bytes([*low, *high])) % USED;
        bytes[usize::from(*file) % 2][at] ^= value;
    }
    let files = [ledger::bytes_for(SIZE), catalog::bytes_for(SIZE)]
        .map(|length| memfd("fuzz", length, PageMode::Normal).unwrap().0);
    for (file, bytes) in files.iter().zip(&bytes) {
        reopen(file).unwrap().write_all_at(bytes, 0).unwrap();
    }
    let OpenedLedger::Existing(ledger) = Ledger::open(&files[0], SIZE).unwrap() else { return };
    ledger.open_catalog(&files[1]).unwrap();
    for record in ledger.objects(0, usize::MAX) {
        assert!(ledger.covers(record.offset, record.size), "{record:?}");
    }
    assert!(ledger.begin(0, SIZE).is_ok() && ledger.objects(0, 1).is_empty());
});
