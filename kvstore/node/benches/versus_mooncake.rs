//! Compares this node with Mooncake's own, alternating under one client of Mooncake's: `cargo bench -p moongate-store-node`.
//!
//! Prints medians over the rounds. Both nodes belong to one store with Mooncake's master. In each round, the client puts and gets new
//! objects once on either node. Run it on an idle machine. Environment: `ROUNDS` is the number of rounds, `SIZES` selects object sizes
//! (bytes, comma-separated), `BESIDE` is the path of another build of this benchmark, whose node then takes the place of Mooncake's.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a program for developers"
)]

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use clap::Parser as _;
use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions};
use moongate_store_node::{NodeArgs, NodeConfig};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::runtime::Runtime;

/// Object sizes in bytes, each with the number of objects in a round.
const SIZES: [(usize, usize); 4] = [(64 << 10, 1000), (1 << 20, 200), (4 << 20, 60), (16 << 20, 20)];
/// Size of each node's segment in MiB.
const MEBIBYTES: u32 = 1024;
/// Environment variable with the master's address, in a process that this program has started as a node.
const NODE_OF: &str = "NODE_OF_MASTER";
/// The release of Mooncake.
const RELEASE: &str = "0.3.13.post1";
/// Limit for each response of Mooncake's programs.
const LIMIT: Duration = Duration::from_secs(60);

/// Measurements of one round.
#[derive(Deserialize)]
struct RoundTiming {
    /// Wall-clock time of the round in seconds.
    wall: f64,
    /// Latency of each call in seconds.
    calls: Vec<f64>,
    /// CPU time of the node in seconds.
    #[serde(skip)]
    cpu: f64,
}

/// A started program that says when it is ready, killed on drop.
struct ChildProgram {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl ChildProgram {
    fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { stdin: child.stdin.take().unwrap(), child, lines }
    }

    async fn read_response(&mut self) -> String {
        let response = async {
            loop {
                let line = self.lines.next_line().await.unwrap().expect("a program ended");
                if let Some(response) = line.strip_prefix("> ") {
                    return response.to_owned();
                }
            }
        };
        tokio::time::timeout(LIMIT, response).await.expect("a program responds in time")
    }

    /// Waits until a node is ready, and returns the name of its segment.
    async fn read_segment(&mut self) -> String {
        let response = self.read_response().await;
        response.strip_prefix("ready ").expect("a node is ready").to_owned()
    }

    /// CPU time used so far, in seconds.
    fn cpu_seconds(&self) -> f64 {
        // Split after the program's name, which may contain spaces. Times are in hundredths of a second.
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id().unwrap())).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
    }
}

/// Runs as a node until the process is killed.
fn run_node(master: &str) {
    Runtime::new().unwrap().block_on(async {
        let flags = NodeArgs::parse_from(["moongate store", "--port", "0"]);
        let values = [
            "local_hostname=127.0.0.1".to_owned(),
            "metadata_server=P2PHANDSHAKE".to_owned(),
            format!("global_segment_size={}", u64::from(MEBIBYTES) << 20),
            format!("master_server_address={master}"),
        ];
        let config = NodeConfig::read(None, &values, |_| None).unwrap();
        let node = moongate_store_node::start(flags, config, &Supervisor::new()).await.unwrap();
        println!("> ready {}", node.endpoint());
        std::future::pending::<()>().await;
    });
}

/// The folder of Mooncake's releases beside the build's profiles. They are installed if they are missing.
async fn installed() -> PathBuf {
    let bench = std::env::current_exe().unwrap();
    let folder = bench.ancestors().nth(3).expect("cargo built the benchmark").join("mooncake");
    let setup = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/mooncake/setup");
    assert!(Command::new(setup).arg(&folder).status().await.unwrap().success());
    folder
}

