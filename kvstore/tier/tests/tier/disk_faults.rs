//! Every kind of fault that a disk has, on a file with a short history: no object has wrong bytes, and every loss is counted.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use moongate_tier::{FileTier, TierError, TierOptions};
use tempfile::TempDir;

use super::{BLOCK, content, options};

const PAGE: usize = 4096;
const KEYS: u64 = 12;
/// Bytes between two that are changed. Prime, so that every place of a page is hit on some page.
const STRIDE: usize = 997;

/// All versions of each key that were ever put; the last one is the present one, and an empty one says that it was removed.
type KeyVersions = BTreeMap<u64, Vec<Vec<u8>>>;

/// A closed file with a history of puts, replacements and removals.
struct FileHistory {
    _folder: TempDir,
    options: TierOptions,
    bytes: Vec<u8>,
    versions: KeyVersions,
}

fn bytes_of(key: u64, version: u64) -> Vec<u8> {
    content(key << 8 | version, 3_000 + (key * 2_500 + version * 700) as usize)
}

impl FileHistory {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let options = options(&folder.path().join("tier"), 40, false);
        let tier = FileTier::open(&options).unwrap();
        let mut versions = KeyVersions::new();
        for step in 0..20 {
            let key = step % KEYS;
            let version = step / KEYS;
            tier.put(&key.to_le_bytes(), &bytes_of(key, version)).unwrap();
            versions.entry(key).or_default().push(bytes_of(key, version));
        }
        for key in [3, 9] {
            assert!(tier.remove(&u64::to_le_bytes(key)).unwrap());
            versions.entry(key).or_default().push(Vec::new());
        }
        tier.close().unwrap();
        let bytes = std::fs::read(&options.path).unwrap();
        Self { _folder: folder, options, bytes, versions }
    }

    /// Puts a file in the place of the one before. Pages of zeros are holes, as they were.
    fn write(&self, bytes: &[u8]) {
        let file = File::create(&self.options.path).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        for (number, page) in bytes.chunks(PAGE).enumerate() {
            if page.iter().any(|byte| *byte != 0) {
                file.write_all_at(page, (number * PAGE) as u64).unwrap();
            }
        }
    }

    /// Opens the file with these bytes, and reads all keys. Returns how many objects are lost.
    fn check(&self, bytes: &[u8], what: &str) -> usize {
        self.write(bytes);
        let tier = FileTier::open(&self.options).unwrap_or_else(|error| panic!("{what}: {error}"));
        let mut lost = 0;
        for (key, versions) in &self.versions {
            let present = versions.last().unwrap();
            match tier.get(&key.to_le_bytes()) {
                Ok(Some(bytes)) => assert!(&bytes == present, "{what}: key {key} has other bytes"),
                Ok(None) | Err(TierError::Damaged { .. }) => lost += usize::from(!present.is_empty()),
                Err(error) => panic!("{what}: key {key}: {error}"),
            }
        }
        assert!(lost == 0 || tier.counts().damaged > 0, "{what}: {lost} objects are lost without a count");
        lost
    }

    /// Parts of the file of a page's size that are not empty.
    fn used_pages(&self) -> Vec<usize> {
        let pages = self.bytes.chunks(PAGE).enumerate();
        pages.filter(|(_, page)| page.iter().any(|byte| *byte != 0)).map(|(number, _)| number).collect()
    }
}

#[test]
fn no_changed_bit_changes_an_object() {
    let history = FileHistory::new();
    assert_eq!(history.check(&history.bytes, "as it was"), 0);
    let mut lost = 0;
    let mut bytes = history.bytes.clone();
    let used = history.used_pages();
    for (number, at) in (0..used.len() * PAGE).step_by(STRIDE).enumerate() {
        let at = used[at / PAGE] * PAGE + at % PAGE;
        bytes[at] ^= 1 << (number % 8);
        lost += history.check(&bytes, &format!("a bit of byte {at}"));
        bytes[at] = history.bytes[at];
    }
    assert!(lost > 0);
}

#[test]
fn a_file_that_is_cut_off_loses_what_was_behind_and_counts_it() {
    let history = FileHistory::new();
    let end = (history.used_pages().last().unwrap() + 2) * PAGE;
    for length in (0..end).step_by(32 * PAGE + 512) {
        // A file without a byte is a new one.
        history.check(&history.bytes[..length.max(1)], &format!("the first {length} bytes"));
    }
}

#[test]
fn a_page_that_was_written_elsewhere_is_noticed() {
    let history = FileHistory::new();
    let used = history.used_pages();
    let mut bytes = history.bytes.clone();
    for from in &used {
        for to in used.iter().filter(|to| *to != from).step_by(13) {
            let (from, to) = (from * PAGE, to * PAGE);
            bytes.copy_within(from..from + PAGE, to);
            history.check(&bytes, &format!("page {from} at {to}"));
            bytes[to..to + PAGE].copy_from_slice(&history.bytes[to..to + PAGE]);
        }
    }
}

/// A disk that loses acknowledged writes: some pages are as they were at the close before. An object may then be an older version
/// of itself, but never another object or a mixture.
#[test]
fn writes_that_were_lost_make_no_mixture() {
    let history = FileHistory::new();
    history.write(&history.bytes);
    let tier = FileTier::open(&history.options).unwrap();
    let mut versions = history.versions.clone();
    for key in 0..KEYS {
        tier.put(&key.to_le_bytes(), &bytes_of(key, 7)).unwrap();
        versions.entry(key).or_default().push(bytes_of(key, 7));
    }
    tier.close().unwrap();
    let after = std::fs::read(&history.options.path).unwrap();
    let mut random = fastrand::Rng::with_seed(11);
    for round in 0..100 {
        let mut bytes = history.bytes.clone();
        for at in (0..bytes.len()).step_by(PAGE).filter(|_| random.bool()) {
            bytes[at..at + PAGE].copy_from_slice(&after[at..at + PAGE]);
        }
        history.write(&bytes);
        let tier = FileTier::open(&history.options).unwrap();
        for (key, versions) in &versions {
            if let Ok(Some(bytes)) = tier.get(&key.to_le_bytes()) {
                assert!(versions.contains(&bytes), "round {round}: key {key} has bytes that were never put");
            }
        }
    }
}

#[test]
fn a_file_of_a_block_size_that_differs_is_no_damage() {
    let history = FileHistory::new();
    let other = TierOptions { block: BLOCK * 2, ..history.options.clone() };
    history.write(&history.bytes);
    let tier = FileTier::open(&other).unwrap();
    assert!(!tier.is_restored());
    assert_eq!(tier.counts().damaged, 0);
}
