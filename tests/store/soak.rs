//! A master and two nodes with disks under mixed load for a long time: memory use does not grow, and no byte is wrong. It runs for
//! half an hour, so it is ignored by default; see CONTRIBUTING.md.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions, KvError, PutOptions};
use moongate_testkit::free_port;

/// Memory and disk hold half of the objects' bytes, so that objects are evicted.
const KEYS: u64 = 4000;
const NODE: &str = "128mb";
const TIER: &str = "384mb";
const WORKERS: usize = 8;
const BLOCK: usize = 4096;
const LARGEST_BLOCKS: u64 = 256;
/// Sampling interval of memory and open files.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(5);
/// Allowed growth of memory between the second and the last third of the run, in addition to 5 %: the allocator uses and frees huge
/// pages.
const MAX_MEMORY_GROWTH: u64 = 4 << 20;
/// Allowed growth of the number of open files.
const FILES: u64 = 16;
const START: Duration = Duration::from_secs(60);

/// A process that is killed when dropped.
struct SoakProcess {
    name: &'static str,
    id: u32,
    child: Option<Child>,
    samples: Vec<ResourceSample>,
}

#[derive(Clone, Copy, Debug, Default)]
struct ResourceSample {
    memory: u64,
    files: u64,
}

impl Drop for SoakProcess {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl SoakProcess {
    fn start(name: &'static str, arguments: &[String], master: &str) -> Self {
        let program = std::env::var("MOONGATE_PROGRAM");
        let mut command = Command::new(program.as_deref().unwrap_or(env!("CARGO_BIN_EXE_moongate")));
        command
            .args(arguments)
            .env_clear()
            .env("MOONCAKE_MASTER", master)
            .env("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1");
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        Self { name, id: child.id(), child: Some(child), samples: Vec::new() }
    }

    fn current() -> Self {
        Self { name: "client", id: std::process::id(), child: None, samples: Vec::new() }
    }

    /// Samples the private memory of the process; its shared memory is the segment.
    fn sample(&mut self) {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id)).expect("it still runs");
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        let memory = line.trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10;
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.id)).unwrap().count() as u64;
        self.samples.push(ResourceSample { memory, files });
    }

    /// The second and the last third of the samples. In the first third, caches and buffers fill.
    fn summaries(&self) -> [ResourceSummary; 2] {
        let third = self.samples.len() / 3;
        let sum_up = |looks: &[ResourceSample]| {
            let mut memory: Vec<u64> = looks.iter().map(|look| look.memory).collect();
            memory.sort_unstable();
            let files = looks.iter().map(|look| look.files).max().unwrap();
            ResourceSummary { median: memory[memory.len() / 2], max: *memory.last().unwrap(), files }
        };
        [sum_up(&self.samples[third..2 * third]), sum_up(&self.samples[2 * third..])]
    }
}

/// Resource use of a process in a third of the run: bytes of memory, and the maximum of open files.
struct ResourceSummary {
    median: u64,
    max: u64,
    files: u64,
}

#[derive(Debug, Default)]
struct SoakCounts {
    got: AtomicU64,
    missed: AtomicU64,
    put: AtomicU64,
    removed: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
}

fn mix_bits(mut number: u64) -> u64 {
    for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53_u64] {
        number = (number ^ (number >> 33)).wrapping_mul(factor);
    }
    number ^ (number >> 33)
}

/// The bytes of an object, the first eight are the version, from which all others are derived.
fn content(key: u64, version: u64) -> Vec<u8> {
    let mut block = vec![0; BLOCK];
    for (at, word) in block.chunks_exact_mut(8).enumerate() {
        let value = if at == 0 { version } else { mix_bits(key ^ version.rotate_left(17) ^ at as u64) };
        word.copy_from_slice(&value.to_le_bytes());
    }
    block.repeat(1 + (mix_bits(key) % LARGEST_BLOCKS) as usize)
}

fn check(key: u64, bytes: &[u8]) {
    let version = u64::from_le_bytes(*bytes.first_chunk().expect("objects are not empty"));
    assert!(bytes == content(key, version), "object {key} has other bytes than were put");
}

