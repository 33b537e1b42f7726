//! A tier against a model, with io_uring and with threads; corruption; concurrency.

mod crash;
mod disk_faults;

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use moongate_tier::{FileTier, MAX_KEY, TierError, TierOptions};
use proptest::prelude::*;

const BLOCK: u32 = 8192;

/// Options for a file of `blocks` blocks.
fn options(path: &Path, blocks: u64, io_uring: bool) -> TierOptions {
    let capacity = (2 << 20) + blocks * u64::from(BLOCK + 4096);
    let capacity = capacity - capacity % (1 << 20);
    TierOptions { block: BLOCK, io_uring, ..TierOptions::new(path, capacity) }
}

fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

#[test]
fn objects_of_all_sizes_are_read_back() {
    let folder = tempfile::tempdir().unwrap();
    for io_uring in [true, false] {
        let options = options(&folder.path().join("tier"), 2000, io_uring);
        let tier = FileTier::open(&options).unwrap();
        let block = BLOCK as usize;
        let sizes = [1, 4095, 4096, 4097, block - 1, block, block + 1, 10 * block + 77, 380 * block];
        for size in sizes {
            tier.put(&size.to_le_bytes(), &content(size as u64, size)).unwrap();
        }
        for second_read in [false, true] {
            for size in sizes {
                let bytes = tier.get(&size.to_le_bytes()).unwrap().unwrap();
                assert!(bytes == content(size as u64, size), "{size} bytes, second read: {second_read}");
            }
        }
        assert_eq!(tier.longest(), 380 * u64::from(BLOCK));
        assert!(matches!(tier.put(b"x", &vec![0; 380 * block + 1]), Err(TierError::Length { .. })));
        assert!(matches!(tier.put(b"x", b""), Err(TierError::Length { .. })));
        assert!(matches!(tier.put(b"", b"x"), Err(TierError::Key(0))));
        assert!(matches!(tier.put(&[0; MAX_KEY + 1], b"x"), Err(TierError::Key(_))));
        tier.put(&[0; MAX_KEY], b"x").unwrap();
        assert_eq!(tier.get(b"none").unwrap(), None);
        assert_eq!(tier.counts().damaged, 0);
        drop(tier);
        std::fs::remove_file(&options.path).unwrap();
    }
}

#[test]
fn several_objects_are_read_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let tier = FileTier::open(&options(&folder.path().join("tier"), 2000, true)).unwrap();
    let keys: Vec<Vec<u8>> = (0..100u8).map(|key| vec![key]).collect();
    for key in &keys {
        tier.put(key, &content(u64::from(key[0]), 20_000)).unwrap();
    }
    tier.remove(&[50]).unwrap();
    let requested: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let mut objects = vec![vec![0; 20_000]; 100];
    let results = tier.get_many(&requested, |index, offset, bytes| {
        objects[index][offset as usize..][..bytes.len()].copy_from_slice(bytes);
    });
    for (key, result) in results.into_iter().enumerate() {
        let expected = (key != 50).then_some(20_000);
        assert_eq!(result.unwrap(), expected);
        assert!(key == 50 || objects[key] == content(key as u64, 20_000), "key {key}");
    }
}

#[test]
fn the_least_recently_used_is_evicted() {
    let folder = tempfile::tempdir().unwrap();
    let options = options(&folder.path().join("tier"), 200, true);
    let tier = FileTier::open(&options).unwrap();
    let capacity = tier.counts().free / u64::from(BLOCK);
    for key in 0..capacity {
        tier.put(&key.to_le_bytes(), b"small").unwrap();
    }
    assert_eq!(tier.counts().free, 0);
    tier.get(&0u64.to_le_bytes()).unwrap().unwrap();
    assert!(tier.contains(&1u64.to_le_bytes()));
    tier.put(b"large", &content(1, 3 * BLOCK as usize)).unwrap();
    for evicted in 1..4u64 {
        assert!(!tier.contains(&evicted.to_le_bytes()), "{evicted}");
    }
    assert!(tier.contains(&0u64.to_le_bytes()), "it was used");
    assert!(tier.contains(&4u64.to_le_bytes()));
    assert_eq!(tier.counts().evicted, 3);
    // After reopening, the order is that of writing.
    drop(tier);
    let tier = FileTier::open(&options).unwrap();
    assert!(tier.is_restored());
    assert_eq!(tier.counts().objects, capacity - 3 + 1);
    assert_eq!(&*tier.keys()[0], 0u64.to_le_bytes());
    assert_eq!(tier.get(b"large").unwrap().unwrap(), content(1, 3 * BLOCK as usize));
}

