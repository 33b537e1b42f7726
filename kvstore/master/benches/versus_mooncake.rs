//! Calls per second of this master and of Mooncake's master, measured alternately.
//!
//! `cargo bench -p moongate-master --bench versus_mooncake -- MOONCAKE_MASTER [CASE] [FLAG…]`, with the path of the binary
//! `mooncake_master` (not the script of the same name), a substring of the names of the cases to run, and flags for this master. Both
//! masters run the whole time, and each case alternates between them, so that other load on the machine affects both. The master is
//! pinned to one core, the client to the same core or to another one; with the case `unpinned`, neither is pinned. With the case
//! `memory`, the resident memory with four million keys and after their removal is printed instead.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a tool for a person at a terminal")]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use mooncake_wire::Dialect;
use mooncake_wire::frame::{self, FrameParseResult, ResponseHeader};
use mooncake_wire::rpc::{
    BatchExistKey, BatchPutEnd, BatchPutEndArguments, BatchPutStart, BatchPutStartArguments, ExistKey,
    KeyArguments, KeysArguments, MountArguments, MountSegment, PutEnd, PutEndArguments, PutStart,
    PutStartArguments, RemoveAll, RemoveAllArguments, encode_request,
};
use mooncake_wire::types::{DEFAULT_TENANT, ObjectMeta, ReplicaType, ReplicateConfig, Segment, Uuid};
use moongate_runtime::{Supervisor, return_freed_memory};

/// The same allocator as in the server binary.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const CLIENT: Uuid = Uuid { first: 1, second: 2 };
const KEYS: usize = 100_000;
/// Number of keys for the comparison of memory.
const MEMORY_KEYS: usize = 4_000_000;
const ROUNDS: usize = 7;
/// Duration of one case on one master per round.
const CASE_DURATION: Duration = Duration::from_millis(700);
const FLAGS: [&str; 4] = [
    "--rpc_address=127.0.0.1",
    "--client_ttl=100000",
    "--enable_metric_reporting=false",
    "--rpc_thread_num=2",
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match arguments.split_first() {
        Some((first, rest)) if first == "--serve" => serve(rest),
        Some((mooncake, rest)) => compare(mooncake, rest),
        None => println!("versus_mooncake: pass the path of mooncake_master after `--`"),
    }
}

/// Runs this master in a separate process.
fn serve(flags: &[String]) {
    let invocation = moongate_master::flags::read(flags.iter().map(Into::into), |_| None).unwrap();
    let moongate_master::flags::MasterInvocation::Serve(options) = invocation else { return };
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap().block_on(
        async {
            let supervisor = Supervisor::new();
            let _running = moongate_master::start(*options, &supervisor).await.unwrap();
            // As the server binary does.
            return_freed_memory().await;
        },
    );
}

struct BenchMaster {
    name: &'static str,
    process: Child,
    port: u16,
    /// The connection on which the segments are mounted: when it closes, this master takes the node for lost and rejects puts.
    node: Option<BenchRpcClient>,
}

impl Drop for BenchMaster {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl BenchMaster {
    /// Starts a master with this number of keys on the given cores.
    fn start(
        name: &'static str,
        (program, serve): (&str, &[&str]),
        port: u16,
        cores: &str,
        keys: usize,
    ) -> Self {
        let mut command = Command::new("taskset");
        command.args(["-c", cores, program]).args(serve).args(FLAGS);
        command.args([format!("--rpc_port={port}"), format!("--metrics_port={}", port + 1)]);
        let process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let mut server = Self { name, process, port, node: None };
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert_eq!(server.process.try_wait().unwrap(), None, "{program} has exited");
            std::thread::sleep(Duration::from_millis(20));
        }
        server.node = Some(server.mount());
        std::thread::scope(|scope| {
            for first in [0, keys / 2] {
                let server = &server;
                scope.spawn(move || server.fill(first, keys / 2));
            }
        });
        server
    }

    /// Resident memory in MB.
    fn resident_mb(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024 / 1_000_000
    }