async fn work(client: KvClient, counts: Arc<SoakCounts>, end: Instant) {
    while Instant::now() < end {
        // Most reads are of a few keys.
        let key = if fastrand::bool() { fastrand::u64(..KEYS / 10) } else { fastrand::u64(..KEYS) };
        let name = format!("soak-{key}");
        let result = match fastrand::u32(..100) {
            0..50 => match client.get(&name).await {
                Ok(bytes) => {
                    check(key, &bytes);
                    Ok(&counts.got)
                }
                Err(error) => Err(error),
            },
            50..90 => {
                let bytes = content(key, fastrand::u64(..));
                client.put(&name, &bytes, &PutOptions::default()).await.map(|_| &counts.put)
            }
            90..95 => {
                let bytes = content(key, fastrand::u64(..));
                client.upsert(&name, &bytes, &PutOptions::default()).await.map(|_| &counts.put)
            }
            _ => client.remove(&name, true).await.map(|()| &counts.removed),
        };
        let count = match &result {
            Ok(count) => count,
            Err(KvError::NotFound { .. }) => &counts.missed,
            Err(KvError::Damaged { .. }) => panic!("object {key} is damaged"),
            Err(KvError::NoRoom { .. } | KvError::Master { .. }) => &counts.refused,
            Err(_) => &counts.failed,
        };
        count.fetch_add(1, Relaxed);
    }
}

fn processes(folder: &Path, rpc: &str, port: u16) -> Vec<SoakProcess> {
    let admin = free_port();
    let master = [
        "master",
        "--rpc_address=127.0.0.1",
        "--metrics_host=127.0.0.1",
        "--enable_offload",
        "--offload_on_evict",
        "--promotion_on_hit",
        "--default_kv_lease_ttl=1000",
    ];
    let mut flags: Vec<String> = master.iter().map(|&flag| flag.to_owned()).collect();
    flags.extend([format!("--rpc_port={port}"), format!("--metrics_port={admin}")]);
    let mut processes = vec![SoakProcess::current(), SoakProcess::start("master", &flags, rpc)];
    for name in ["first", "second"] {
        let folder = folder.join(name);
        let flags = [
            "store".to_owned(),
            "--port=0".to_owned(),
            format!("-Dglobal_segment_size={NODE}"),
            "-Denable_ssd_offload=true".to_owned(),
            format!("-Dssd_offload_path={}", folder.display()),
            format!("--tier-size={TIER}"),
            "--tier-buffer=64mb".to_owned(),
        ];
        processes.push(SoakProcess::start(name, &flags, rpc));
    }
    processes
}

/// Looks at the processes again and again.
async fn sample_until(processes: &mut [SoakProcess], end: Instant) {
    while Instant::now() < end {
        tokio::time::sleep(SAMPLE_INTERVAL).await;
        processes.iter_mut().for_each(SoakProcess::sample);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes half an hour"]
async fn memory_stays_as_it_is() {
    let seconds = std::env::var("MOONGATE_SOAK_SECONDS").map_or(1800, |text| text.parse().unwrap());
    let (supervisor, folder, port) = (Supervisor::new(), tempfile::tempdir().unwrap(), free_port());
    let rpc = format!("127.0.0.1:{port}");
    let mut processes = processes(folder.path(), &rpc, port);
    let client = KvClient::new(&rpc, KvClientOptions::default(), &supervisor).unwrap();
    let ready = async {
        while client.put("ready", b"or not", &PutOptions::default()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(START, ready).await.expect("the store serves in time");

    let (counts, end) = (Arc::new(SoakCounts::default()), Instant::now() + Duration::from_secs(seconds));
    // Each is a client of its own, as engines are.
    let clients: Vec<KvClient> =
        (0..WORKERS).map(|_| KvClient::new(&rpc, KvClientOptions::default(), &supervisor).unwrap()).collect();
    let workers = clients.iter().map(|client| work(client.clone(), Arc::clone(&counts), end));
    tokio::join!(join_all(workers), sample_until(&mut processes, end));
    println!(
        "after {seconds} s: {counts:?}, {} bytes moved",
        clients.iter().map(KvClient::bytes_moved).sum::<u64>()
    );
    for process in &processes {
        let [before, after] = process.summaries();
        for (name, third) in [("second", &before), ("last", &after)] {
            let ResourceSummary { median, max: most, files } = third;
            println!("{}, {name} third: {median} bytes, {most} at most, {files} files", process.name);
        }
    }
    for process in &processes {
        let [before, after] = process.summaries();
        let name = process.name;
        assert!(
            after.median <= before.median + before.median / 20 + MAX_MEMORY_GROWTH,
            "memory of {name} grows"
        );
        assert!(after.files <= before.files + FILES, "open files of {name} grow");
    }
    let failed = counts.failed.load(Relaxed);
    assert!(failed * 100 <= counts.got.load(Relaxed), "{failed} transfers have failed");
}
