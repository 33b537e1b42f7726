//! What keeping the state costs: writing through the log, a snapshot while reads go on, and a restart.
//!
//! `cargo bench -p moongate-master --bench keeping -- KEYS [FOLDER]`
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a tool for a person at a terminal")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use mooncake_wire::types::{ObjectMeta, ReplicaType, ReplicateConfig, Segment, Uuid};
use moongate_master::AuxState;
use moongate_master::durable::{DurableJournal, PersistenceSchedule, StatePersister};
use moongate_master::journal::FactRecorder;
use moongate_master_core::{MasterCore, MasterCoreOptions};
use moongate_oplog::OplogOptions;

/// The allocator of the real server.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const CLIENT: Uuid = Uuid { first: 1, second: 1 };
/// Writers send that many requests at a time.
const PIPELINED: u64 = 16;

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|word| word != "--bench");
    let keys: u64 = arguments.next().map_or(1_000_000, |word| word.parse().unwrap());
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
    println!("folder: {} MB in the snapshot and what is left of the log", size(&folder) / 1_000_000);
    drop((durable, master));
    reopen("restart from the snapshot", &folder);
}

fn open(folder: &Path) -> (DurableJournal, MasterCore, moongate_master::durable::RestoreReport) {
    let (durable, state, restored) =
        DurableJournal::open(folder, OplogOptions::default(), &MasterCoreOptions::default(), 1000).unwrap();
    (durable, *state.master, restored)
}

fn reopen(what: &str, folder: &Path) -> (DurableJournal, MasterCore) {
    let begun = Instant::now();
    let (durable, master, restored) = open(folder);
    println!("{what}: {:.2} s ({restored})", begun.elapsed().as_secs_f64());
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
    let begun = Instant::now();
    let config = ReplicateConfig::<String>::default();
    for number in 0..keys {
        let key = key(number);
        master.put_start(1000, CLIENT, "default", &key, 1024, &config, &mut recorder).unwrap();
        let meta = ObjectMeta { key: key.as_str(), object_checksum: None };
        master.put_end(1000, CLIENT, "default", &meta, ReplicaType::ALL, &mut recorder).unwrap();
        if number % PIPELINED == 0 {
            recorder.commit().unwrap();
        }
    }
    recorder.commit().unwrap();
    let each = begun.elapsed().as_secs_f64() / keys as f64;
    println!("a put through state machine and log: {:.2} µs, {PIPELINED} written together", each * 1e6);
}

/// How long reads take at most while a snapshot is written.
fn snapshot(durable: &DurableJournal, master: &MasterCore, keys: u64) {
    let done = AtomicBool::new(false);
    let (longest, reads, took) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut longest, mut reads, mut number) = (Duration::ZERO, 0_u64, 1_u64);
            let (mut slow, mut waited) = (0_u64, waited_for_core());
            let mut slowest = String::new();
            while !done.load(Relaxed) {
                number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let key = key((number >> 20) % keys);
                let begun = Instant::now();
                assert!(master.exist(2000, "default", &key));
                let took = begun.elapsed();
                if took > Duration::from_millis(1) {
                    slow += 1;
                    let for_core = waited_for_core() - waited;
                    slowest +=
                        &format!(" {:.1} ({:.1})", took.as_secs_f64() * 1e3, for_core.as_secs_f64() * 1e3);
                }
                if took > Duration::from_millis(1) || reads % 256 == 0 {
                    waited = waited_for_core();
                }
                (longest, reads) = (longest.max(took), reads + 1);
            }
            println!("reads of more than 1 ms while the snapshot was written: {slow} of {reads}");
            println!("how long, and for how long of that the reader had no core, ms:{slowest}");
            (longest, reads)
        });
        let begun = Instant::now();
        let facts =
            StatePersister::new(durable, master, &AuxState::default(), PersistenceSchedule::default())
                .snapshot()
                .unwrap();
        let took = begun.elapsed();
        done.store(true, Relaxed);
        let (longest, reads) = reader.join().unwrap();
        assert!(facts >= keys && reads > 0);
        (longest, reads, took)
    });
    println!(
        "snapshot: {:.2} s; the longest of {reads} reads meanwhile {:.2} ms",
        took.as_secs_f64(),
        longest.as_secs_f64() * 1e3
    );
}

/// How long this thread could have run and did not.
fn waited_for_core() -> Duration {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(told.split_whitespace().nth(1).unwrap().parse().unwrap())
}

fn size(folder: &Path) -> u64 {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}
