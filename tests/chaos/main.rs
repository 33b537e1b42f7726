//! Chaos among separate processes: gateway, engines, master and stores are killed, stopped, cut off, slowed down and run out of disk,
//! from a seed, under load. Every response is correct or a typed error, the gateway's counters agree with the clients' observations, and
//! afterwards everything works and nothing is left behind.
//!
//! `MOONGATE_CHAOS_SECONDS` and `MOONGATE_CHAOS_SEED` set length and seed; the seed that is printed gives the same schedule of faults.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]
#![expect(clippy::print_stdout, reason = "seed and counts belong to the test's output")]

mod fleet;
#[path = "../harness"]
mod harness {
    mod http_client;
    mod openai_error;
    pub(crate) mod polling;

    pub(crate) use http_client::client;
    pub(crate) use openai_error::openai_error;
}
mod load;
mod process;
mod proxy;
mod schedule;

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use moongate_runtime::Supervisor;
use tokio::time::Instant;

use fleet::ChaosFleet;
use harness::polling::poll_until;
use load::{ChaosOutcomes, ChaosStoreCounts, get, put, run_store_client};
use process::ProcessUsage;
use schedule::{ChaosFault, schedule};

const CLIENTS: u64 = 4;
const STORE_CLIENTS: u64 = 2;
/// Requests in a row that must succeed afterwards.
const RECOVERY_REQUESTS: u64 = 40;
/// What a process may have more at the end than after its first requests, besides half of it: caches and allocators fill.
const MEMORY_BAND: u64 = 64 << 20;
const DESCRIPTOR_BAND: u64 = 64;

fn setting<T: FromStr>(name: &str, otherwise: T) -> T {
    let text = std::env::var(name).ok();
    text.map_or(otherwise, |text| text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text:?}")))
}

/// Injects the faults of the schedule at their times.
async fn inject(fleet: &mut ChaosFleet, seed: u64, run: Duration) {
    let mut steps: Vec<(Duration, bool, ChaosFault)> = Vec::new();
    for fault in schedule(seed, run) {
        steps.push((fault.at, true, fault.fault));
        steps.push((fault.at + fault.lasts, false, fault.fault));
    }
    steps.sort_by_key(|(at, ..)| *at);
    let begun = Instant::now();
    for (at, begins, fault) in steps {
        tokio::time::sleep_until(begun + at).await;
        fleet.set(fault, begins);
        if begins {
            println!("{:.1} s: {fault:?}", at.as_secs_f64());
        }
    }
    tokio::time::sleep_until(begun + run).await;
}

