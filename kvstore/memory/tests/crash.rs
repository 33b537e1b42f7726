//! Kills processes that write to a segment at random times, repeatedly. The ledger must be correct each time.
//!
//! A binary of its own: a process that is being started holds the descriptors of the whole test program for a moment, and with them the
//! locks that other tests have just released.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use moongate_memory::holder::{HolderClient, HolderServer};
use moongate_memory::ledger::{LedgerWriteOutcome, SegmentIdentity};
use moongate_memory::numa::NumaPlacement;
use moongate_memory::{Crc32c, PageMode, SegmentBacking, SegmentMemory, SegmentOptions};

/// Environment variables of the writer process: backing of its segment.
const HOLDER: &str = "MOONGATE_TEST_HOLDER";
const FOLDER: &str = "MOONGATE_TEST_FOLDER";
const SEED: &str = "MOONGATE_TEST_SEED";
const READY: &str = "writer is ready";

const SIZE: u64 = 1 << 20;
/// From this offset on, the writer records which write it has started and which it has finished.
const PROGRESS: u64 = SIZE - 4096;
const LONGEST: u64 = 16 << 10;
const THREADS: u64 = 2;

fn open(backing: SegmentBacking) -> SegmentMemory {
    let options = SegmentOptions {
        backing,
        label: "crash".into(),
        size: SIZE,
        pages: PageMode::Normal,
        placement: NumaPlacement::Anywhere,
        direct_writes: false,
    };
    SegmentMemory::open(&options, |base| SegmentIdentity {
        name: "crash".into(),
        base,
        ..SegmentIdentity::default()
    })
    .unwrap()
}

/// Self-verifying bytes: all are derived from the first eight.
fn bytes(seed: u64, len: u64) -> Vec<u8> {
    let mut bytes = seed.to_le_bytes().to_vec();
    bytes.resize(len as usize, 0);
    fastrand::Rng::with_seed(seed).fill(&mut bytes[8..]);
    bytes
}

/// Writes until killed, as a store node does: by copying, and from a socket.
fn write_forever(segment: &SegmentMemory, thread: u64, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed ^ thread);
    let (mut near, far) = UnixStream::pair().unwrap();
    for count in 1.. {
        // Each thread writes to its own half: overlapping writes leave no entry to check.
        let half = PROGRESS / THREADS;
        let len = random.u64(8..LONGEST) & !7;
        let offset = thread * half + (random.u64(..half - len) & !7);
        let content = bytes(random.u64(..), len);
        segment.region.write_at(PROGRESS + thread * 16, &u64::to_le_bytes(count)).unwrap();
        let writing = segment.ledger.begin(offset, len).unwrap();
        let crc = if random.bool() {
            near.write_all(&content).unwrap();
            segment.region.receive_exact_crc(&far, offset, len).unwrap()
        } else {
            for (number, chunk) in content.chunks(512).enumerate() {
                segment.region.write_at(offset + number as u64 * 512, chunk).unwrap();
            }
            Crc32c::of(&content)
        };
        // Every tenth write is aborted, as on a lost connection.
        if count % 10 != 0 {
            assert_eq!(writing.finish(crc), LedgerWriteOutcome::Recorded);
        }
        segment.region.write_at(PROGRESS + thread * 16 + 8, &u64::to_le_bytes(count)).unwrap();
    }
}

#[test]
#[ignore = "run by the other test as the process to kill"]
fn writer() {
    let holder = std::env::var(HOLDER).map(|path| SegmentBacking::Holder(HolderClient::new(path)));
    let backing =
        holder.or_else(|_| std::env::var(FOLDER).map(|path| SegmentBacking::Folder(path.into()))).unwrap();
    let seed = std::env::var(SEED).unwrap().parse().unwrap();
    let segment = open(backing);
    println!("{READY}");
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let segment = &segment;
            scope.spawn(move || write_forever(segment, thread, seed));
        }
    });
}

/// The writer process, killed on drop.
struct SegmentWriterProcess(Child);

impl SegmentWriterProcess {
    /// Starts the process and waits until it writes.
    fn start(variable: &str, place: &Path, seed: u64) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "writer", "--ignored", "--nocapture"])
            .env(variable, place)
            .env(SEED, seed.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut writer = Self(child);
        let output = BufReader::new(writer.0.stdout.take().unwrap());
        assert!(output.lines().any(|line| line.unwrap().contains(READY)), "the writer ended before it wrote");
        writer
    }
}

impl Drop for SegmentWriterProcess {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[derive(Debug, Default)]
struct CrashStatistics {
    /// Rounds in which a write was in progress when the process was killed.
    torn: u64,
    entries: u64,
}

/// Kills `rounds` writers, and checks the segment after each.
fn kill(variable: &str, place: &Path, backing: &SegmentBacking, rounds: u64) -> CrashStatistics {
    let mut statistics = CrashStatistics::default();
    for round in 0..rounds {
        let writer = SegmentWriterProcess::start(variable, place, round);
        thread::sleep(Duration::from_micros(fastrand::u64(..5_000)));
        drop(writer);
        let segment = open(backing.clone());
        assert!(segment.is_restored, "round {round}: the segment is lost");
        let counts = segment.ledger.counts();
        assert_eq!(counts.damaged, 0, "round {round}");
        let mut content = vec![0; LONGEST as usize];
        for entry in segment.ledger.entries(0, usize::MAX) {
            let content = &mut content[..entry.len as usize];
            segment.region.read_at(entry.offset, content).unwrap();
            let seed = u64::from_le_bytes(content[..8].try_into().unwrap());
            assert!(content == bytes(seed, entry.len), "round {round}: {entry:?} is not what was written");
            assert_eq!(Crc32c::of(content), entry.crc, "round {round}: {entry:?}");
        }
        statistics.entries += counts.entries;
        let torn = (0..THREADS).any(|thread| {
            let mut progress = [0; 16];
            segment.region.read_at(PROGRESS + thread * 16, &mut progress).unwrap();
            progress[..8] != progress[8..]
        });
        statistics.torn += u64::from(torn);
    }
    statistics
}

fn check(statistics: &CrashStatistics, rounds: u64) {
    assert!(statistics.torn * 5 > rounds, "too few kills during a write: {statistics:?} of {rounds}");
    assert!(statistics.entries > rounds * 10, "too few entries: {statistics:?} of {rounds}");
}

/// A single test, for the same reason that it is alone in its binary.
#[test]
fn killed_writers_leave_only_complete_entries() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("holder");
    let server = HolderServer::bind(&path, 64 << 20).unwrap();
    let stopper = server.stopper();
    let thread = thread::spawn(|| server.run());
    check(&kill(HOLDER, &path, &SegmentBacking::Holder(HolderClient::new(&path)), 500), 500);
    stopper.stop();
    thread.join().unwrap();

    check(&kill(FOLDER, folder.path(), &SegmentBacking::Folder(folder.path().to_owned()), 100), 100);
}
