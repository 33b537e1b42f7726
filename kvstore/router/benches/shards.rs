//! CPU time of masters per key, with one master and with four: directly, and through a router.
//!
//! Each master is a process of its own, pinned with the others to one core, as a machine with fewer cores than masters cannot show the
//! throughput of all. What a master needs per key is what limits it: N masters that each need as much as a single one have N times its
//! throughput.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a benchmark fails by panicking"
)]

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use mooncake_wire::shards::ShardIdentity;
use mooncake_wire::types::{ObjectMeta, ReplicateConfig, Segment, Uuid};
use moongate_master::{MasterServerOptions, RpcLimits};
use moongate_master_client::rpc::{MasterClient, MasterClientOptions, ObjectClient, PutMode};
use moongate_runtime::Supervisor;
use moongate_store_router::RouterOptions;
use moongate_store_testkit::test_master::{TestRpcConnection, start_master_with};

const KEYS: usize = 100_000;
const BATCH: usize = 512;
const CLIENT: Uuid = Uuid { first: 1, second: 2 };
const DURATION: Duration = Duration::from_secs(4);
const ROUNDS: usize = 3;
/// Calls in flight per master: the load grows with the masters.
const IN_FLIGHT: u64 = 16;

/// A process of this program that serves as a master or a router.
struct ServerProcess {
    child: Child,
    address: String,
}

impl ServerProcess {
    fn start(arguments: &[String]) -> Self {
        let mut command = Command::new("taskset");
        command.args(["-c", "1"]).arg(std::env::current_exe().unwrap()).args(arguments);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut address = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut address).unwrap();
        Self { child, address: address.trim().to_owned() }
    }

    /// CPU time of all its threads in nanoseconds.
    fn cpu_ns(&self) -> u64 {
        let threads = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let of_thread = |path: std::path::PathBuf| {
            let text = fs::read_to_string(path.join("schedstat")).unwrap_or_default();
            text.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0)
        };
        threads.map(|thread| of_thread(thread.unwrap().path())).sum()
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

async fn serve(arguments: &[String]) {
    let supervisor = Supervisor::new();
    let _server: Box<dyn std::any::Any> = match arguments {
        [role, index, count] if role == "master" => {
            let (index, count) = (index.parse().unwrap(), count.parse().unwrap());
            let options = MasterServerOptions {
                shard: Some(ShardIdentity { index, count }),
                threads: 1,
                // The time for which an idle thread polls is no work.
                limits: RpcLimits { busy_poll: Duration::ZERO, ..RpcLimits::default() },
                ..MasterServerOptions::default()
            };
            let master = start_master_with(options);
            println!("{}", master.rpc.address());
            Box::new(master)
        }
        [_, shards] => {
            let shards: Vec<String> = shards.split(',').map(str::to_owned).collect();
            let options = RouterOptions {
                shard_admins: shards.clone(),
                shards,
                listen: "127.0.0.1:0".parse().unwrap(),
                admin_listen: "127.0.0.1:0".parse().unwrap(),
                max_connections: 100,
                max_frame_bytes: 64 << 20,
                call_timeout: Duration::from_secs(5),
                stall_timeout: Duration::from_secs(60),
            };
            let router = moongate_store_router::start(&options, &supervisor).unwrap();
            println!("{}", router.address());
            Box::new(router)
        }
        _ => return,
    };
    // Until the benchmark ends.
    let _end = tokio::task::spawn_blocking(|| std::io::stdin().lines().count()).await;
}