fn assert_in_band(name: &str, before: ProcessUsage, after: ProcessUsage) {
    println!("{name}: {before:?} before, {after:?} after");
    assert!(after.memory <= before.memory * 3 / 2 + MEMORY_BAND, "{name}: {before:?}, {after:?}");
    assert!(after.descriptors <= before.descriptors + DESCRIPTOR_BAND, "{name}: {before:?}, {after:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_is_right_or_said_to_be_wrong() {
    let run = Duration::from_secs(setting("MOONGATE_CHAOS_SECONDS", 20));
    let seed = setting("MOONGATE_CHAOS_SEED", fastrand::u64(..));
    println!("MOONGATE_CHAOS_SEED={seed} MOONGATE_CHAOS_SECONDS={}", run.as_secs());
    let (folder, supervisor) = (tempfile::tempdir().unwrap(), Supervisor::new());
    let mut fleet = ChaosFleet::start(folder.path(), &supervisor).await;
    let store = fleet.client(&supervisor);
    fleet.wait_until_healthy().await;
    poll_until("the store takes objects", async || put(&store, 0, 1).await.is_ok()).await;

    let (outcomes, counts) = (Arc::new(ChaosOutcomes::default()), Arc::new(ChaosStoreCounts::default()));
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    for number in 0..RECOVERY_REQUESTS {
        outcomes.send(&http, &fleet.url, number, number % 3 != 0).await;
    }
    let before = fleet.usages();

    let (end, load) = (Arc::new(AtomicBool::new(false)), Supervisor::new());
    for number in 0..CLIENTS {
        let (outcomes, http, url, end) = (outcomes.clone(), http.clone(), fleet.url.clone(), end.clone());
        load.spawn("client", async move {
            let mut random = fastrand::Rng::with_seed(seed ^ number);
            while !end.load(Ordering::Relaxed) {
                outcomes.send_or_abandon(&http, &url, random.u64(..)).await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
    }
    for number in 0..STORE_CLIENTS {
        let client = fleet.client(&supervisor);
        load.spawn("store client", run_store_client(client, seed ^ number, counts.clone(), end.clone()));
    }
    inject(&mut fleet, seed, run).await;
    end.store(true, Ordering::Relaxed);
    poll_until("clients end", async || load.running_tasks() == 0).await;
    assert_eq!(load.panics(), 0, "a client found something wrong");
    assert_eq!(fleet.ended(), Vec::<String>::new(), "programs that have ended by themselves");

    assert_works_again(&fleet, &outcomes, &http, &store).await;
    assert_sums_agree(&fleet, &outcomes).await;
    println!("gateway: {:?}, {} left; store: {counts:?}", outcomes.codes(), outcomes.abandoned());
    fleet
        .usages()
        .iter()
        .zip(&before)
        .for_each(|((name, after), (_, before))| assert_in_band(name, *before, *after));
    assert!(counts.got.load(Ordering::Relaxed) > 0 && counts.put.load(Ordering::Relaxed) > 0, "{counts:?}");
    supervisor.token().cancel();
}

/// After some time, requests and objects succeed again, one after the other.
async fn assert_works_again(
    fleet: &ChaosFleet,
    outcomes: &ChaosOutcomes,
    http: &reqwest::Client,
    store: &moongate_store_client::KvClient,
) {
    fleet.wait_until_healthy().await;
    let mut in_a_row = 0;
    poll_until("requests succeed again", async || {
        let before = outcomes.of("ok");
        outcomes.send(http, &fleet.url, in_a_row, true).await;
        in_a_row = if outcomes.of("ok") > before { in_a_row + 1 } else { 0 };
        in_a_row >= RECOVERY_REQUESTS
    })
    .await;
    poll_until("the store takes objects again", async || {
        let mut all = true;
        for key in 0..10 {
            all &= put(store, key, 1).await.is_ok() && get(store, key).await.is_ok();
        }
        all
    })
    .await;
}

/// The gateway has counted what clients saw, and holds nothing any more.
async fn assert_sums_agree(fleet: &ChaosFleet, outcomes: &ChaosOutcomes) {
    poll_until("no request is in flight", async || {
        fleet.metric("moongate_requests_in_flight", "").await == 0
            && fleet.metric("moongate_engine_requests_in_flight", "").await == 0
            && fleet.metric("moongate_requests_queued", "").await == 0
    })
    .await;
    for url in &fleet.engine_urls {
        poll_until("no request runs on an engine", async || {
            let stats = fleet.get(&format!("{url}/_sim/stats")).await.unwrap_or_default();
            let stats: serde_json::Value = serde_json::from_str(&stats).unwrap_or_default();
            stats["active"] == 0
        })
        .await;
    }
    let (codes, left) = (outcomes.codes(), outcomes.abandoned());
    let ended = fleet.metric("moongate_requests_total", "").await;
    // A client may disconnect before its request has arrived.
    let seen: u64 = codes.values().sum();
    assert!(
        ended >= seen && ended <= seen + left,
        "{ended} requests ended, clients saw {codes:?}, {left} left"
    );
    for (code, seen) in codes {
        let counted = fleet.metric("moongate_requests_total", &format!("code=\"{code}\"")).await;
        assert!(
            counted >= seen && counted <= seen + left,
            "{code}: {counted} counted, {seen} seen, {left} left"
        );
    }
}
