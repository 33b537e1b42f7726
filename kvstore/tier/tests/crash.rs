//! Processes that put and remove objects are killed at any time. What the next one finds is right, or gone.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use moongate_tier::{FileTier, TierOptions};

/// Set for the process that writes: the tier's file.
const FILE: &str = "MOONGATE_TEST_TIER";
const ROUND: &str = "MOONGATE_TEST_ROUND";
const READY: &str = "writing now";
const ROUNDS: u64 = 100;
const KEYS: u64 = 24;

fn open(path: &Path) -> FileTier {
    FileTier::open(&TierOptions { block: 8192, ..TierOptions::new(path, 4 << 20) }).unwrap()
}

/// An object tells its key and version by itself: all bytes follow from the two words at its start.
fn object(key: u64, version: u64, len: usize) -> Vec<u8> {
    let mut bytes = [key.to_le_bytes(), version.to_le_bytes()].concat();
    bytes.resize(len.max(16), 0);
    fastrand::Rng::with_seed(key << 40 ^ version).fill(&mut bytes[16..]);
    bytes
}

fn version(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[8..16].try_into().unwrap())
}

/// Tells what it is about to do, and what it has done, on its output.
#[test]
#[ignore = "the process that the other test kills"]
fn writer() {
    let tier = open(Path::new(&std::env::var_os(FILE).unwrap()));
    let round: u64 = std::env::var(ROUND).unwrap().parse().unwrap();
    let mut random = fastrand::Rng::with_seed(round);
    println!("{READY}");
    for count in 1.. {
        let (key, version) = (random.u64(..KEYS), round << 32 | count);
        if random.u8(..8) == 0 {
            println!("begin {key} {version}");
            tier.remove(&key.to_le_bytes()).unwrap();
            println!("removed {key} {version}");
        } else {
            println!("begin {key} {version}");
            tier.put(&key.to_le_bytes(), &object(key, version, random.usize(16..60_000))).unwrap();
            println!("put {key} {version}");
        }
    }
}

/// Killed when dropped.
struct TierWriterProcess(Child);

impl Drop for TierWriterProcess {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// The last version of each key that a writer said it had put (None: removed), and the one it was about to.
#[derive(Debug, Default)]
struct WriterProgress {
    done: HashMap<u64, Option<u64>>,
    begun: Option<(u64, u64)>,
}

impl WriterProgress {
    fn record_line(&mut self, line: &str) {
        let mut words = line.split(' ');
        let (Some(what), Some(key), Some(version)) = (words.next(), words.next(), words.next()) else {
            return;
        };
        let (Ok(key), Ok(version)) = (key.parse(), version.parse()) else { return };
        match what {
            "begin" => self.begun = Some((key, version)),
            "put" => {
                self.begun = None;
                self.done.insert(key, Some(version));
            }
            "removed" => {
                self.begun = None;
                self.done.insert(key, None);
            }
            _ => {}
        }
    }
}

#[test]
fn killed_writers_leave_objects_that_are_right_or_gone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tier");
    drop(open(&path));
    let mut said = WriterProgress::default();
    let (mut found, mut in_the_middle) = (0, 0);
    for round in 1..=ROUNDS {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "writer", "--ignored", "--nocapture"])
            .env(FILE, &path)
            .env(ROUND, round.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut writer = TierWriterProcess(child);
        let mut lines = BufReader::new(writer.0.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains(READY)), "the writer ended before it wrote");
        thread::sleep(Duration::from_micros(fastrand::u64(..15_000)));
        drop(writer);
        lines.map_while(Result::ok).for_each(|line| said.record_line(&line));
        in_the_middle += u64::from(said.begun.is_some());

        let tier = open(&path);
        assert!(tier.is_restored(), "round {round}");
        for key in 0..KEYS {
            let expected = said.done.get(&key).copied().flatten();
            let begun = said.begun.filter(|(of, _)| *of == key).map(|(_, version)| version);
            match tier.get(&key.to_le_bytes()).unwrap() {
                // Removed, making room for others, or about to be.
                None => assert!(!tier.contains(&key.to_le_bytes())),
                Some(bytes) => {
                    let version = version(&bytes);
                    assert!(
                        bytes == object(key, version, bytes.len()),
                        "round {round}: key {key} is damaged"
                    );
                    assert!(
                        Some(version) == expected || Some(version) == begun,
                        "round {round}: key {key} has version {version}, {expected:?} was put, {begun:?} begun"
                    );
                    found += 1;
                    said.done.insert(key, Some(version));
                }
            }
        }
        assert_eq!(tier.counts().damaged, 0, "round {round}: nothing half written was entered");
        said.begun = None;
    }
    assert!(found > ROUNDS * 4, "hardly anything was found: {found}");
    assert!(in_the_middle > ROUNDS / 5, "too few were killed in the middle: {in_the_middle}");
}
