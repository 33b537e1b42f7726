//! A tier opens its file after any corruption, and returns for each key the bytes that were put under it, or nothing.
//!
//! The first byte has flags; with `TRUNCATE`, the second sets the file's new length. Each further four bytes change one byte of the
//! file: the offset (three bytes) and the XOR mask. With `VALID_CHECKSUMS`, checksums of changed pages are recomputed; their content is
//! then arbitrary, so that only sizes and panics are checked.

#![no_main]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use moongate_tier::{FileTier, TierOptions};

const BLOCK: u32 = 4096;
const BLOCKS: u64 = 12;
const PAGE: usize = 4096;
/// Bytes of the superblock and of one metadata page per block.
const PAGES: usize = PAGE * (1 + BLOCKS as usize);
/// File offset of the first block.
const DATA: usize = 1 << 20;
const VALID_CHECKSUMS: u8 = 1;
const TRUNCATE: u8 = 2;
const IO_URING: u8 = 4;

struct IntactTierFile {
    file: Vec<u8>,
    objects: BTreeMap<Vec<u8>, Vec<u8>>,
}

fn options(io_uring: bool) -> TierOptions {
    let path = PathBuf::from(format!("/dev/shm/moongate-fuzz-tier-{}", std::process::id()));
    let capacity = (PAGE + DATA) as u64 + BLOCKS * u64::from(BLOCK + 4096);
    TierOptions { block: BLOCK, io_uring, ..TierOptions::new(path, capacity) }
}

static INTACT_FILE: LazyLock<IntactTierFile> = LazyLock::new(|| {
    let options = options(false);
    let _ = fs::remove_file(&options.path);
    let tier = FileTier::open(&options).expect("a new tier");
    let mut objects = BTreeMap::new();
    for number in 0..6_u8 {
        let object = vec![number + 1; 1 + usize::from(number) * 1500];
        let key = vec![b'k', number];
        tier.put(&key, &object).expect("there is room");
        objects.insert(key, object);
    }
    tier.close().expect("/dev/shm is writable");
    IntactTierFile { file: fs::read(&options.path).expect("the closed tier's file exists"), objects }
});

fn corrupted(flags: u8, length: u8, faults: &[u8]) -> Vec<u8> {
    let mut file = INTACT_FILE.file.clone();
    let used = PAGES + BLOCKS as usize * BLOCK as usize;
    for [high, middle, low, value] in faults.as_chunks::<4>().0 {
        let index = u32::from_le_bytes([*low, *middle, *high, 0]) as usize % used;
        let offset = if index < PAGES { index } else { index - PAGES + DATA };
        file[offset] ^= value;
        if flags & VALID_CHECKSUMS != 0 && offset < PAGES {
            let page = &mut file[offset / PAGE * PAGE..][..PAGE];
            let (body, checksum) = page.split_at_mut(PAGE - 4);
            checksum.copy_from_slice(&crc_fast::crc32_iscsi(body).to_le_bytes());
        }
    }
    if flags & TRUNCATE != 0 {
        file.truncate(file.len() * usize::from(length) / 256);
    }
    file
}

fuzz_target!(|input: &[u8]| {
    let [flags, length, faults @ ..] = input else { return };
    let options = options(flags & IO_URING != 0);
    fs::write(&options.path, corrupted(*flags, *length, faults)).expect("/dev/shm is writable");
    let tier = FileTier::open(&options).expect("a corrupt file opens");
    for key in tier.keys() {
        if let Ok(Some(object)) = tier.get(&key) {
            assert!(object.len() as u64 <= tier.longest());
            assert!(
                flags & VALID_CHECKSUMS != 0 || INTACT_FILE.objects.get(&*key) == Some(&object),
                "{key:?}"
            );
        }
    }
    tier.put(b"new", b"object").expect("the tier evicts to make room");
    assert_eq!(tier.get(b"new").expect("the new object is readable").as_deref(), Some(&b"object"[..]));
    tier.close().expect("/dev/shm is writable");
    let reopened = FileTier::open(&options).expect("a repaired file opens");
    assert_eq!((reopened.is_restored(), reopened.counts().damaged), (true, 0));
    assert_eq!(
        reopened.get(b"new").expect("the new object survives the reopening").as_deref(),
        Some(&b"object"[..])
    );
});