async fn start_master(mooncake: &Path) -> (Child, String) {
    let ports = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    let [rpc, metrics] = ports.map(|it| it.local_addr().unwrap().port());
    let mut command = Command::new(mooncake.join(RELEASE).join("mooncake/mooncake_master"));
    command.args(["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]);
    command.args([format!("--rpc_port={rpc}"), format!("--metrics_port={metrics}")]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let (child, address) = (command.spawn().unwrap(), format!("127.0.0.1:{rpc}"));
    while TcpStream::connect(&address).await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    (child, address)
}

fn mooncake_program(mooncake: &Path, arguments: &[&str]) -> ChildProgram {
    let mut command = Command::new(mooncake.join("venv/bin/python"));
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peers.py")).args(arguments);
    command.env("PYTHONPATH", mooncake.join(RELEASE)).env("NO_PROXY", "*").env("no_proxy", "*");
    ChildProgram::start(command)
}

fn moongate_node(program: PathBuf, master: &str) -> ChildProgram {
    let mut command = Command::new(program);
    command.env(NODE_OF, master);
    ChildProgram::start(command)
}

/// Throughput in GB/s, p99 of the latency in ms and CPU time in s per GB of rounds that moved `bytes` bytes each.
fn summary(rounds: &[RoundTiming], bytes: usize) -> [f64; 3] {
    let gigabytes = bytes as f64 / 1e9;
    let mut walls: Vec<f64> = rounds.iter().map(|it| it.wall).collect();
    walls.sort_by(f64::total_cmp);
    let mut calls: Vec<f64> = rounds.iter().flat_map(|it| it.calls.iter().copied()).collect();
    calls.sort_by(f64::total_cmp);
    let p99 = calls[(calls.len() * 99 / 100).min(calls.len() - 1)] * 1e3;
    let cpu = rounds.iter().map(|it| it.cpu).sum::<f64>();
    [gigabytes / walls[walls.len() / 2], p99, cpu / gigabytes / rounds.len() as f64]
}

fn main() {
    if let Ok(master) = std::env::var(NODE_OF) {
        return run_node(&master);
    }
    let rounds: usize = std::env::var("ROUNDS").ok().and_then(|it| it.parse().ok()).unwrap_or(5);
    let selected = std::env::var("SIZES").unwrap_or_default();
    let selected: Vec<&str> = selected.split(',').filter(|size| !size.is_empty()).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let supervisor = Supervisor::new();
    let (_master, mut nodes, segments, mut client, cleaner) = runtime.block_on(async {
        let mooncake = installed().await;
        let (child, master) = start_master(&mooncake).await;
        let mut nodes = [
            match std::env::var_os("BESIDE") {
                Some(other) => moongate_node(other.into(), &master),
                None => mooncake_program(&mooncake, &["node", &master, &MEBIBYTES.to_string()]),
            },
            moongate_node(std::env::current_exe().unwrap(), &master),
        ];
        let segments = [nodes[0].read_segment().await, nodes[1].read_segment().await];
        let mut client = mooncake_program(&mooncake, &["client", &master]);
        assert_eq!(client.read_response().await, "ready");
        let cleaner = KvClient::new(&master, KvClientOptions::default(), &supervisor).unwrap();
        (child, nodes, segments, client, cleaner)
    });
    println!(
        "                    |              GB/s             |             p99 ms            |       node's CPU s/GB\n     size  thr call |    mooncake    moongate  ratio |      mooncake moongate  ratio |      mooncake moongate  ratio"
    );
    for (size, count) in SIZES {
        if !selected.is_empty() && !selected.contains(&&*size.to_string()) {
            continue;
        }
        for threads in [1, 2] {
            let mut puts: [Vec<RoundTiming>; 2] = Default::default();
            let mut gets: [Vec<RoundTiming>; 2] = Default::default();
            for round in 0..rounds {
                // The nodes alternate, and so does which one starts.
                for node in [round % 2, (round + 1) % 2] {
                    for (operation, timings) in [("put", &mut puts), ("get", &mut gets)] {
                        let prefix = format!("{size}-{threads}-{round}-{node}");
                        let command =
                            format!("{operation} {prefix} {size} {count} {threads} {}\n", segments[node]);
                        let before = nodes[node].cpu_seconds();
                        let response = runtime.block_on(async {
                            client.stdin.write_all(command.as_bytes()).await.unwrap();
                            client.read_response().await
                        });
                        let timing: RoundTiming = serde_json::from_str(&response).unwrap();
                        let cpu = nodes[node].cpu_seconds() - before;
                        timings[node].push(RoundTiming { cpu, ..timing });
                    }
                    runtime.block_on(cleaner.remove_all(true)).unwrap();
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
            for (operation, timings) in [("put", puts), ("get", gets)] {
                let [[a, c, e], [b, d, f]] = timings.map(|rounds| summary(&rounds, size * count));
                println!(
                    "{size:>9} {threads:>4} {operation}  | {a:>11.3} {b:>11.3} {:>6.2} | {c:>13.2} {d:>8.2} {:>6.2} | {e:>13.2} {f:>8.2} {:>6.2}",
                    b / a,
                    d / c,
                    f / e
                );
            }
        }
    }
    runtime.block_on(async {
        for node in &mut nodes {
            node.child.kill().await.unwrap();
        }
    });
}
