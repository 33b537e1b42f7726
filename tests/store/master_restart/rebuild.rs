//! A master that has lost its log restores what its nodes can prove.

use std::path::Path;

use futures_util::StreamExt as _;
use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions, PutOptions};
use moongate_testkit::free_port;
use tempfile::TempDir;
use tokio::process::Command;

use super::start;
use crate::harness::polling::poll_until;
use crate::harness::process::MoongateProcess;

const KEYS: usize = 400;
const REMOVED: usize = 40;

/// A node whose memory survives its process.
struct RebuildNode {
    binary: MoongateProcess,
    http: String,
}

impl RebuildNode {
    async fn start(master: u16, folder: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
        command.args(["store", "--port=0", "--listen=127.0.0.1", "--allow-peers=127.0.0.0/8"]);
        command.arg(format!("--memory=folder:{}", folder.display())).env_clear();
        command.env("MOONCAKE_MASTER", format!("127.0.0.1:{master}"));
        command.env("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1");
        command.env("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE");
        command.env("MOONCAKE_GLOBAL_SEGMENT_SIZE", "64mb");
        let mut binary = MoongateProcess::spawn(&mut command);
        let line = binary.wait_for_line("store node ready").await;
        let http = line.split_whitespace().find_map(|word| word.strip_prefix("http=")).unwrap().to_owned();
        Self { binary, http }
    }

    async fn metric(&self, name: &str) -> u64 {
        let text = reqwest::get(format!("http://{}/metrics", self.http)).await.unwrap().text().await.unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name} in {text}")).parse().unwrap()
    }

    async fn has_cataloged(&self, objects: usize) {
        poll_until("the node has recorded its objects", async || {
            self.metric("moongate_store_catalog_objects").await == objects as u64
        })
        .await;
    }
}

fn key(number: usize) -> String {
    format!("model@tp0@{number:032x}")
}

fn bytes(number: usize) -> Vec<u8> {
    (0..1000 + number * 97 % 70_000).map(|at| (at * 31 + number * 7) as u8).collect()
}

fn client(master: u16, supervisor: &Supervisor) -> KvClient {
    KvClient::new(&format!("127.0.0.1:{master}"), KvClientOptions::default(), supervisor).unwrap()
}

async fn put_all(client: &KvClient) {
    let numbers = futures_util::stream::iter(0..KEYS);
    let put = async |number: usize| {
        client.put(&key(number), &bytes(number), &PutOptions::default()).await.unwrap();
    };
    numbers.for_each_concurrent(8, put).await;
    for number in KEYS - REMOVED..KEYS {
        client.remove(&key(number), true).await.unwrap();
    }
}

/// How many objects are there. None has other bytes than its own, and no removed one is there.
async fn check_all(client: &KvClient) -> usize {
    let mut found = 0;
    for number in 0..KEYS {
        match client.get(&key(number)).await {
            Ok(got) => {
                assert!(number < KEYS - REMOVED, "object {number} was removed");
                assert!(got == bytes(number), "object {number} has other bytes");
                found += 1;
            }
            Err(_) => continue,
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_lost_its_log_gets_every_object_back() {
    let (data, memory) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (port, supervisor) = (free_port(), Supervisor::new());
    let master = start(port, data.path());
    let node = RebuildNode::start(port, memory.path()).await;
    let ours = client(port, &supervisor);
    put_all(&ours).await;
    node.has_cataloged(KEYS - REMOVED).await;

    // The master's machine is replaced; the node's process runs on.
    master.signal("KILL").await;
    master.wait().await;
    drop(data);
    let data = TempDir::new().unwrap();
    let mut master = start(port, data.path());
    master.wait_for_line("received a node's inventory").await;
    assert_eq!(check_all(&ours).await, KEYS - REMOVED);
    let exists = ours.exist(&[&key(0), &key(KEYS - 1)]).await.unwrap();
    assert_eq!(exists, [true, false]);
    node.has_cataloged(KEYS - REMOVED).await;

    // Both are killed, and the log is gone. New puts then get ranges of their own.
    node.binary.signal("KILL").await;
    master.signal("KILL").await;
    node.binary.wait().await;
    master.wait().await;
    drop(data);
    let data = TempDir::new().unwrap();
    let mut master = start(port, data.path());
    let node = RebuildNode::start(port, memory.path()).await;
    master.wait_for_line("received a node's inventory").await;
    let again = client(port, &supervisor);
    for number in KEYS..KEYS + 100 {
        again.put(&key(number), &bytes(number), &PutOptions::default()).await.unwrap();
    }
    assert_eq!(check_all(&again).await, KEYS - REMOVED);
    for number in KEYS..KEYS + 100 {
        assert!(again.get(&key(number)).await.unwrap() == bytes(number));
    }

    // With its log, the master prefers that: what was removed while the node was away stays away.
    node.has_cataloged(KEYS - REMOVED + 100).await;
    node.binary.signal("KILL").await;
    node.binary.wait().await;
    again.remove(&key(0), true).await.unwrap();
    master.signal("KILL").await;
    master.wait().await;
    let _master = start(port, data.path());
    let node = RebuildNode::start(port, memory.path()).await;
    let last = client(port, &supervisor);
    assert_eq!(check_all(&last).await, KEYS - REMOVED - 1);
    node.has_cataloged(KEYS - REMOVED + 99).await;
}