#[test]
fn only_one_process_can_open_a_tier() {
    let folder = tempfile::tempdir().unwrap();
    let options = options(&folder.path().join("tier"), 200, true);
    let tier = FileTier::open(&options).unwrap();
    assert!(matches!(FileTier::open(&options), Err(TierError::InUse(_))));
    tier.put(b"a", b"moon").unwrap();
    tier.close().unwrap();
    assert_eq!(FileTier::open(&options).unwrap().get(b"a").unwrap().unwrap(), b"moon");
    // With other sizes it starts empty, and the old content does not reappear with the old sizes.
    let other = TierOptions { block: 4096, ..options.clone() };
    assert!(!FileTier::open(&other).unwrap().is_restored());
    let tier = FileTier::open(&options).unwrap();
    assert!(!tier.is_restored());
    assert_eq!(tier.counts().objects, 0);
}

#[test]
fn corrupt_objects_are_dropped_and_never_served() {
    let folder = tempfile::tempdir().unwrap();
    let options = options(&folder.path().join("tier"), 500, true);
    let tier = FileTier::open(&options).unwrap();
    let keys: Vec<Vec<u8>> = (0..100u8).map(|key| vec![key]).collect();
    for key in &keys {
        tier.put(key, &content(u64::from(key[0]), 20_000)).unwrap();
    }
    drop(tier);
    // Flip bits anywhere in the file.
    let file = File::options().read(true).write(true).open(&options.path).unwrap();
    let len = file.metadata().unwrap().len();
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..300 {
        let offset = random.u64(4096..len);
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ (1 << random.u8(..8))], offset).unwrap();
    }
    drop(file);
    let tier = FileTier::open(&options).unwrap();
    let (mut good, mut damaged, mut missing) = (0, 0, 0);
    for key in &keys {
        match tier.get(key) {
            Ok(Some(bytes)) => {
                assert!(bytes == content(u64::from(key[0]), 20_000), "{key:?}");
                good += 1;
            }
            Ok(None) => missing += 1,
            Err(TierError::Damaged { .. }) => {
                damaged += 1;
                assert_eq!(tier.get(key).unwrap(), None, "dropped");
            }
            Err(problem) => unreachable!("{problem}"),
        }
    }
    assert!(good > 0 && damaged > 0 && missing > 0, "{good} good, {damaged} damaged, {missing} missing");
    // Pages without an object count too, since a corrupt one may have held one.
    assert!(tier.counts().damaged >= damaged + missing, "missing objects are counted on opening");
    let objects = tier.counts().objects;
    drop(tier);
    assert_eq!(
        FileTier::open(&options).unwrap().counts().objects,
        objects,
        "dropped objects do not reappear"
    );
}

#[test]
fn a_corrupt_superblock_starts_an_empty_tier() {
    let folder = tempfile::tempdir().unwrap();
    let options = options(&folder.path().join("tier"), 200, true);
    FileTier::open(&options).unwrap().put(b"a", b"moon").unwrap();
    File::options().write(true).open(&options.path).unwrap().write_all_at(b"x", 30).unwrap();
    let empty = FileTier::open(&options).unwrap();
    assert!(!empty.is_restored());
    assert_eq!(empty.counts().damaged, 1);
    drop(empty);
    assert_eq!(FileTier::open(&options).unwrap().counts().objects, 0);
}

#[test]
fn threads_read_write_and_remove_during_evictions() {
    let folder = tempfile::tempdir().unwrap();
    for io_uring in [true, false] {
        let tier =
            FileTier::open(&options(&folder.path().join(io_uring.to_string()), 100, io_uring)).unwrap();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let readers: Vec<_> = (0..3)
                .map(|reader| {
                    let (tier, done) = (&tier, &done);
                    scope.spawn(move || {
                        let mut random = fastrand::Rng::with_seed(reader);
                        let mut hits = 0u64;
                        while !done.load(Ordering::Relaxed) || hits == 0 {
                            let key = random.u64(..60);
                            if let Some(bytes) = tier.get(&key.to_le_bytes()).unwrap() {
                                let version = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                                assert!(
                                    bytes[8..] == content(key ^ version << 8, bytes.len() - 8),
                                    "key {key}"
                                );
                                hits += 1;
                            }
                        }
                    })
                })
                .collect();
            let writers: Vec<_> = (0..2u64)
                .map(|writer| {
                    let tier = &tier;
                    scope.spawn(move || {
                        let mut random = fastrand::Rng::with_seed(writer + 10);
                        for version in 0..100 {
                            let key = random.u64(..60);
                            let mut bytes = (version * 2 + writer).to_le_bytes().to_vec();
                            let len = random.usize(1..60_000);
                            bytes.extend(content(key ^ (version * 2 + writer) << 8, len));
                            tier.put(&key.to_le_bytes(), &bytes).unwrap();
                            if random.u8(..10) == 0 {
                                tier.remove(&random.u64(..60).to_le_bytes()).unwrap();
                            }
                        }
                    })
                })
                .collect();
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            done.store(true, Ordering::Relaxed);
            readers.into_iter().for_each(|reader| reader.join().unwrap());
        });
        assert_eq!(tier.counts().damaged, 0);
        assert!(tier.counts().evicted > 0);
    }
}

