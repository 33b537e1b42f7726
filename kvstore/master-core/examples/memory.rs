//! Prints the memory of a master per key, with a million keys of SGLang's length and one replica each, and the memory after all
//! are removed. With the argument `groups`, each pair of keys is in one group, as in SGLang. The keys are written by two threads that
//! go on while another one removes them, as in a server.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "an example")]

use std::sync::Barrier;

use mooncake_wire::types::{ObjectMeta, ReplicaType, ReplicateConfig, Segment, Uuid};
use moongate_master_core::{CallContext, MasterCore, MasterCoreOptions, PutStartRequest};

/// The server's allocator, which returns freed memory to the system.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const KEYS: u64 = 1_000_000;
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
    let master = MasterCore::new(MasterCoreOptions::default());
    for number in 0..4 {
        let segment = Segment {
            id: Uuid { first: number, second: 1 },
            name: format!("10.0.0.{number}:12000"),
            size: 1 << 40,
            ..Segment::<String>::default()
        };
        master.mount(0, &segment, CLIENT, &mut ()).unwrap();
    }
    let before = resident();
    let started = std::time::Instant::now();
    let (filled_threads, is_removed) = (Barrier::new(WRITERS + 1), Barrier::new(WRITERS + 1));
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (master, filled_threads, is_removed) = (&master, &filled_threads, &is_removed);
            scope.spawn(move || {
                fill(master, writer as u64, with_groups);
                filled_threads.wait();
                is_removed.wait();
            });
        }
        filled_threads.wait();
        let (filled, full) = (started.elapsed(), resident());
        println!("{KEYS} keys in {:.2} s", filled.as_secs_f64());
        println!("{} bytes per key", (full - before) / KEYS);
        let started = std::time::Instant::now();
        let removed = master.remove_all(0, None, true, &mut ());
        println!("{removed} removed in {:.2} s", started.elapsed().as_secs_f64());
        // The allocator returns pages after a delay, during subsequent calls.
        std::thread::sleep(std::time::Duration::from_secs(2));
        drop((0..1000).map(|size| vec![0_u8; size * 10]).collect::<Vec<_>>());
        println!("{} MiB before, {} MiB full, {} MiB after", before >> 20, full >> 20, resident() >> 20);
        is_removed.wait();
    });
}

/// Writes this writer's share of the keys.
fn fill(master: &MasterCore, writer: u64, with_groups: bool) {
    let mut random = fastrand::Rng::with_seed(writer);
    let mut page = String::new();
    for number in 0..KEYS / WRITERS as u64 {
        if number % 2 == 0 {
            page = [(); 4].map(|()| format!("{:016x}", random.u64(..))).concat();
        }
        let key = format!("{page}_0_{}", if number % 2 == 0 { 'k' } else { 'v' });
        let group_ids = with_groups.then(|| vec![format!("sglang-hicache:{page}")]);
        let config = ReplicateConfig { group_ids, ..ReplicateConfig::default() };
        let context = CallContext { now_ms: number, client: CLIENT, tenant: "default" };
        master
            .put_start(context, &PutStartRequest { key: &key, size: 1024, config: &config }, &mut ())
            .unwrap();
        let meta = ObjectMeta { key: key.as_str(), object_checksum: None };
        master.put_end(context, &meta, ReplicaType::ALL, &mut ()).unwrap();
    }
}
