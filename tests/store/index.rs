//! The gateway's index matches a real Mooncake store, with real masters and store nodes and their failures.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::harness;
use crate::harness::fleet::TestFleet;
use crate::harness::gateway::TestGateway;
use crate::harness::metrics::metric;
use crate::harness::store_prompts::{
    BLOCK_TOKENS, SMALL_OBJECT_BYTES, STORE_THRESHOLD_TOKENS, objects, predicted_engine,
    predicted_store_tokens, prompt, wait_for_drop_to, wait_for_growth_to, wait_for_metric,
};
use moongate_store_testkit::LIMIT;
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST_WITHOUT_CUDA, RealMaster, RealNode};

/// All keys that the master lists.
async fn listed(master: &RealMaster) -> BTreeSet<String> {
    let (mut all, mut keys) = (BTreeSet::new(), master.admin().keys().await.unwrap());
    while let Some(page) = keys.next().await.unwrap() {
        all.extend(page.iter().map(str::to_owned));
    }
    all
}

/// The tokens that an engine would load of a prompt, if these objects can be read.
fn loadable(prompt: &[u32], readable: &BTreeSet<String>) -> u64 {
    let pages = objects(prompt);
    let run = pages.iter().take_while(|page| page.iter().all(|key| readable.contains(key)));
    let tokens = run.count() as u64 * u64::from(BLOCK_TOKENS);
    if tokens < STORE_THRESHOLD_TOKENS { 0 } else { tokens }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_count_when_all_their_objects_exist() {
    let master = RealMaster::start(NEWEST_WITHOUT_CUDA).await;
    let mut node = RealNode::start(&master, HANDSHAKE, 32).await;
    let world = harness::store_prompts::start_fleet_with_store(&master.admin, &[]).await;
    let prompt = prompt(1, 10);
    let mut pages = objects(&prompt);
    let [_, late] = pages[6].clone();
    wait_for_growth_to(&world, &prompt, 0).await;
    let first: Vec<String> = pages.drain(..3).flatten().collect();
    assert_eq!(node.fill(&first, SMALL_OBJECT_BYTES).await, 0);
    let rest: Vec<String> = pages.into_iter().flatten().filter(|key| *key != late).collect();
    // Three pages are below the engine's prefetch threshold.
    wait_for_metric(&world, "moongate_store_objects", |objects| objects == 6).await;
    assert_eq!(predicted_store_tokens(&world, &prompt).await, 0);
    assert_eq!(node.fill(&rest, SMALL_OBJECT_BYTES).await, 0);
    wait_for_growth_to(&world, &prompt, 6).await;
    node.put(&late, SMALL_OBJECT_BYTES).await;
    wait_for_growth_to(&world, &prompt, 10).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_from_the_same_host_counts_as_near() {
    let master = RealMaster::start(NEWEST_WITHOUT_CUDA).await;
    let mut node = RealNode::start(&master, HANDSHAKE, 32).await;
    let prompt = prompt(1, 10);
    assert_eq!(node.fill(&objects(&prompt).concat(), SMALL_OBJECT_BYTES).await, 0);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hosts.toml");
    for (names, farness) in [("127.0.0.1", 0.5), ("10.0.0.1", 1.0)] {
        std::fs::write(&file, format!("[[host]]\nnames = [\"{names}\"]\nplace = {{ node = \"n1\" }}\n"))
            .unwrap();
        let flag = format!("--instances-file={}", file.display());
        let world = harness::store_prompts::start_fleet_with_store(&master.admin, &[&flag]).await;
        wait_for_growth_to(&world, &prompt, 10).await;
        assert_eq!(predicted_engine(&world, &prompt).await["l3_network_distance"], farness, "{names}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_page_ends_the_run() {
    let master = RealMaster::start(NEWEST_WITHOUT_CUDA).await;
    let mut node = RealNode::start(&master, HANDSHAKE, 32).await;
    let world = harness::store_prompts::start_fleet_with_store(&master.admin, &[]).await;
    let prompt = prompt(1, 10);
    let pages = objects(&prompt);
    assert_eq!(node.fill(&pages.concat(), SMALL_OBJECT_BYTES).await, 0);
    wait_for_growth_to(&world, &prompt, 10).await;
    node.remove(&pages[7][1]).await;
    wait_for_drop_to(&world, &prompt, 7).await;
    node.remove(&pages[5][0]).await;
    wait_for_drop_to(&world, &prompt, 5).await;
    node.put(&pages[5][0], SMALL_OBJECT_BYTES).await;
    wait_for_growth_to(&world, &prompt, 7).await;
    node.put(&pages[7][1], SMALL_OBJECT_BYTES).await;
    wait_for_growth_to(&world, &prompt, 10).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn evicted_pages_do_not_count() {
    const PROMPTS: u32 = 80;
    const USED: u32 = 30;
    let size = 64 << 10;
    let master = RealMaster::start(NEWEST_WITHOUT_CUDA).await;
    // Capacity for 1,024 objects; the prompts have 1,280.
    let mut node = RealNode::start(&master, HANDSHAKE, 64).await;
    let world = harness::store_prompts::start_fleet_with_store(&master.admin, &[]).await;
    let prompts: Vec<Vec<u32>> = (0..PROMPTS).map(|number| prompt(number, 8)).collect();
    for (number, prompt) in (0..).zip(&prompts) {
        let keys = objects(prompt).concat();
        // A full store sometimes rejects puts, because it evicts more slowly than this loop writes.
        node.fill(&keys, size).await;
        if number < USED {
            for key in &keys {
                // Objects that were read have a lease for some seconds.
                assert_eq!(node.get(key).await, size);
            }
        }
    }
    let started = Instant::now();
    loop {
        let readable = listed(&master).await;
        let expected: BTreeMap<u32, u64> =
            (0..).zip(&prompts).map(|(number, prompt)| (number, loadable(prompt, &readable))).collect();
        let mut predicted = BTreeMap::new();
        for (number, prompt) in (0..).zip(&prompts) {
            predicted.insert(number, predicted_store_tokens(&world, prompt).await);
        }
        if predicted == expected && listed(&master).await == readable {
            assert!(
                expected.values().any(|&tokens| tokens == 512),
                "some prompts are complete: {expected:?}"
            );
            assert!(expected.values().any(|&tokens| tokens < 512), "some are not: {expected:?}");
            assert!(readable.len() < 1_024, "{} objects", readable.len());
            return;
        }
        assert!(started.elapsed() < LIMIT, "predicted {predicted:?}, expected {expected:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_a_killed_node_stop_counting_within_a_second() {
    let master = RealMaster::start(NEWEST_WITHOUT_CUDA).await;
    let mut doomed = RealNode::start(&master, HANDSHAKE, 32).await;
    let mut other = RealNode::start(&master, HANDSHAKE, 32).await;
    let world = harness::store_prompts::start_fleet_with_store(&master.admin, &[]).await;
    let prompts = [1, 2, 3, 4].map(|number| prompt(number, 10));
    let [lost, kept, both, copied] = [0, 1, 2, 3].map(|at: usize| objects(&prompts[at]));
    assert_eq!(doomed.fill_copies(&copied.concat(), SMALL_OBJECT_BYTES, 2).await, 0);
    assert_eq!(doomed.fill(&lost.concat(), SMALL_OBJECT_BYTES).await, 0);
    assert_eq!(other.fill(&kept.concat(), SMALL_OBJECT_BYTES).await, 0);
    // One value of a page in the middle is on the node that is killed.
    let (odd, even): (Vec<String>, Vec<String>) =
        both.concat().into_iter().partition(|key| *key == both[5][1]);
    assert_eq!(doomed.fill(&odd, SMALL_OBJECT_BYTES).await + other.fill(&even, SMALL_OBJECT_BYTES).await, 0);
    for prompt in &prompts {
        wait_for_growth_to(&world, prompt, 10).await;
    }
    let before = listed(&master).await;
    let killed = Instant::now();
    doomed.kill().await;
    wait_for_drop_to(&world, &prompts[0], 0).await;
    let noticed = killed.elapsed();
    wait_for_drop_to(&world, &prompts[2], 5).await;
    wait_for_growth_to(&world, &prompts[3], 10).await;
    let all = killed.elapsed();
    println!("noticed after {noticed:?}, and what was on both nodes after {all:?}");
    assert_eq!(predicted_store_tokens(&world, &prompts[1]).await, 640, "the other node's pages");
    assert_eq!(listed(&master).await, before, "the master still lists them");
    assert!(all < Duration::from_secs(1), "{noticed:?}, {all:?}");
    // Pages of a new node count.
    let mut third = RealNode::start(&master, HANDSHAKE, 32).await;
    let new = prompt(5, 10);
    assert_eq!(third.fill(&objects(&new).concat(), SMALL_OBJECT_BYTES).await, 0);
    wait_for_growth_to(&world, &new, 10).await;
    assert_eq!(predicted_store_tokens(&world, &prompts[0]).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_master_has_no_keys() {
    let mut master = RealMaster::start(NEWEST_WITHOUT_CUDA).await;
    let mut node = RealNode::start(&master, HANDSHAKE, 32).await;
    let world = harness::store_prompts::start_fleet_with_store(&master.admin, &[]).await;
    let prompt = prompt(1, 10);
    let keys = objects(&prompt).concat();
    assert_eq!(node.fill(&keys, SMALL_OBJECT_BYTES).await, 0);
    wait_for_growth_to(&world, &prompt, 10).await;
    master.kill().await;
    let master = master.start_again().await;
    let back = async {
        while master.admin().segments().await.unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LIMIT, back).await.expect("the node comes back");
    wait_for_drop_to(&world, &prompt, 0).await;
    let again = async { while node.fill(&keys, SMALL_OBJECT_BYTES).await != 0 {} };
    tokio::time::timeout(LIMIT, again).await.expect("the store takes objects again");
    wait_for_growth_to(&world, &prompt, 10).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_starts_later_reads_what_is_there() {
    let master = RealMaster::start(NEWEST_WITHOUT_CUDA).await;
    let mut node = RealNode::start(&master, HANDSHAKE, 32).await;
    let first = harness::store_prompts::start_fleet_with_store(&master.admin, &[]).await;
    let prompts: Vec<Vec<u32>> = (0..50).map(|number| prompt(number, number % 20 + 1)).collect();
    let keys: Vec<String> = prompts.iter().flat_map(|prompt| objects(prompt).concat()).collect();
    assert_eq!(node.fill(&keys, SMALL_OBJECT_BYTES).await, 0);
    for (number, prompt) in (0..).zip(&prompts) {
        let pages = number % 20 + 1;
        wait_for_growth_to(&first, prompt, if pages < 4 { 0 } else { pages }).await;
    }
    let mut flags = first.engines.flags();
    flags.push(format!("--mooncake-admin={}", master.admin));
    let gateway = TestGateway::start_ready(&flags).await;
    let TestFleet { engines, .. } = first;
    let second = TestFleet { engines, gateway, client: harness::client() };
    // No request has reached it yet.
    wait_for_metric(&second, "moongate_index_blocks", |pages| pages == keys.len() as u64 / 2).await;
    for (number, prompt) in (0..).zip(&prompts) {
        let pages = number % 20 + 1;
        wait_for_growth_to(&second, prompt, if pages < 4 { 0 } else { pages }).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn store_larger_than_the_index_keeps_requested_blocks() {
    const BOUND: u64 = 1_000;
    let master = RealMaster::start(NEWEST_WITHOUT_CUDA).await;
    let mut node = RealNode::start(&master, HANDSHAKE, 64).await;
    let cold: Vec<String> = (0..500).flat_map(|number| objects(&prompt(number, 10)).concat()).collect();
    assert_eq!((node.fill(&cold, SMALL_OBJECT_BYTES).await, cold.len()), (0, 10_000));
    let world =
        harness::store_prompts::start_fleet_with_store(&master.admin, &[&format!("--index-blocks={BOUND}")])
            .await;
    let mut readings = 0;
    let mut unanswered = 0;
    let mut newcomers = Vec::new();
    while readings < 3 {
        for number in 0..5 {
            let hot = prompt(number, 10);
            if predicted_store_tokens(&world, &hot).await != 640 {
                // A slow master is not queried for a while.
                let now = metric(&world, "moongate_store_confirmation_failures_total").await;
                assert!(now > unanswered, "a requested prompt was evicted from the index");
                unanswered = now;
                wait_for_growth_to(&world, &hot, 10).await;
            }
        }
        let pages = metric(&world, "moongate_index_blocks").await;
        assert!(pages <= BOUND, "{pages} pages");
        let now = metric(&world, "moongate_store_scans_total").await;
        if now > readings {
            assert_eq!(pages, BOUND, "the index is full");
            readings = now;
            // A new node makes the gateway list all keys again.
            newcomers.push(RealNode::start(&master, HANDSHAKE, 16).await);
        }
    }
}
