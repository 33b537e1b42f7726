//! Store nodes are replaced one after another under load: requests go on, and pages are found as before.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]
#![expect(clippy::print_stdout, reason = "the numbers are the point of a run by hand")]

mod world;

use std::ffi::OsString;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use moongate_kvclient::{Client, Options};
use moongate_loadtest::engine::{Face, Role, SimConfig, SimEngine, SimFleet};
use moongate_master::RunningMaster;
use moongate_master::flags::{self, Asked};
use moongate_runtime::Supervisor;
use parking_lot::Mutex;
use serde_json::{Value, json};

use world::binary::Binary;
use world::fleet::Engines;
use world::gateway::Gateway;
use world::stored::{PAGE, prompt};
use world::{client, until};

/// Prompts that are asked again and again, and the pages of each that can come from a cache.
const PROMPTS: u32 = 48;
const PAGES: u32 = 6;
/// Requests at a time.
const CLIENTS: u32 = 4;
/// Requests of each phase.
const REQUESTS: usize = 200;
const NODES: usize = 3;
/// The load of a test may be slow on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// One answered request.
#[derive(Clone, Copy)]
struct Sample {
    at: Instant,
    /// Share of the pages that could come from a cache which did.
    found: f64,
}

/// A store node whose memory a holder keeps.
struct Node {
    _holder: Binary,
    arguments: Vec<String>,
    running: Option<Binary>,
}

impl Node {
    async fn start(folder: &Path, number: usize, master: &str) -> Self {
        let socket = folder.join(format!("holder-{number}"));
        let holder = Binary::start(&["store-holder", "--socket", socket.to_str().unwrap()]);
        until("the holder is there", || socket.exists()).await;
        let memory = format!("--memory=holder:{}", socket.display());
        let master = format!("-Dmaster_server_address={master}");
        let fixed = ["store", "--port=0", "-Dlocal_hostname=127.0.0.1", "-Dglobal_segment_size=16mb"];
        let arguments = fixed.map(str::to_owned).into_iter().chain([memory, master]).collect();
        let mut node = Self { _holder: holder, arguments, running: None };
        node.run().await;
        node
    }

    async fn run(&mut self) {
        let mut binary = Binary::start(&self.arguments.iter().map(String::as_str).collect::<Vec<_>>());
        binary.line_with("this node lends memory").await;
        self.running = Some(binary);
    }

    /// Ends its process and starts another one.
    async fn replace(&mut self, signal: &str) {
        let old = self.running.take().unwrap();
        old.signal(signal).await;
        let ended = old.ended().await;
        assert!(signal == "KILL" || ended.status.success(), "{ended:?}");
        self.run().await;
    }
}

/// Three nodes with their master.
struct Store {
    master: RunningMaster,
    nodes: Vec<Node>,
    supervisor: Supervisor,
    _folder: tempfile::TempDir,
}

impl Store {
    async fn start() -> Self {
        let supervisor = Supervisor::new();
        let line =
            ["--rpc_address=127.0.0.1", "--rpc_port=0", "--metrics_host=127.0.0.1", "--metrics_port=0"];
        let Asked::Serve(options) = flags::read(line.map(OsString::from), |_| None).unwrap() else {
            panic!("the master is asked to serve")
        };
        let master = moongate_master::start(*options, &supervisor).await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let rpc = master.rpc_address().to_string();
        let mut nodes = Vec::new();
        for number in 0..NODES {
            nodes.push(Node::start(folder.path(), number, &rpc).await);
        }
        Self { master, nodes, supervisor, _folder: folder }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.supervisor.token().cancel();
    }
}

/// Engines that hardly remember anything themselves.
async fn engines(store: &Store) -> Engines {
    let rpc = store.master.rpc_address().to_string();
    let client = Client::new(&rpc, Options::default(), &store.supervisor).unwrap();
    let fleet = SimFleet::on(client);
    let mut workers = Vec::new();
    for _ in 0..2 {
        let mut config = SimConfig::new(Role::Plain, Face::Sglang).fast();
        config.use_storage = true;
        config.device_tokens = (PAGES * PAGE) as usize;
        workers.push(SimEngine::start_in(config, &fleet).await.unwrap());
    }
    Engines { prefills: Vec::new(), decodes: Vec::new(), workers }
}

