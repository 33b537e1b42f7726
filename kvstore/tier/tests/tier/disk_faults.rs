//! All types of disk faults on a file with a short history: no object has wrong bytes, and every loss is counted.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use moongate_tier::{FileTier, TierError, TierOptions};
use tempfile::TempDir;

use super::{BLOCK, content, options};

const PAGE: usize = 4096;
const KEYS: u64 = 12;
/// Distance between changed bytes. Prime, so that every offset within a page is hit on some page.
const STRIDE: usize = 997;

/// All versions of each key; the last one is current, and an empty one means removed.
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

    /// Replaces the file. Zero pages become holes, as before.
    fn write(&self, bytes: &[u8]) {
        let file = File::create(&self.options.path).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        for (number, page) in bytes.chunks(PAGE).enumerate() {
            if page.iter().any(|byte| *byte != 0) {
                file.write_all_at(page, (number * PAGE) as u64).unwrap();
            }
        }
    }

    /// Opens the file with these bytes and reads all keys; returns the number of lost objects.
    fn check(&self, bytes: &[u8], what: &str) -> usize {
        self.write(bytes);
        let tier = FileTier::open(&self.options).unwrap_or_else(|error| panic!("{what}: {error}"));
        let mut lost = 0;
        for (key, versions) in &self.versions {
            let current = versions.last().unwrap();
            match tier.get(&key.to_le_bytes()) {
                Ok(Some(bytes)) => assert!(&bytes == current, "{what}: key {key} has other bytes"),
                Ok(None) | Err(TierError::Damaged { .. }) => lost += usize::from(!current.is_empty()),
                Err(error) => panic!("{what}: key {key}: {error}"),
            }
        }
        assert!(
            lost == 0 || tier.counts().damaged > 0,
            "{what}: {lost} objects are lost without being counted"
        );
        lost
    }

    /// Numbers of the file's non-zero pages.
    fn used_pages(&self) -> Vec<usize> {
        let pages = self.bytes.chunks(PAGE).enumerate();
        pages.filter(|(_, page)| page.iter().any(|byte| *byte != 0)).map(|(number, _)| number).collect()
    }
}

#[test]
fn no_flipped_bit_changes_an_object() {
    let history = FileHistory::new();
    assert_eq!(history.check(&history.bytes, "unchanged"), 0);
    let mut lost = 0;
    let mut bytes = history.bytes.clone();
    let used = history.used_pages();
    for (number, position) in (0..used.len() * PAGE).step_by(STRIDE).enumerate() {
        let offset = used[position / PAGE] * PAGE + position % PAGE;
        bytes[offset] ^= 1 << (number % 8);
        lost += history.check(&bytes, &format!("a bit of byte {offset}"));
        bytes[offset] = history.bytes[offset];
    }
    assert!(lost > 0);
}

#[test]
fn objects_beyond_a_truncation_are_counted_as_lost() {
    let history = FileHistory::new();
    let end = (history.used_pages().last().unwrap() + 2) * PAGE;
    for length in (0..end).step_by(32 * PAGE + 512) {
        // An empty file counts as new.
        history.check(&history.bytes[..length.max(1)], &format!("the first {length} bytes"));
    }
}

#[test]
fn a_misplaced_page_is_detected() {
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

/// A disk that loses acknowledged writes: some pages are as at the previous close. An object may then be an older version, but never
/// another object or a mixture.
#[test]
fn lost_writes_never_mix_versions() {
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
        for offset in (0..bytes.len()).step_by(PAGE).filter(|_| random.bool()) {
            bytes[offset..offset + PAGE].copy_from_slice(&after[offset..offset + PAGE]);
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
fn another_block_size_is_not_counted_as_damage() {
    let history = FileHistory::new();
    let other = TierOptions { block: BLOCK * 2, ..history.options.clone() };
    history.write(&history.bytes);
    let tier = FileTier::open(&other).unwrap();
    assert!(!tier.is_restored());
    assert_eq!(tier.counts().damaged, 0);
}