    /// CPU time of all its threads in nanoseconds.
    fn processor_ns(&self) -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.process.id())).unwrap();
        let run = |task: std::fs::DirEntry| {
            let schedstat = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
            schedstat.split_whitespace().next()?.parse::<u64>().ok()
        };
        tasks.filter_map(|task| run(task.ok()?)).sum()
    }

    fn connect(&self) -> BenchRpcClient {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_nodelay(true).unwrap();
        BenchRpcClient {
            stream,
            input: BytesMut::new(),
            request: BytesMut::new(),
            chunk: vec![0; 1 << 16].into(),
        }
    }

    fn mount(&self) -> BenchRpcClient {
        let mut caller = self.connect();
        for number in 0..4_u64 {
            let name = format!("10.0.0.{number}:12345");
            let segment = Segment {
                id: Uuid { first: 7, second: number },
                name: name.as_str(),
                base: 1 << 40,
                size: 1 << 40,
                te_endpoint: name.as_str(),
                protocol: "tcp",
                host_id: "",
                locality: None,
            };
            let mount = MountArguments { segment, client_id: CLIENT };
            caller.call(|out| encode_request::<MountSegment, &str>(0, Dialect::NEWEST, &mount, out).unwrap());
        }
        caller
    }

    /// Puts this number of keys.
    fn fill(&self, first: usize, count: usize) {
        let mut caller = self.connect();
        for first in (first..first + count).step_by(256).take(count / 256) {
            let keys: Vec<String> = (first..first + 256).map(key).collect();
            caller.put_batch(&keys.iter().map(String::as_str).collect::<Vec<_>>());
        }
    }
}

