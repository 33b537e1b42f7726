//! Reading a store with millions of keys: how long it takes, and what it costs the gateway and the master. It takes minutes and gigabytes,
//! so it is ignored by default; see CONTRIBUTING.md.
#![expect(clippy::print_stdout, reason = "a measurement reports its numbers")]

use std::time::{Duration, Instant};

use moongate_loadtest::engine::SimEngineOptions;
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST_WITHOUT_CUDA, RealMaster, RealNode};

use crate::harness;
use crate::harness::fleet::{TestEngines, TestFleetBuilder};
use crate::harness::metrics::metric_at;
use crate::harness::process::MoongateProcess;
use crate::harness::store_prompts::{BLOCK_TOKENS, objects, predicted_store_tokens_at, prompt};

/// Pages of a prompt, of two objects each.
pub(crate) const PAGES: u32 = 100;
/// Keys on one node: a segment of 0.3.13 holds at most 1,048,574 objects of any size.
const KEYS_PER_NODE: usize = 1_000_000;
/// Number of prompts whose hits are predicted.
const PREDICTED_PROMPTS: usize = 20;

/// CPU time of a process.
pub(crate) fn cpu(id: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let ticks = fields.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap());
    Duration::from_millis(ticks.sum::<u64>() * 10)
}

/// Resident memory of a process, in MB.
pub(crate) fn rss(id: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim_end_matches("kB").trim().parse::<u64>().unwrap() * 1024 / 1_000_000
}

/// Load of the machine: runnable processes, averaged over one and fifteen minutes.
pub(crate) fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap();
    let averages: Vec<&str> = text.split_whitespace().collect();
    format!("machine's load {} to {}", averages[0], averages[2])
}

/// A number from the environment.
pub(crate) fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Fills the store; returns the nodes, which must be kept running.
async fn fill(master: &RealMaster, prompts: usize) -> Vec<RealNode> {
    let started = Instant::now();
    let all: Vec<u32> = (0..u32::try_from(prompts).unwrap()).collect();
    let mut nodes = Vec::new();
    for part in all.chunks(KEYS_PER_NODE / (2 * PAGES as usize)) {
        let mut node = RealNode::start(master, HANDSHAKE, 64).await;
        for number in part {
            assert_eq!(node.fill(&objects(&prompt(*number, PAGES)).concat(), 1).await, 0);
        }
        nodes.push(node);
    }
    let keys = prompts * 2 * PAGES as usize;
    println!(
        "filled {keys} keys on {} nodes in {:.0?}; master {} MB, {:.1?} of CPU; {}",
        nodes.len(),
        started.elapsed(),
        rss(master.id()),
        cpu(master.id()),
        load(),
    );
    nodes
}

/// A gateway that reads the store once. `master`: the process and the admin address of the store's master.
pub(crate) async fn read(
    (master, master_admin): (u32, &str),
    engines: &TestEngines,
    index_pages: usize,
) -> (MoongateProcess, String) {
    let mut flags = engines.flags();
    flags.extend(["--health-interval=0s".to_owned(), format!("--mooncake-admin={master_admin}")]);
    flags.push(format!("--index-blocks={index_pages}"));
    let (started, used) = (Instant::now(), cpu(master));
    let (gateway, addresses) = MoongateProcess::gateway(&flags).await;
    let (admin, client) = (format!("http://{}", addresses.admin), harness::client());
    let before = rss(gateway.id());
    let (mut largest, mut masters) = (before, rss(master));
    while metric_at(&client, &admin, "moongate_store_scans_total").await == 0 {
        largest = largest.max(rss(gateway.id()));
        masters = masters.max(rss(master));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    println!(
        "index of {index_pages} pages: read in {:.1?}; {} pages; gateway {before} MB before, {largest} at most, {} after, {:.1?} of CPU; \
         master {masters} MB at most, {:.1?} of CPU; {}",
        started.elapsed(),
        metric_at(&client, &admin, "moongate_index_blocks").await,
        rss(gateway.id()),
        cpu(gateway.id()),
        cpu(master) - used,
        load(),
    );
    (gateway, admin)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes and gigabytes"]
async fn a_large_store_is_read_in_bounded_memory() {
    let prompts = setting("MOONGATE_STORE_KEYS", 1_000_000) / (2 * PAGES as usize);
    let bound = setting("MOONGATE_STORE_INDEX_PAGES", 100_000);
    let pages = prompts * PAGES as usize;
    assert!(bound < pages, "the second index is to be too small");
    let mut master = RealMaster::start(NEWEST_WITHOUT_CUDA).await;
    let _nodes = fill(&master, prompts).await;
    let fleet = TestFleetBuilder::sglang()
        .plain(1)
        .tune(|config| SimEngineOptions { use_storage: true, ..config.fast() });
    let engines = fleet.engines().await;
    let model = engines.workers[0].options().model.clone();
    let client = harness::client();

    let (small, admin) = read((master.id(), &master.admin), &engines, bound).await;
    assert!(metric_at(&client, &admin, "moongate_index_blocks").await <= bound as u64);
    drop(small);
    let (_large, admin) = read((master.id(), &master.admin), &engines, pages).await;
    assert_eq!(metric_at(&client, &admin, "moongate_index_blocks").await, pages as u64);
    // Without the master, the index contains only the keys read before.
    master.kill().await;
    for at in 0..PREDICTED_PROMPTS {
        let asked = prompt(u32::try_from(at * prompts / PREDICTED_PROMPTS).unwrap(), PAGES);
        assert_eq!(
            predicted_store_tokens_at(&client, &admin, &model, &asked).await,
            u64::from(PAGES * BLOCK_TOKENS)
        );
    }
}