fn key(number: usize) -> String {
    format!("{:032x}_0_k", (number as u128).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
}

async fn mount(router: &str) {
    let mut connection = TestRpcConnection::connect(router).await;
    let arguments = mooncake_wire::rpc::MountArguments {
        segment: Segment {
            id: CLIENT,
            name: "node",
            base: 1 << 40,
            size: 64 << 30,
            te_endpoint: "node",
            protocol: "tcp",
            host_id: "",
            locality: None,
        },
        client_id: CLIENT,
    };
    connection.call::<mooncake_wire::rpc::MountSegment>(&arguments).await.unwrap();
}

async fn fill(client: &ObjectClient) {
    for batch in 0..KEYS / BATCH {
        let keys: Vec<String> = (batch * BATCH..(batch + 1) * BATCH).map(key).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let config = ReplicateConfig::default();
        let started =
            client.start_batch(PutMode::Put, keys.clone(), vec![4096; BATCH], config).await.unwrap();
        assert!(started.iter().all(Result::is_ok));
        let objects = keys.iter().map(|key| ObjectMeta { key: *key, object_checksum: None }).collect();
        assert!(client.end_batch(PutMode::Put, objects).await.unwrap().iter().all(Result::is_ok));
    }
}

/// Looks up random keys, with several calls in flight, as masters at the limit of their throughput have. Returns the number of keys.
async fn look_up(client: &ObjectClient, batch: usize, callers: u64) -> usize {
    join_all((0..callers).map(|caller| look_up_in_turn(client, batch, caller))).await.into_iter().sum()
}

async fn look_up_in_turn(client: &ObjectClient, batch: usize, seed: u64) -> usize {
    let started = Instant::now();
    let (mut found, mut random) = (0, fastrand::Rng::with_seed(seed));
    while started.elapsed() < DURATION {
        let keys: Vec<String> = (0..batch).map(|_| key(random.usize(..KEYS / BATCH * BATCH))).collect();
        let exist = client.exist(keys.iter().map(String::as_str).collect()).await.unwrap();
        assert!(exist.iter().all(|exist| *exist == Ok(true)));
        found += exist.len();
    }
    found
}

/// CPU time per key in nanoseconds: of the busiest master, and of the router.
async fn measure(shards: usize, direct: bool, batch: usize) -> (f64, f64) {
    let text = |number: usize| number.to_string();
    let masters: Vec<_> = (0..shards)
        .map(|index| ServerProcess::start(&["master".to_owned(), text(index), text(shards)]))
        .collect();
    let addresses: Vec<&str> = masters.iter().map(|master| &*master.address).collect();
    let router = ServerProcess::start(&["router".to_owned(), addresses.join(",")]);
    let supervisor = Supervisor::new();
    mount(&router.address).await;
    // A single master is called as without a router.
    let entry = if shards == 1 && direct { &masters[0].address } else { &router.address };
    let options = MasterClientOptions { connections: 1, ..MasterClientOptions::default() };
    let client = ObjectClient::new(MasterClient::new(entry, options, &supervisor), CLIENT, "default");
    fill(&client).await;
    let cpu = |servers: &[ServerProcess]| servers.iter().map(ServerProcess::cpu_ns).collect::<Vec<_>>();
    let callers = IN_FLIGHT * shards as u64;
    let (before, router_before) = (cpu(&masters), router.cpu_ns());
    let keys = if direct {
        look_up(&client, batch, callers).await
    } else {
        look_up_through(&router.address, batch, callers).await
    };
    let spent = cpu(&masters).into_iter().zip(before).map(|(after, before)| after - before).max().unwrap();
    let per_key = |ns: u64| ns as f64 / keys as f64;
    (per_key(spent), per_key(router.cpu_ns() - router_before))
}

/// As clients of Mooncake: each has a connection to the router.
async fn look_up_through(router: &str, batch: usize, callers: u64) -> usize {
    join_all((0..callers).map(|caller| look_up_as_client(router, batch, caller))).await.into_iter().sum()
}

async fn look_up_as_client(router: &str, batch: usize, seed: u64) -> usize {
    let mut connection = TestRpcConnection::connect(router).await;
    let started = Instant::now();
    let (mut found, mut random) = (0, fastrand::Rng::with_seed(seed));
    while started.elapsed() < DURATION {
        let keys: Vec<String> = (0..batch).map(|_| key(random.usize(..KEYS / BATCH * BATCH))).collect();
        let keys = keys.iter().map(String::as_str).collect();
        let arguments = mooncake_wire::rpc::KeysArguments { keys, tenant: "default" };
        let exist = connection.call::<mooncake_wire::rpc::BatchExistKey>(&arguments).await;
        assert!(exist.iter().all(|exist| *exist == Ok(true)));
        found += exist.len();
    }
    found
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[tokio::main(flavor = "multi_thread", worker_threads = 1)]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    if !arguments.is_empty() {
        return serve(&arguments).await;
    }
    let mut table = "| batch | masters | called | busiest master, ns per key of the store | router | throughput of the masters |\n|---|---|---|---|---|---|\n".to_owned();
    for batch in [1, 512] {
        let mut single = f64::NAN;
        for (shards, direct) in [(1, true), (4, true), (4, false)] {
            let (mut masters, mut routers) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                let (master, router) = measure(shards, direct, batch).await;
                masters.push(master);
                routers.push(router);
            }
            let (master, router) = (median(masters), median(routers));
            if shards == 1 {
                single = master;
            }
            let called = if direct { "directly" } else { "through the router" };
            writeln!(
                table,
                "| {batch} | {shards} | {called} | {master:.0} | {router:.0} | {:.2} |",
                single / master
            )
            .expect("writing to a string");
        }
    }
    println!("{table}");
}