/// A key in the format of inference engines.
fn key(number: usize) -> String {
    let words = (0..4_u64).map(|word| (number as u64 + word).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let hash: String = words.map(|word| format!("{word:016x}")).collect();
    format!("{hash}_0_k")
}

struct BenchRpcClient {
    stream: TcpStream,
    input: BytesMut,
    request: BytesMut,
    chunk: Box<[u8]>,
}

impl BenchRpcClient {
    fn call(&mut self, encode: impl FnOnce(&mut BytesMut)) {
        self.request.clear();
        encode(&mut self.request);
        self.stream.write_all(&self.request).unwrap();
        loop {
            if let FrameParseResult::Frame(response) =
                frame::take::<ResponseHeader>(&mut self.input, 1 << 30).unwrap()
            {
                assert_eq!(response.header.error, 0);
                return;
            }
            let read = self.stream.read(&mut self.chunk).unwrap();
            assert!(read > 0, "the master has closed the connection");
            self.input.extend_from_slice(&self.chunk[..read]);
        }
    }
}

impl BenchRpcClient {
    fn put_batch(&mut self, keys: &[&str]) {
        let sizes = vec![1024; keys.len()];
        let objects = keys.iter().map(|key| ObjectMeta { key: *key, object_checksum: None }).collect();
        let (config, tenant, keys) = (ReplicateConfig::default(), DEFAULT_TENANT, keys.to_vec());
        let start = BatchPutStartArguments { client_id: CLIENT, keys, sizes, config, tenant };
        self.call(|out| encode_request::<BatchPutStart, &str>(0, Dialect::NEWEST, &start, out).unwrap());
        let end = BatchPutEndArguments { client_id: CLIENT, objects, replica_type: ReplicaType::ALL, tenant };
        self.call(|out| encode_request::<BatchPutEnd, &str>(0, Dialect::NEWEST, &end, out).unwrap());
    }
}

#[derive(Clone, Copy)]
enum RpcBenchCase {
    Exist,
    BatchExist(usize),
    Put,
    BatchPut(usize),
}

/// Makes calls for [`CASE_DURATION`]. Returns the latency of each in nanoseconds.
fn load(caller: &mut BenchRpcClient, case: RpcBenchCase, keys: &[String], key_prefix: &str) -> Vec<u64> {
    let (started, mut times, mut index) = (Instant::now(), Vec::new(), 0);
    while started.elapsed() < CASE_DURATION {
        let start = Instant::now();
        let key = keys[index * 7919 % keys.len()].as_str();
        match case {
            RpcBenchCase::Exist => {
                let invocation = KeyArguments { key, tenant: DEFAULT_TENANT };
                caller.call(|out| {
                    encode_request::<ExistKey, &str>(1, Dialect::NEWEST, &invocation, out).unwrap();
                });
            }
            RpcBenchCase::BatchExist(size) => {
                let first = index * size % (keys.len() - size);
                let keys = keys[first..first + size].iter().map(String::as_str).collect();
                let invocation = KeysArguments { keys, tenant: DEFAULT_TENANT };
                caller.call(|out| {
                    encode_request::<BatchExistKey, &str>(1, Dialect::NEWEST, &invocation, out).unwrap();
                });
            }
            RpcBenchCase::BatchPut(size) => {
                let name = |nth| format!("{key_prefix}{index:08}{nth:04}{}", &key[..44]);
                let names: Vec<String> = (0..size).map(name).collect();
                caller.put_batch(&names.iter().map(String::as_str).collect::<Vec<_>>());
            }
            RpcBenchCase::Put => {
                let (name, tenant) = (format!("{key_prefix}{index:08}{}", &key[..48]), DEFAULT_TENANT);
                let (config, key) = (ReplicateConfig::default(), name.as_str());
                let put = PutStartArguments { client_id: CLIENT, key, size: 1024, config, tenant };
                caller.call(|out| encode_request::<PutStart, &str>(1, Dialect::NEWEST, &put, out).unwrap());
                let object = ObjectMeta { key, object_checksum: None };
                let end =
                    PutEndArguments { client_id: CLIENT, object, replica_type: ReplicaType::ALL, tenant };
                caller.call(|out| encode_request::<PutEnd, &str>(1, Dialect::NEWEST, &end, out).unwrap());
            }
        }
        times.push(u64::try_from(start.elapsed().as_nanos()).unwrap());
        index += 1;
    }
    times
}

/// Result of one case in one round.
#[derive(Clone, Copy, Default)]
struct RpcBenchResult {
    /// The master's CPU time per call.
    cpu_us: f64,
    per_second: f64,
    median_us: f64,
    p99_us: f64,
}

fn run_case(
    server: &BenchMaster,
    case: RpcBenchCase,
    connections: usize,
    keys: &[String],
    round: usize,
) -> RpcBenchResult {
    let before = server.processor_ns();
    let mut times: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..connections)
            .map(|lane| {
                let mut caller = server.connect();
                scope.spawn(move || load(&mut caller, case, keys, &format!("{round}{lane}{connections}-")))
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let cpu_us = (server.processor_ns() - before) as f64 / 1000.0 / times.len() as f64;
    times.sort_unstable();
    let percentile = |share: f64| times[((times.len() - 1) as f64 * share) as usize] as f64 / 1000.0;
    RpcBenchResult {
        cpu_us,
        per_second: times.len() as f64 / CASE_DURATION.as_secs_f64(),
        median_us: percentile(0.5),
        p99_us: percentile(0.99),
    }
}

fn median(results: &[RpcBenchResult], value_of: fn(&RpcBenchResult) -> f64) -> f64 {
    let mut values: Vec<f64> = results.iter().map(value_of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Pins this process to a core.
fn pin(core: usize) {
    let process_id = std::process::id().to_string();
    let pinned =
        Command::new("taskset").args(["-cp", &core.to_string(), &process_id]).stdout(Stdio::null()).status();
    assert!(pinned.unwrap().success());
}

/// Prints the memory of both masters with keys, and after all of them are removed.
fn compare_memory(ours: (&str, &[&str]), mooncake: &str) {
    for (name, program, port) in [("moongate", ours, 46_151), ("mooncake", (mooncake, &[][..]), 46_161)] {
        let server = BenchMaster::start(name, program, port, "0-1", MEMORY_KEYS);
        let full = server.resident_mb();
        let mut caller = server.connect();
        let invocation = RemoveAllArguments { force: true, tenant: DEFAULT_TENANT };
        caller.call(|out| encode_request::<RemoveAll, &str>(0, Dialect::NEWEST, &invocation, out).unwrap());
        std::thread::sleep(Duration::from_secs(5));
        let idle = server.resident_mb();
        // Allocators return memory during later calls.
        for _ in 0..4 {
            server.fill(0, 512);
            std::thread::sleep(Duration::from_secs(1));
        }
        let after_calls = server.resident_mb();
        println!(
            "{name}: {MEMORY_KEYS} keys {full} MB, removed: {idle} MB after 5 s, {after_calls} MB after calls"
        );
    }
}

fn compare(mooncake: &str, rest: &[String]) {
    let (flags, invocation): (Vec<&String>, Vec<&String>) =
        rest.iter().partition(|word| word.starts_with("--"));
    let executable = std::env::current_exe().unwrap();
    let serve: Vec<&str> = std::iter::once("--serve").chain(flags.iter().map(|flag| flag.as_str())).collect();
    let ours = (executable.to_str().unwrap(), &serve[..]);
    let has = |case: &str| invocation.iter().any(|word| *word == case);
    if has("memory") {
        compare_memory(ours, mooncake);
        return;
    }
    let is_unpinned = has("unpinned");
    let cores = if is_unpinned { "0-1" } else { "0" };
    let servers = [
        BenchMaster::start("moongate", ours, 46_151, cores, KEYS),
        BenchMaster::start("mooncake", (mooncake, &[]), 46_161, cores, KEYS),
    ];
    let keys: Vec<String> = (0..KEYS).map(key).collect();
    println!(
        "| case | cores | master | calls/s | p50 us | p99 us | master's CPU us |\n|---|---|---|---|---|---|---|"
    );
    for (name, case, connections) in [
        ("ExistKey, 1 connection", RpcBenchCase::Exist, 1),
        ("ExistKey, 4 connections", RpcBenchCase::Exist, 4),
        ("ExistKey, 16 connections", RpcBenchCase::Exist, 16),
        ("BatchExistKey x64", RpcBenchCase::BatchExist(64), 1),
        ("BatchExistKey x512", RpcBenchCase::BatchExist(512), 1),
        ("PutStart + PutEnd, 1 connection", RpcBenchCase::Put, 1),
        ("PutStart + PutEnd, 4 connections", RpcBenchCase::Put, 4),
        ("PutStart + PutEnd, 16 connections", RpcBenchCase::Put, 16),
        ("BatchPutStart + BatchPutEnd x64", RpcBenchCase::BatchPut(64), 1),
    ] {
        if !invocation.iter().all(|part| *part == "unpinned" || name.contains(part.as_str())) {
            continue;
        }
        for core in if is_unpinned { 0..1 } else { 0..2 } {
            if !is_unpinned {
                pin(core);
            }
            let mut results = [const { Vec::new() }; 2];
            for round in 0..ROUNDS {
                for (server, results) in servers.iter().zip(&mut results) {
                    results.push(run_case(server, case, connections, &keys, 10 * round + core));
                }
            }
            let cores = match core {
                _ if is_unpinned => "any",
                0 => "same",
                _ => "two",
            };
            let medians = results.each_ref().map(|results| {
                [
                    median(results, |result| result.per_second),
                    median(results, |result| result.median_us),
                    median(results, |result| result.p99_us),
                    median(results, |result| result.cpu_us),
                ]
            });
            for (server, [per_second, p50, p99, cpu]) in servers.iter().zip(medians) {
                let master_name = server.name;
                println!(
                    "| {name} | {cores} | {master_name} | {per_second:.0} | {p50:.1} | {p99:.1} | {cpu:.1} |"
                );
            }
            let [moongate, mooncake_medians] = medians;
            let ratio = |percentile: usize| moongate[percentile] / mooncake_medians[percentile];
            let ratios = [0, 1, 2, 3].map(|percentile| format!("{:.2}", ratio(percentile))).join(" | ");
            println!("| {name} | {cores} | ratio | {ratios} |");
        }
    }
}
