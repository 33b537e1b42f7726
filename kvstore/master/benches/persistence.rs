//! Cost of persistence: writes through the log, a snapshot during reads, and a restart.
//!
//! `cargo bench -p moongate-master --bench persistence -- KEYS [FOLDER]`; with `restart FOLDER`, only the restart from such a folder.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a tool for a person at a terminal")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use mooncake_wire::types::{ObjectMeta, ReplicaType, ReplicateConfig, Segment, Uuid};
use moongate_master::AuxState;
use moongate_master::durable::{DurableJournal, PersistenceSchedule, RestoredJournal, StatePersister};
use moongate_master::recorder::FactRecorder;
use moongate_master_core::{CallContext, MasterCore, MasterCoreOptions, PutStartRequest};
use moongate_oplog::OplogOptions;

/// The same allocator as in the server binary.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const CLIENT: Uuid = Uuid { first: 1, second: 1 };
/// Number of puts per commit.
const PIPELINED: u64 = 16;

fn caller(now_ms: u64) -> CallContext<'static> {
    CallContext { now_ms, client: CLIENT, tenant: "default" }
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|word| word != "--bench");
    let first = arguments.next();
    if first.as_deref() == Some("restart") {
        reopen("restart", Path::new(&arguments.next().unwrap()));
        return;
    }
    let keys: u64 = first.map_or(1_000_000, |word| word.parse().unwrap());
    let temporary = tempfile::TempDir::new().unwrap();
    let folder = arguments.next().map_or(temporary.path().to_owned(), Into::into);
    println!("{keys} keys of 68 characters, one replica each");
    let (durable, master, _) = open(&folder);
    let durable = Arc::new(durable);
    fill(&durable, &master, keys);
    drop((durable, master));
    println!("folder: {} MB in the log", size(&folder) / 1_000_000);
    let (durable, master) = reopen("restart from the log", &folder);
    snapshot(&durable, &master, keys);
    println!("folder: {} MB in the snapshot and the rest of the log", size(&folder) / 1_000_000);
    drop((durable, master));
    reopen("restart from the snapshot", &folder);
}

fn open(folder: &Path) -> (DurableJournal, MasterCore, moongate_master::durable::RestoreReport) {
    let RestoredJournal { journal, state, report } =
        DurableJournal::open(folder, OplogOptions::default(), &MasterCoreOptions::default(), 1000).unwrap();
    (journal, *state.master, report)
}

fn reopen(label: &str, folder: &Path) -> (DurableJournal, MasterCore) {
    let started = Instant::now();
    let (durable, master, restored) = open(folder);
    println!("{label}: {:.2} s ({restored})", started.elapsed().as_secs_f64());
    (durable, master)
}

fn key(number: u64) -> String {
    let spread = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!("{spread:016x}{number:016x}{spread:016x}{number:016x}_0_k")
}

fn fill(durable: &Arc<DurableJournal>, master: &MasterCore, keys: u64) {
    let mut recorder = FactRecorder::new(durable.clone());
    for number in 0..4 {
        let segment = Segment {
            id: Uuid { first: number, second: 1 },
            name: format!("10.0.0.{number}:12000"),
            size: 1 << 44,
            ..Segment::<String>::default()
        };
        master.mount(0, &segment, CLIENT, &mut recorder).unwrap();
    }
    let started = Instant::now();
    let config = ReplicateConfig::<String>::default();
    for number in 0..keys {
        let key = key(number);
        master
            .put_start(
                caller(1000),
                &PutStartRequest { key: &key, size: 1024, config: &config },
                &mut recorder,
            )
            .unwrap();
        let meta = ObjectMeta { key: key.as_str(), object_checksum: None };
        master.put_end(caller(1000), &meta, ReplicaType::ALL, &mut recorder).unwrap();
        if number % PIPELINED == 0 {
            recorder.commit().unwrap();
        }
    }
    recorder.commit().unwrap();
    let seconds_per_put = started.elapsed().as_secs_f64() / keys as f64;
    println!("a put through state machine and log: {:.2} µs, {PIPELINED} per commit", seconds_per_put * 1e6);
}

/// Writes a snapshot and measures the read latency meanwhile.
fn snapshot(durable: &DurableJournal, master: &MasterCore, keys: u64) {
    let done = AtomicBool::new(false);
    let (longest, reads, elapsed) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut longest, mut reads, mut number) = (Duration::ZERO, 0_u64, 1_u64);
            let (mut slow, mut last_wait) = (0_u64, run_queue_wait());
            let mut slowest = String::new();
            while !done.load(Relaxed) {
                number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let key = key((number >> 20) % keys);
                let started = Instant::now();
                assert!(master.exist(2000, "default", &key));
                let elapsed = started.elapsed();
                if elapsed > Duration::from_millis(1) {
                    slow += 1;
                    let core_wait = run_queue_wait() - last_wait;
                    slowest += &format!(
                        " {:.1} ({:.1})",
                        elapsed.as_secs_f64() * 1e3,
                        core_wait.as_secs_f64() * 1e3
                    );
                }
                if elapsed > Duration::from_millis(1) || reads % 256 == 0 {
                    last_wait = run_queue_wait();
                }
                (longest, reads) = (longest.max(elapsed), reads + 1);
            }
            println!("reads of more than 1 ms while the snapshot was written: {slow} of {reads}");
            println!("duration (of which the reader waited for a core), ms:{slowest}");
            (longest, reads)
        });
        let started = Instant::now();
        let facts =
            StatePersister::new(durable, master, &AuxState::default(), PersistenceSchedule::default())
                .snapshot()
                .unwrap();
        let elapsed = started.elapsed();
        done.store(true, Relaxed);
        let (longest, reads) = reader.join().unwrap();
        assert!(facts >= keys && reads > 0);
        (longest, reads, elapsed)
    });
    println!(
        "snapshot: {:.2} s; maximum latency of {reads} reads meanwhile {:.2} ms",
        elapsed.as_secs_f64(),
        longest.as_secs_f64() * 1e3
    );
}

/// Time for which this thread was runnable without running.
fn run_queue_wait() -> Duration {
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(schedstat.split_whitespace().nth(1).unwrap().parse().unwrap())
}

fn size(folder: &Path) -> u64 {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}