#[test]
fn a_panic_while_reading_leaves_the_tier_usable() {
    let folder = tempfile::tempdir().unwrap();
    let tier = FileTier::open(&options(&folder.path().join("tier"), 500, true)).unwrap();
    tier.put(b"a", &content(1, 1_000_000)).unwrap();
    for _ in 0..40 {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            tier.get_with(b"a", |_, _| std::panic::resume_unwind(Box::new(())))
        }));
        assert!(outcome.is_err());
    }
    assert_eq!(tier.get(b"a").unwrap().unwrap(), content(1, 1_000_000));
}

#[derive(Debug, Clone)]
enum TierStep {
    Put { key: u8, len: usize },
    Get(u8),
    Remove(u8),
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<TierStep>> {
    let step = prop_oneof![
        5 => (0..30u8, 1..60_000usize).prop_map(|(key, len)| TierStep::Put { key, len }),
        3 => (0..30u8).prop_map(TierStep::Get),
        1 => (0..30u8).prop_map(TierStep::Remove),
        1 => Just(TierStep::Reopen),
    ];
    prop::collection::vec(step, 1..40)
}

/// Objects in order of eviction: key, seed, length.
#[derive(Debug, Default)]
struct TierModel(Vec<(u8, u64, usize)>);

impl TierModel {
    fn blocks(&self) -> usize {
        self.0.iter().map(|(_, _, len)| len.div_ceil(BLOCK as usize)).sum()
    }

    fn put(&mut self, key: u8, seed: u64, len: usize, capacity: usize) {
        // Eviction happens while the older object of the key still exists.
        while self.blocks() + len.div_ceil(BLOCK as usize) > capacity {
            self.0.remove(0);
        }
        self.0.retain(|(other, ..)| *other != key);
        self.0.push((key, seed, len));
    }

    fn get(&mut self, key: u8) -> Option<(u64, usize)> {
        let position = self.0.iter().position(|(other, ..)| *other == key)?;
        let used = self.0.remove(position);
        self.0.push(used);
        Some((used.1, used.2))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_tier_matches_its_model(steps in steps(), io_uring in any::<bool>()) {
        let folder = tempfile::tempdir().unwrap();
        let options = options(&folder.path().join("tier"), 1, io_uring);
        let mut tier = FileTier::open(&options).unwrap();
        let capacity = (tier.counts().free / u64::from(BLOCK)) as usize;
        let mut model = TierModel::default();
        for (seed, step) in steps.into_iter().enumerate() {
            let seed = seed as u64;
            match step {
                TierStep::Put { key, len } => {
                    tier.put(&[key], &content(seed, len)).unwrap();
                    model.put(key, seed, len, capacity);
                }
                TierStep::Get(key) => {
                    let expected = model.get(key).map(|(seed, len)| content(seed, len));
                    prop_assert!(tier.get(&[key]).unwrap() == expected);
                }
                TierStep::Remove(key) => {
                    let existed = model.0.iter().any(|(other, ..)| *other == key);
                    model.0.retain(|(other, ..)| *other != key);
                    prop_assert_eq!(tier.remove(&[key]).unwrap(), existed);
                }
                TierStep::Reopen => {
                    drop(tier);
                    tier = FileTier::open(&options).unwrap();
                    prop_assert!(tier.is_restored());
                    // Uses are not persisted: after reopening, the order is that of writing.
                    model.0.sort_by_key(|(_, seed, _)| *seed);
                }
            }
            let keys: Vec<u8> = tier.keys().iter().map(|key| key[0]).collect();
            let expected: Vec<u8> = model.0.iter().map(|(key, ..)| *key).collect();
            prop_assert_eq!(keys, expected);
            prop_assert_eq!(tier.counts().free, (capacity - model.blocks()) as u64 * u64::from(BLOCK));
        }
    }
}
