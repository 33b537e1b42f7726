//! Kills processes that put and remove objects at random times. Objects found afterwards must be correct.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use moongate_tier::{FileTier, TierOptions};

/// Environment variables of the writer process: the tier's file and the round.
const FILE: &str = "MOONGATE_TEST_TIER";
const ROUND: &str = "MOONGATE_TEST_ROUND";
const READY: &str = "writer is ready";
const ROUNDS: u64 = 100;
const KEYS: u64 = 24;

fn open(path: &Path) -> FileTier {
    FileTier::open(&TierOptions { block: 8192, ..TierOptions::new(path, 4 << 20) }).unwrap()
}

/// A self-describing object: all bytes are derived from the key and version at its start.
fn object(key: u64, version: u64, len: usize) -> Vec<u8> {
    let mut bytes = [key.to_le_bytes(), version.to_le_bytes()].concat();
    bytes.resize(len.max(16), 0);
    fastrand::Rng::with_seed(key << 40 ^ version).fill(&mut bytes[16..]);
    bytes
}

fn version(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[8..16].try_into().unwrap())
}

/// Prints each operation before and after it.
#[test]
#[ignore = "run by the other test as the process to kill"]
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

/// The writer process, killed on drop.
struct TierWriterProcess(Child);

impl Drop for TierWriterProcess {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// The last version of each key that a writer reported as put (`None`: removed), and the operation in progress.
#[derive(Debug, Default)]
struct WriterProgress {
    done: HashMap<u64, Option<u64>>,
    started: Option<(u64, u64)>,
}

impl WriterProgress {
    fn record_line(&mut self, line: &str) {
        let mut words = line.split(' ');
        let (Some(what), Some(key), Some(version)) = (words.next(), words.next(), words.next()) else {
            return;
        };
        let (Ok(key), Ok(version)) = (key.parse(), version.parse()) else { return };
        match what {
            "begin" => self.started = Some((key, version)),
            "put" => {
                self.started = None;
                self.done.insert(key, Some(version));
            }
            "removed" => {
                self.started = None;
                self.done.insert(key, None);
            }
            _ => {}
        }
    }
}

#[test]
fn killed_writers_leave_only_correct_objects() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tier");
    drop(open(&path));
    let mut progress = WriterProgress::default();
    let (mut found, mut interrupted) = (0, 0);
    for round in 1..=ROUNDS {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crash::writer", "--ignored", "--nocapture"])
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
        lines.map_while(Result::ok).for_each(|line| progress.record_line(&line));
        interrupted += u64::from(progress.started.is_some());

        let tier = open(&path);
        assert!(tier.is_restored(), "round {round}");
        for key in 0..KEYS {
            let expected = progress.done.get(&key).copied().flatten();
            let started =
                progress.started.filter(|(started_key, _)| *started_key == key).map(|(_, version)| version);
            match tier.get(&key.to_le_bytes()).unwrap() {
                // Removed, evicted, or being removed.
                None => assert!(!tier.contains(&key.to_le_bytes())),
                Some(bytes) => {
                    let version = version(&bytes);
                    assert!(
                        bytes == object(key, version, bytes.len()),
                        "round {round}: key {key} is damaged"
                    );
                    assert!(
                        Some(version) == expected || Some(version) == started,
                        "round {round}: key {key} has version {version}, {expected:?} was put, {started:?} was in progress"
                    );
                    found += 1;
                    progress.done.insert(key, Some(version));
                }
            }
        }
        assert_eq!(tier.counts().damaged, 0, "round {round}: no partial object is listed");
        progress.started = None;
    }
    assert!(found > ROUNDS * 4, "too few objects were found: {found}");
    assert!(interrupted > ROUNDS / 5, "too few kills during an operation: {interrupted}");
}