/// Clients that ask until they are told to stop.
struct Load {
    url: String,
    next: AtomicUsize,
    stop: AtomicBool,
    samples: Mutex<Vec<Sample>>,
}

impl Load {
    async fn ask(&self, client: &reqwest::Client, number: u32) {
        let body = json!({"model": "sim", "prompt": prompt(number, PAGES), "max_tokens": 1});
        let response = client.post(&self.url).json(&body).send().await.unwrap();
        let status = response.status();
        let answer: Value = response.json().await.unwrap();
        assert_eq!(status, 200, "{answer}");
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_f64();
        let found = cached.unwrap_or_else(|| panic!("{answer}")) / f64::from(PAGES * PAGE);
        self.samples.lock().push(Sample { at: Instant::now(), found });
    }

    async fn run(&self) {
        let client = client();
        while !self.stop.load(Ordering::Relaxed) {
            let number = self.next.fetch_add(1, Ordering::Relaxed) as u32 % PROMPTS;
            self.ask(&client, number).await;
        }
    }

    /// Waits for so many more answers.
    async fn more(&self, count: usize) {
        let wanted = self.samples.lock().len() + count;
        let waited = async {
            while self.samples.lock().len() < wanted {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        assert!(tokio::time::timeout(LIMIT, waited).await.is_ok(), "requests are not answered");
    }

    /// The share of pages that was found from one time to another.
    fn found(&self, from: Instant, to: Instant) -> f64 {
        let samples = self.samples.lock();
        let within = samples.iter().filter(|sample| (from..to).contains(&sample.at));
        let (count, sum) = within.fold((0_u32, 0.0), |(count, sum), sample| (count + 1, sum + sample.found));
        sum / f64::from(count.max(1))
    }
}

async fn nodes_are_replaced(signal: &str) {
    let mut store = Store::start().await;
    let engines = engines(&store).await;
    let mut flags = engines.flags();
    flags.push(format!("--mooncake-admin={}", store.master.faces().admin));
    let gateway = Gateway::start_ready(&flags).await;
    let load = Load {
        url: gateway.url("/v1/completions"),
        next: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        samples: Mutex::default(),
    };
    let client = client();
    for number in 0..PROMPTS {
        load.ask(&client, number).await;
    }
    let all_put = u64::from(PROMPTS * PAGES * 2);
    let puts = || engines.all().map(|engine| engine.stats().store_puts).sum::<u64>();
    until("all pages are stored", || puts() >= all_put).await;

    let upgrade = async {
        let begun = Instant::now();
        load.more(REQUESTS).await;
        let replaced = Instant::now();
        for node in &mut store.nodes {
            node.replace(signal).await;
            load.more(REQUESTS / NODES).await;
        }
        let ended = Instant::now();
        load.more(REQUESTS).await;
        load.stop.store(true, Ordering::Relaxed);
        (begun, replaced, ended)
    };
    // A request that fails panics.
    let clients = join_all((0..CLIENTS).map(|_| load.run()));
    let ((begun, replaced, ended), _) = tokio::join!(upgrade, clients);

    let (before, during, after) =
        (load.found(begun, replaced), load.found(replaced, ended), load.found(ended, Instant::now()));
    let sum = |count: fn(&moongate_loadtest::engine::SimStats) -> u64| -> u64 {
        engines.all().map(|engine| count(&engine.stats())).sum()
    };
    let (wrong, failures, hits) =
        (sum(|stats| stats.store_wrong), sum(|stats| stats.store_failures), sum(|stats| stats.store_hits));
    println!(
        "{signal}: found {before:.4} before, {during:.4} in {:?} of replacements, {after:.4} after; \
         {hits} objects right, {wrong} wrong, {failures} could not be got",
        ended - replaced
    );
    assert_eq!(wrong, 0, "bytes that nobody has put there");
    assert!(before > 0.9, "{before} of the pages come from the store");
    assert!(during >= 0.99 * before, "{during} while nodes were replaced, {before} before");
    assert!(after >= 0.99 * before, "{after} after nodes were replaced, {before} before");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_loses_nothing() {
    nodes_are_replaced("TERM").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_nodes_lose_nothing() {
    nodes_are_replaced("KILL").await;
}
