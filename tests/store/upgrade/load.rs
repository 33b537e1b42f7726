//! Clients that send the same prompts repeatedly, while store nodes are replaced.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use moongate_loadtest::engine::{SharedL3Store, SimEngine, SimEngineOptions, SimProtocol, SimRole, SimStats};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::nodes::{NODES, StoreImplementation, UpgradeStore};
use crate::harness::fleet::TestEngines;
use crate::harness::gateway::TestGateway;
use crate::harness::store_prompts::{BLOCK_TOKENS, prompt};
use crate::harness::{client, wait_until};

/// Pages of a prompt that can come from a cache.
const PAGES: u32 = 6;
/// Number of requests that are open at the same time.
const CLIENTS: u32 = 4;
/// The load of a test may be slow on a busy machine.
const LIMIT: Duration = Duration::from_secs(180);

/// The load, and the times of the replacements: the number of responses before the first, after each, and after the last.
#[derive(Clone, Copy)]
pub(crate) struct UpgradeLoadPlan {
    pub(crate) prompts: u32,
    /// How long a client waits before its next request.
    pub(crate) pause: Duration,
    pub(crate) before: usize,
    pub(crate) after_each: usize,
    pub(crate) after_all: usize,
}

/// The cache hit of one request.
#[derive(Clone, Copy)]
pub(crate) struct CacheHitSample {
    pub(crate) at: Instant,
    /// Cached pages, as a share of the pages that can come from a cache.
    pub(crate) cached_share: f64,
}

/// The result of a run with one implementation of the store.
pub(crate) struct UpgradeLoadReport {
    pub(crate) samples: Vec<CacheHitSample>,
    /// When each node began to be replaced.
    pub(crate) replaced: Vec<Instant>,
    /// When the time after the replacements began.
    ended: Instant,
    pub(crate) correct: u64,
    pub(crate) corrupt: u64,
    pub(crate) failures: u64,
}

impl UpgradeLoadReport {
    fn cached_share(&self, when: Range<Instant>) -> f64 {
        let within = self.samples.iter().filter(|sample| when.contains(&sample.at));
        let (count, sum) =
            within.fold((0_u32, 0.0), |(count, sum), sample| (count + 1, sum + sample.cached_share));
        sum / f64::from(count.max(1))
    }

    /// The share of pages that was found before, while nodes were replaced, and after.
    pub(crate) fn shares(&self) -> [f64; 3] {
        let (begun, replaced, end) = (self.samples[0].at, self.replaced[0], Instant::now());
        [begun..replaced, replaced..self.ended, self.ended..end].map(|when| self.cached_share(when))
    }

    /// One line with the result, for the output of the test.
    pub(crate) fn line(&self) -> String {
        let [before, during, after] = self.shares();
        let Self { correct: right, corrupt: wrong, failures, .. } = self;
        format!(
            "found {before:.4} before, {during:.4} in {:.1?} of replacements, {after:.4} after; \
             {right} objects right, {wrong} wrong, {failures} could not be got",
            self.ended - self.replaced[0]
        )
    }
}

/// Engines that hardly remember anything themselves.
async fn engines(store: &UpgradeStore) -> TestEngines {
    let fleet = SharedL3Store::with_mooncake(store.client());
    let mut workers = Vec::new();
    for _ in 0..2 {
        let mut config = SimEngineOptions::new(SimRole::Plain, SimProtocol::Sglang).fast();
        config.use_storage = true;
        config.device_tokens = (PAGES * BLOCK_TOKENS) as usize;
        workers.push(SimEngine::start_with_store(config, &fleet).await.unwrap());
    }
    TestEngines { prefills: Vec::new(), decodes: Vec::new(), workers }
}

struct UpgradeLoad {
    url: String,
    plan: UpgradeLoadPlan,
    next: AtomicUsize,
    stop: AtomicBool,
    samples: Mutex<Vec<CacheHitSample>>,
}

impl UpgradeLoad {
    async fn send(&self, client: &reqwest::Client, number: u32) {
        let body = json!({"model": "sim", "prompt": prompt(number, PAGES), "max_tokens": 1});
        let response = client.post(&self.url).json(&body).send().await.unwrap();
        let status = response.status();
        let answer: Value = response.json().await.unwrap();
        assert_eq!(status, 200, "{answer}");
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_f64();
        let found = cached.unwrap_or_else(|| panic!("{answer}")) / f64::from(PAGES * BLOCK_TOKENS);
        self.samples.lock().push(CacheHitSample { at: Instant::now(), cached_share: found });
    }

    /// Sends requests until `stop` is set.
    async fn run(&self) {
        let client = client();
        while !self.stop.load(Ordering::Relaxed) {
            let number = self.next.fetch_add(1, Ordering::Relaxed) as u32 % self.plan.prompts;
            self.send(&client, number).await;
            tokio::time::sleep(self.plan.pause).await;
        }
    }

    /// Waits for `count` more responses.
    async fn wait_for_responses(&self, count: usize) {
        let wanted = self.samples.lock().len() + count;
        let waited = async {
            while self.samples.lock().len() < wanted {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        assert!(tokio::time::timeout(LIMIT, waited).await.is_ok(), "requests are not answered");
    }
}

/// Puts a store under load and replaces each of its nodes' processes, which ends by this signal. No request may fail.
pub(crate) async fn replace_nodes(
    whose: StoreImplementation,
    signal: &str,
    plan: UpgradeLoadPlan,
) -> UpgradeLoadReport {
    let mut store = UpgradeStore::start(whose).await;
    let engines = engines(&store).await;
    let mut flags = engines.flags();
    flags.push(format!("--mooncake-admin={}", store.admin()));
    let gateway = TestGateway::start_ready(&flags).await;
    let load = UpgradeLoad {
        url: gateway.url("/v1/completions"),
        plan,
        next: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        samples: Mutex::default(),
    };
    let client = client();
    for number in 0..plan.prompts {
        load.send(&client, number).await;
    }
    let all_put = u64::from(plan.prompts * PAGES * 2);
    let sum = |count: fn(&SimStats) -> u64| engines.all().map(|engine| count(&engine.stats())).sum::<u64>();
    wait_until("all pages are stored", || sum(|stats| stats.store_puts) >= all_put).await;
    load.samples.lock().clear();

    let upgrade = async {
        load.wait_for_responses(plan.before).await;
        let mut replaced = Vec::new();
        for node in &mut store.nodes {
            replaced.push(Instant::now());
            node.replace(signal).await;
            load.wait_for_responses(plan.after_each).await;
        }
        let ended = Instant::now();
        load.wait_for_responses(plan.after_all).await;
        load.stop.store(true, Ordering::Relaxed);
        (replaced, ended)
    };
    let clients = join_all((0..CLIENTS).map(|_| load.run()));
    let ((replaced, ended), _) = tokio::join!(upgrade, clients);
    assert_eq!(replaced.len(), NODES);
    UpgradeLoadReport {
        samples: load.samples.into_inner(),
        replaced,
        ended,
        correct: sum(|stats| stats.store_hits),
        corrupt: sum(|stats| stats.store_corrupt),
        failures: sum(|stats| stats.store_failures),
    }
}
