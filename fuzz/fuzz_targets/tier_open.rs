//! A tier's file may have been damaged in any way. It opens, and what it then gives for a key are the bytes that were put under it, or
//! nothing.
//!
//! The first byte has flags; the second cuts the file if one says so. Each four bytes after them change one byte of the file: where
//! (three bytes) and how. With another flag, checksums of changed pages are recomputed: then the writer of the page chose what it
//! says, and only sizes and panics are looked at.

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
/// The superblock and a page about each block.
const PAGES: usize = PAGE * (1 + BLOCKS as usize);
/// Where blocks begin.
const DATA: usize = 1 << 20;
const RESEALED: u8 = 1;
const CUT: u8 = 2;
const RING: u8 = 4;

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
    tier.close().expect("memory can be written");
    IntactTierFile { file: fs::read(&options.path).expect("it was written"), objects }
});

fn damaged(flags: u8, cut: u8, faults: &[u8]) -> Vec<u8> {
    let mut file = INTACT_FILE.file.clone();
    let used = PAGES + BLOCKS as usize * BLOCK as usize;
    for [high, middle, low, value] in faults.as_chunks::<4>().0 {
        let at = u32::from_le_bytes([*low, *middle, *high, 0]) as usize % used;
        let at = if at < PAGES { at } else { at - PAGES + DATA };
        file[at] ^= value;
        if flags & RESEALED != 0 && at < PAGES {
            let page = &mut file[at / PAGE * PAGE..][..PAGE];
            let (body, seal) = page.split_at_mut(PAGE - 4);
            seal.copy_from_slice(&crc_fast::crc32_iscsi(body).to_le_bytes());
        }
    }
    if flags & CUT != 0 {
        file.truncate(file.len() * usize::from(cut) / 256);
    }
    file
}

fuzz_target!(|input: &[u8]| {
    let [flags, cut, faults @ ..] = input else { return };
    let options = options(flags & RING != 0);
    fs::write(&options.path, damaged(*flags, *cut, faults)).expect("memory can be written");
    let tier = FileTier::open(&options).expect("a damaged file opens");
    for key in tier.keys() {
        let got = tier.get(&key);
        if let Ok(Some(got)) = got {
            assert!(got.len() as u64 <= tier.longest());
            assert!(flags & RESEALED != 0 || INTACT_FILE.objects.get(&*key) == Some(&got), "{key:?}");
        }
    }
    tier.put(b"new", b"object").expect("there is always room for one more");
    assert_eq!(tier.get(b"new").expect("it was just written").as_deref(), Some(&b"object"[..]));
    tier.close().expect("memory can be written");
    let again = FileTier::open(&options).expect("what was repaired opens");
    assert_eq!((again.is_restored(), again.counts().damaged), (true, 0));
    assert_eq!(again.get(b"new").expect("it is there still").as_deref(), Some(&b"object"[..]));
});
