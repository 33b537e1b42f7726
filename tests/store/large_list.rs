//! Reading a Moongate master's list of millions of objects: how long a new gateway needs, and what it costs both. It takes gigabytes, so it
//! is ignored by default; see CONTRIBUTING.md.

use std::time::{Duration, Instant};

use mooncake_wire::rpc::{BatchPutEnd, BatchPutEndArguments, BatchPutStart, BatchPutStartArguments};
use mooncake_wire::types::{DEFAULT_TENANT, ObjectMeta, ReplicaType, ReplicateConfig, Uuid};
use moongate_loadtest::engine::SimEngineOptions;
use moongate_store_testkit::test_master::TestRpcConnection;
use moongate_testkit::free_port;
use tokio::process::Command;

use super::large_store::{PAGES, cpu, load, read, rss, setting};
use crate::harness;
use crate::harness::fleet::TestFleetBuilder;
use crate::harness::metrics::metric_at;
use crate::harness::polling::poll_until;
use crate::harness::process::MoongateProcess;
use crate::harness::store_prompts::{BLOCK_TOKENS, objects, predicted_store_tokens_at, prompt};

const CLIENT: Uuid = Uuid { first: 7, second: 7 };
/// Bytes of an object: nothing is written to it.
const OBJECT_BYTES: u64 = 64;
/// Time until a new gateway has to know the whole store, per million keys, and besides.
const LIMIT_PER_MILLION: Duration = Duration::from_secs(5);
const LIMIT: Duration = Duration::from_secs(20);

async fn start_master() -> (MoongateProcess, String, String) {
    let flags = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--default_kv_lease_ttl=50"];
    let (rpc, admin) = (free_port(), free_port());
    let ports = [format!("--rpc_port={rpc}"), format!("--metrics_port={admin}")];
    let mut args = vec!["master"];
    args.extend(flags.iter().copied().chain(ports.iter().map(String::as_str)));
    let master = MoongateProcess::start(&args);
    let (rpc, admin) = (format!("127.0.0.1:{rpc}"), format!("127.0.0.1:{admin}"));
    let url = format!("http://{admin}/health");
    poll_until("the master serves", async || reqwest::get(&url).await.is_ok()).await;
    (master, rpc, admin)
}

/// A node with space for the objects.
async fn start_node(rpc: &str, keys: usize) -> MoongateProcess {
    let size = format!("-Dglobal_segment_size={}mb", 128 + keys as u64 * 2 * OBJECT_BYTES / 1_000_000);
    let port = free_port();
    let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
    command.args(["store", "--port", &port.to_string(), &size]).env_clear();
    let node = MoongateProcess::spawn(
        command.env("MOONCAKE_MASTER", rpc).env("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1"),
    );
    let url = format!("http://127.0.0.1:{port}/health");
    poll_until("the node is healthy", async || {
        reqwest::get(&url).await.is_ok_and(|response| response.status().is_success())
    })
    .await;
    node
}

/// Registers all objects of the prompts, without data.
async fn fill(rpc: &str, prompts: u32) {
    let mut connection = TestRpcConnection::connect(rpc).await;
    for number in 0..prompts {
        let all = objects(&prompt(number, PAGES)).concat();
        let keys: Vec<&str> = all.iter().map(String::as_str).collect();
        let objects = keys.iter().map(|key| ObjectMeta { key: *key, object_checksum: None }).collect();
        let (sizes, tenant) = (vec![OBJECT_BYTES; keys.len()], DEFAULT_TENANT);
        let config = ReplicateConfig::default();
        let start = BatchPutStartArguments { client_id: CLIENT, keys, sizes, config, tenant };
        assert!(connection.call::<BatchPutStart>(&start).await.iter().all(Result::is_ok));
        let end = BatchPutEndArguments { client_id: CLIENT, objects, replica_type: ReplicaType::ALL, tenant };
        assert!(connection.call::<BatchPutEnd>(&end).await.iter().all(Result::is_ok));
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes gigabytes"]
async fn a_new_gateway_lists_a_large_store_in_seconds() {
    let keys = setting("MOONGATE_STORE_KEYS", 1_000_000);
    let prompts = u32::try_from(keys / (2 * PAGES as usize)).unwrap();
    let pages = prompts as usize * PAGES as usize;
    let (master, rpc, admin) = start_master().await;
    let _node = start_node(&rpc, keys).await;
    let filling = Instant::now();
    fill(&rpc, prompts).await;
    let (id, elapsed) = (master.id(), filling.elapsed());
    println!(
        "filled {keys} keys in {elapsed:.0?}; master {} MB, {:.1?} of CPU; {}",
        rss(id),
        cpu(id),
        load()
    );
    let fleet = TestFleetBuilder::sglang()
        .plain(1)
        .tune(|config| SimEngineOptions { use_storage: true, ..config.fast() });
    let engines = fleet.engines().await;
    let model = engines.workers[0].options().model.clone();
    let client = harness::client();
    for _ in 0..setting("MOONGATE_STORE_RUNS", 3) {
        let started = Instant::now();
        let (_gateway, gateway_admin) = read((id, &admin), &engines, pages).await;
        assert!(started.elapsed() < LIMIT + LIMIT_PER_MILLION * u32::try_from(keys / 1_000_000).unwrap());
        assert_eq!(metric_at(&client, &gateway_admin, "moongate_index_blocks").await, pages as u64);
        let asked = prompt(prompts / 2, PAGES);
        let predicted = predicted_store_tokens_at(&client, &gateway_admin, &model, &asked).await;
        assert_eq!(predicted, u64::from(PAGES * BLOCK_TOKENS));
    }
    // Without the master, the index contains only what was listed.
    let (_gateway, gateway_admin) = read((id, &admin), &engines, pages).await;
    master.signal("KILL").await;
    for number in (0..prompts).step_by(prompts as usize / 20) {
        let asked = prompt(number, PAGES);
        let predicted = predicted_store_tokens_at(&client, &gateway_admin, &model, &asked).await;
        assert_eq!(predicted, u64::from(PAGES * BLOCK_TOKENS));
    }
}
