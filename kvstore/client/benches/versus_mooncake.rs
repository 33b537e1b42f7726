//! Compares this client with Mooncake's own, alternating on the same master and node: `cargo bench -p moongate-store-client`.
//!
//! Prints medians over the rounds. In each round, both clients put and get new objects once. Run it on an idle machine.
//! Environment: `ROUNDS` is the number of rounds, `SIZES` selects object sizes (bytes, comma-separated).
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a program for developers"
)]

use std::process::Stdio;
use std::time::{Duration, Instant};

use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions, PutOptions};
use moongate_store_testkit::LIMIT;
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST_WITHOUT_CUDA, RealMaster, RealNode, program};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};

/// Object sizes in bytes, each with the number of objects in a round.
const SIZES: [(usize, usize); 4] = [(64 << 10, 1000), (1 << 20, 200), (4 << 20, 60), (16 << 20, 20)];

/// Measurements of one client in one round.
#[derive(Deserialize)]
struct RoundTiming {
    /// Wall-clock time of the round in seconds.
    wall: f64,
    /// CPU time of the client process in seconds.
    cpu: f64,
    /// Latency of each call in seconds.
    calls: Vec<f64>,
}

/// A separate process with Mooncake's own client, controlled through stdin.
struct MooncakeClientProcess {
    _child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl MooncakeClientProcess {
    async fn start(rpc: &str) -> Self {
        let mut command = program(NEWEST_WITHOUT_CUDA, "speed.py").await;
        command.args([rpc, HANDSHAKE]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.kill_on_drop(true).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut process = Self { stdin: child.stdin.take().unwrap(), _child: child, lines };
        assert_eq!(process.read_response().await, "ready");
        process
    }

    async fn read_response(&mut self) -> String {
        let response = async {
            loop {
                let line = self.lines.next_line().await.unwrap().expect("speed.py failed");
                if let Some(response) = line.strip_prefix("> ") {
                    return response.to_owned();
                }
            }
        };
        tokio::time::timeout(LIMIT, response).await.expect("speed.py responds in time")
    }

    async fn round(
        &mut self,
        operation: &str,
        prefix: &str,
        size: usize,
        count: usize,
        threads: usize,
    ) -> RoundTiming {
        self.stdin
            .write_all(format!("{operation} {prefix} {size} {count} {threads}\n").as_bytes())
            .await
            .unwrap();
        serde_json::from_str(&self.read_response().await).unwrap()
    }
}

/// The runtime, client and buffer of one benchmark thread.
struct ClientBenchWorker {
    runtime: tokio::runtime::Runtime,
    client: KvClient,
    buffer: Vec<u8>,
}

fn moongate_workers(rpc: &str) -> Vec<ClientBenchWorker> {
    let worker = |_| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut options = KvClientOptions::default();
        options.master.connections = 1;
        let client = runtime.block_on(async { KvClient::new(rpc, options, &Supervisor::new()).unwrap() });
        let buffer = (0..SIZES[3].0).map(|index| index as u8).collect();
        ClientBenchWorker { runtime, client, buffer }
    };
    (0..2).map(worker).collect()
}

fn cpu_of(process: &str) -> f64 {
    // Split after the program's name, which may contain spaces. Times are in hundredths of a second.
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

fn moongate_round(
    workers: &mut [ClientBenchWorker],
    operation: &str,
    prefix: &str,
    size: usize,
    count: usize,
) -> RoundTiming {
    let threads = workers.len();
    let (started_at, cpu_before) = (Instant::now(), cpu_of("self"));
    let calls = std::thread::scope(|scope| {
        let started: Vec<_> = workers
            .iter_mut()
            .enumerate()
            .map(|(thread, worker)| {
                scope.spawn(move || {
                    let mut times = Vec::new();
                    worker.runtime.block_on(async {
                        for number in (thread..count).step_by(threads) {
                            let (key, call_started) = (format!("{prefix}-{number}"), Instant::now());
                            if operation == "put" {
                                worker
                                    .client
                                    .put(&key, &worker.buffer[..size], &PutOptions::default())
                                    .await
                                    .unwrap();
                            } else {
                                assert_eq!(
                                    worker.client.get_into(&key, &mut worker.buffer[..size]).await.unwrap(),
                                    size
                                );
                            }
                            times.push(call_started.elapsed().as_secs_f64());
                        }
                    });
                    times
                })
            })
            .collect();
        started.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    RoundTiming { wall: started_at.elapsed().as_secs_f64(), cpu: cpu_of("self") - cpu_before, calls }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let rounds: usize = std::env::var("ROUNDS").ok().and_then(|it| it.parse().ok()).unwrap_or(5);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let supervisor = Supervisor::new();
    let (master, _node, mut mooncake) = runtime.block_on(async {
        let master = RealMaster::start(NEWEST_WITHOUT_CUDA).await;
        let node = RealNode::start(&master, HANDSHAKE, 1024).await;
        let mooncake = MooncakeClientProcess::start(&master.rpc).await;
        (master, node, mooncake)
    });
    let mut workers = moongate_workers(&master.rpc);
    let cleaner = runtime
        .block_on(async { KvClient::new(&master.rpc, KvClientOptions::default(), &supervisor).unwrap() });
    println!(
        "                    |              GB/s             |             p99 ms            |            CPU s/GB\n     size  thr call |    mooncake    moongate  ratio |      mooncake moongate  ratio |      mooncake moongate  ratio"
    );
    let selected = std::env::var("SIZES").unwrap_or_default();
    let selected: Vec<&str> = selected.split(',').filter(|size| !size.is_empty()).collect();
    for (size, count) in SIZES {
        if !selected.is_empty() && !selected.contains(&&*size.to_string()) {
            continue;
        }
        for threads in [1, 2] {
            let mut puts: [Vec<RoundTiming>; 2] = Default::default();
            let mut gets: [Vec<RoundTiming>; 2] = Default::default();
            for round in 0..rounds {
                // The clients alternate, and so does which one starts.
                for client in [round % 2, (round + 1) % 2] {
                    let prefix = format!("{size}-{threads}-{round}-{client}");
                    for (operation, timings) in [("put", &mut puts), ("get", &mut gets)] {
                        let result = if client == 0 {
                            runtime.block_on(mooncake.round(operation, &prefix, size, count, threads))
                        } else {
                            moongate_round(&mut workers[..threads], operation, &prefix, size, count)
                        };
                        timings[client].push(result);
                    }
                    runtime.block_on(cleaner.remove_all(true)).unwrap();
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
            for (operation, [mooncake, moongate]) in [("put", puts), ("get", gets)] {
                let bytes = (size * count) as f64 / 1e9;
                let speed = |rounds: &[RoundTiming]| bytes / median(rounds.iter().map(|it| it.wall));
                let cpu = |rounds: &[RoundTiming]| {
                    rounds.iter().map(|it| it.cpu).sum::<f64>() / bytes / rounds.len() as f64
                };
                let p99 = |rounds: &[RoundTiming]| {
                    let mut calls: Vec<f64> = rounds.iter().flat_map(|it| it.calls.iter().copied()).collect();
                    calls.sort_by(f64::total_cmp);
                    calls[(calls.len() * 99 / 100).min(calls.len() - 1)] * 1e3
                };
                let [a, b] = [speed(&mooncake), speed(&moongate)];
                let [c, d] = [p99(&mooncake), p99(&moongate)];
                let [e, f] = [cpu(&mooncake), cpu(&moongate)];
                println!(
                    "{size:>9} {threads:>4} {operation}  | {a:>11.3} {b:>11.3} {:>6.2} | {c:>13.2} {d:>8.2} {:>6.2} | {e:>13.2} {f:>8.2} {:>6.2}",
                    b / a,
                    d / c,
                    f / e
                );
            }
        }
    }
}
