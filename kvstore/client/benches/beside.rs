//! This client beside Mooncake's own, on the same master and node, in turns: `cargo bench -p moongate-store-client`.
//!
//! Medians over the rounds; each round has new objects and both clients put and get it once. Wants a quiet machine.
//! In the environment, `ROUNDS` is how many, `SIZES` which sizes (bytes, with commas between).
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a program for developers"
)]

#[path = "../../master-client/tests/store/harness.rs"]
mod world;

use std::process::Stdio;
use std::time::{Duration, Instant};

use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions, PutOptions};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};

use world::{HANDSHAKE, LIMIT, NEWEST, RealMaster, RealNode, program};

/// Bytes of an object, and objects of a round.
const SIZES: [(usize, usize); 4] = [(64 << 10, 1000), (1 << 20, 200), (4 << 20, 60), (16 << 20, 20)];

/// What a round of one client showed.
#[derive(Deserialize)]
struct RoundTiming {
    /// Seconds.
    wall: f64,
    /// Seconds of CPU of the client.
    cpu: f64,
    /// Seconds of each call.
    calls: Vec<f64>,
}

/// Mooncake's own client, in a process of its own.
struct MooncakeClientProcess {
    _child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl MooncakeClientProcess {
    async fn start(rpc: &str) -> Self {
        let mut command = program(NEWEST, "speed.py").await;
        command.args([rpc, HANDSHAKE]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.kill_on_drop(true).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut theirs = Self { stdin: child.stdin.take().unwrap(), _child: child, lines };
        assert_eq!(theirs.answer().await, "ready");
        theirs
    }

    async fn answer(&mut self) -> String {
        let answer = async {
            loop {
                let line = self.lines.next_line().await.unwrap().expect("speed.py has failed");
                if let Some(answer) = line.strip_prefix("> ") {
                    return answer.to_owned();
                }
            }
        };
        tokio::time::timeout(LIMIT, answer).await.expect("speed.py answers in time")
    }

    async fn round(
        &mut self,
        what: &str,
        prefix: &str,
        size: usize,
        count: usize,
        threads: usize,
    ) -> RoundTiming {
        self.stdin.write_all(format!("{what} {prefix} {size} {count} {threads}\n").as_bytes()).await.unwrap();
        serde_json::from_str(&self.answer().await).unwrap()
    }
}

/// A thread with a runtime and a client of its own.
struct ClientBenchWorker {
    runtime: tokio::runtime::Runtime,
    client: KvClient,
    buffer: Vec<u8>,
}

fn ours(rpc: &str) -> Vec<ClientBenchWorker> {
    let worker = |_| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut options = KvClientOptions::default();
        options.master.connections = 1;
        let client = runtime.block_on(async { KvClient::new(rpc, options, &Supervisor::new()).unwrap() });
        let buffer = (0..SIZES[3].0).map(|at| at as u8).collect();
        ClientBenchWorker { runtime, client, buffer }
    };
    (0..2).map(worker).collect()
}

fn cpu_of(process: &str) -> f64 {
    // The fields after the program's name, which may have spaces in it; times are in hundredths.
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

fn our_round(
    workers: &mut [ClientBenchWorker],
    what: &str,
    prefix: &str,
    size: usize,
    count: usize,
) -> RoundTiming {
    let threads = workers.len();
    let (began, used) = (Instant::now(), cpu_of("self"));
    let calls = std::thread::scope(|scope| {
        let started: Vec<_> = workers
            .iter_mut()
            .enumerate()
            .map(|(thread, worker)| {
                scope.spawn(move || {
                    let mut times = Vec::new();
                    worker.runtime.block_on(async {
                        for number in (thread..count).step_by(threads) {
                            let (key, began) = (format!("{prefix}-{number}"), Instant::now());
                            if what == "put" {
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
                            times.push(began.elapsed().as_secs_f64());
                        }
                    });
                    times
                })
            })
            .collect();
        started.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    RoundTiming { wall: began.elapsed().as_secs_f64(), cpu: cpu_of("self") - used, calls }
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
    let (master, _node, mut theirs) = runtime.block_on(async {
        let master = RealMaster::start(NEWEST).await;
        let node = RealNode::start(&master, HANDSHAKE, 1024).await;
        let theirs = MooncakeClientProcess::start(&master.rpc).await;
        (master, node, theirs)
    });
    let mut workers = ours(&master.rpc);
    let cleaner = runtime
        .block_on(async { KvClient::new(&master.rpc, KvClientOptions::default(), &supervisor).unwrap() });
    println!(
        "size       thr call | theirs GB/s   ours GB/s  ratio | p99 ms theirs   ours  ratio | CPU s/GB theirs  ours  ratio"
    );
    let only = std::env::var("SIZES").unwrap_or_default();
    let only: Vec<&str> = only.split(',').filter(|size| !size.is_empty()).collect();
    for (size, count) in SIZES {
        if !only.is_empty() && !only.contains(&&*size.to_string()) {
            continue;
        }
        for threads in [1, 2] {
            let mut puts: [Vec<RoundTiming>; 2] = Default::default();
            let mut gets: [Vec<RoundTiming>; 2] = Default::default();
            for round in 0..rounds {
                // In turns, and who begins changes.
                for who in [round % 2, (round + 1) % 2] {
                    let prefix = format!("{size}-{threads}-{round}-{who}");
                    for (what, list) in [("put", &mut puts), ("get", &mut gets)] {
                        let result = if who == 0 {
                            runtime.block_on(theirs.round(what, &prefix, size, count, threads))
                        } else {
                            our_round(&mut workers[..threads], what, &prefix, size, count)
                        };
                        list[who].push(result);
                    }
                    runtime.block_on(cleaner.remove_all(true)).unwrap();
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
            for (what, [theirs, ours]) in [("put", puts), ("get", gets)] {
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
                let [a, b] = [speed(&theirs), speed(&ours)];
                let [c, d] = [p99(&theirs), p99(&ours)];
                let [e, f] = [cpu(&theirs), cpu(&ours)];
                println!(
                    "{size:>9} {threads:>4} {what} | {a:>11.3} {b:>11.3} {:>6.2} | {c:>13.2} {d:>6.2} {:>6.2} | {e:>13.2} {f:>6.2} {:>6.2}",
                    b / a,
                    d / c,
                    f / e
                );
            }
        }
    }
}
