//! Prints the memory of a master per key, the pauses of its eviction, and the memory after all keys are removed.
//!
//! `memory [KEYS] [groups]`: a million keys by default, of SGLang's length, with one replica each. With `groups`, each pair of keys is in
//! one group, as in SGLang. The keys are written by two threads that go on while another one removes them, as in a server. They use 95 %
//! of the space, so that eviction starts; meanwhile the threads look up keys, and the longest of these calls is printed.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "an example")]

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mooncake_wire::types::{ObjectMeta, ReplicaType, ReplicateConfig, Segment, Uuid};
use moongate_master_core::{CallContext, MasterCore, MasterCoreOptions, PutStartRequest};

/// The server's allocator, which returns freed memory to the system.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Bytes of an object, and how many segments have 95 % of their space in use.
const OBJECT: u64 = 1024;
const SEGMENTS: u64 = 4;
/// A time at which all leases of the writers have ended, in milliseconds.
const AFTER_LEASES: u64 = 1 << 40;
const WRITERS: usize = 2;
const CLIENT: Uuid = Uuid { first: 1, second: 1 };

/// Resident memory of this process in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

fn main() {
    let with_groups = std::env::args().any(|argument| argument == "groups");
    let keys = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(1_000_000);
    let master = MasterCore::new(MasterCoreOptions::default());
    for number in 0..SEGMENTS {
        let segment = Segment {
            id: Uuid { first: number, second: 1 },
            name: format!("10.0.0.{number}:12000"),
            size: (keys * OBJECT / SEGMENTS * 100 / 95).next_multiple_of(1 << 20),
            ..Segment::<String>::default()
        };
        master.mount(0, &segment, CLIENT, &mut ()).unwrap();
    }
    let before = resident();
    let started = Instant::now();
    let (filled_threads, is_removed) = (Barrier::new(WRITERS + 1), Barrier::new(WRITERS + 1));
    let is_evicted = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (master, filled_threads, is_removed) = (&master, &filled_threads, &is_removed);
            let is_evicted = &is_evicted;
            scope.spawn(move || {
                fill(master, keys, writer as u64, with_groups);
                filled_threads.wait();
                if writer > 0 {
                    println!(
                        "the longest look-up took {:?}",
                        look_up_until(master, writer as u64, is_evicted)
                    );
                }
                is_removed.wait();
            });
        }
        filled_threads.wait();
        let (filled, full) = (started.elapsed(), resident());
        println!("{keys} keys in {:.2} s", filled.as_secs_f64());
        println!("{} bytes per key", (full - before) / keys);
        evict(&master);
        is_evicted.store(true, Ordering::Relaxed);
        let started = Instant::now();
        let removed = master.remove_all(0, None, true, &mut ());
        println!("{removed} removed in {:.2} s", started.elapsed().as_secs_f64());
        // The allocator returns pages after a delay, during subsequent calls.
        std::thread::sleep(Duration::from_secs(2));
        drop((0..1000).map(|size| vec![0_u8; size * 10]).collect::<Vec<_>>());
        println!("{} MiB before, {} MiB full, {} MiB after", before >> 20, full >> 20, resident() >> 20);
        is_removed.wait();
    });
}

/// Runs the periodic work, which evicts, and prints how long its longest call took.
fn evict(master: &MasterCore) {
    let (mut longest, mut ticks, started) = (Duration::ZERO, 0, Instant::now());
    let keys = master.key_count();
    while started.elapsed() < Duration::from_secs(5) {
        let began = Instant::now();
        master.ping(AFTER_LEASES + ticks * 10, CLIENT);
        master.tick(AFTER_LEASES + ticks * 10, &mut ());
        longest = longest.max(began.elapsed());
        ticks += 1;
        std::thread::sleep(Duration::from_millis(10));
    }
    let evicted = keys - master.key_count();
    println!(
        "{evicted} evicted in {ticks} calls of the periodic work, the longest of which took {longest:?}"
    );
}

/// Looks up the keys of a writer, and returns the longest time of a call.
fn look_up_until(master: &MasterCore, writer: u64, is_done: &AtomicBool) -> Duration {
    let mut longest = Duration::ZERO;
    while !is_done.load(Ordering::Relaxed) {
        let mut random = fastrand::Rng::with_seed(writer);
        for _ in 0..10_000 {
            let key = [(); 4].map(|()| format!("{:016x}", random.u64(..))).concat() + "_0_k";
            let began = Instant::now();
            master.exist(0, "default", &key);
            longest = longest.max(began.elapsed());
        }
    }
    longest
}

/// Writes this writer's share of the keys.
fn fill(master: &MasterCore, keys: u64, writer: u64, with_groups: bool) {
    let mut random = fastrand::Rng::with_seed(writer);
    let mut page = String::new();
    for number in 0..keys / WRITERS as u64 {
        if number % 2 == 0 {
            page = [(); 4].map(|()| format!("{:016x}", random.u64(..))).concat();
        }
        let key = format!("{page}_0_{}", if number % 2 == 0 { 'k' } else { 'v' });
        let group_ids = with_groups.then(|| vec![format!("sglang-hicache:{page}")]);
        let config = ReplicateConfig { group_ids, ..ReplicateConfig::default() };
        let context = CallContext { now_ms: number, client: CLIENT, tenant: "default" };
        master
            .put_start(context, &PutStartRequest { key: &key, size: OBJECT, config: &config }, &mut ())
            .unwrap();
        let meta = ObjectMeta { key: key.as_str(), object_checksum: None };
        master.put_end(context, &meta, ReplicaType::ALL, &mut ()).unwrap();
    }
}
