//! Objects are copied through memory that client and node share, if the node is on the same host and allows it.

use std::path::PathBuf;
use std::process::Stdio;

use crate::harness::metrics::metric_at;
use crate::harness::polling::poll_until;
use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions, PutOptions};
use moongate_store_testkit::test_master::start_http_master;
use moongate_testkit::free_port;
use tokio::process::{Child, Command};

const MAPPED: &str = "moongate_store_transfers_by_protocol_total{protocol=\"mapped\"}";
const CHECKED: &str = "moongate_store_transfers_by_protocol_total{protocol=\"checked\"}";

/// A store with one node, which is a process of its own, and a client.
struct SharingStore {
    master: String,
    http: String,
    node: Child,
    arguments: Vec<String>,
    client: KvClient,
    _supervisor: Supervisor,
}

impl SharingStore {
    async fn start(master: &str, arguments: &[&str]) -> Self {
        let mut arguments: Vec<String> = arguments.iter().map(|it| (*it).to_owned()).collect();
        let http = free_port();
        arguments.extend([format!("--port={http}"), "-Dglobal_segment_size=64mb".to_owned()]);
        let supervisor = Supervisor::new();
        let client = KvClient::new(master, KvClientOptions::default(), &supervisor).unwrap();
        let node = Self::node(master, &arguments);
        let store = Self {
            master: master.to_owned(),
            http: format!("http://127.0.0.1:{http}"),
            node,
            arguments,
            client,
            _supervisor: supervisor,
        };
        store.wait_healthy().await;
        store
    }

    fn node(master: &str, arguments: &[String]) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
        command.arg("store").args(arguments).env_clear().stdin(Stdio::null()).kill_on_drop(true);
        command.env("MOONCAKE_MASTER", master).env("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1");
        command.spawn().unwrap()
    }

    async fn wait_healthy(&self) {
        let url = format!("{}/health", self.http);
        poll_until("the node is healthy", async || {
            reqwest::get(&url).await.is_ok_and(|response| response.status().is_success())
        })
        .await;
    }

    /// Kills the node, and starts another one with the same memory.
    async fn replace_node(&mut self) {
        self.node.kill().await.unwrap();
        self.node = Self::node(&self.master, &self.arguments);
        self.wait_healthy().await;
    }

    async fn put(&self, from: usize, to: usize) {
        for number in from..to {
            let key = format!("object-{number}");
            self.client.put(&key, &bytes(number), &PutOptions::default()).await.unwrap();
        }
    }

    /// Whether all objects are there. Other bytes are never returned.
    async fn has_all(&self, count: usize) -> bool {
        for number in 0..count {
            match self.client.get(&format!("object-{number}")).await {
                Ok(read) => assert!(read == bytes(number), "object {number} has other bytes"),
                Err(_) => return false,
            }
        }
        true
    }

    async fn transfers(&self) -> (u64, u64) {
        let client = reqwest::Client::new();
        (metric_at(&client, &self.http, MAPPED).await, metric_at(&client, &self.http, CHECKED).await)
    }
}

fn bytes(number: usize) -> Vec<u8> {
    (0..=number * 20_011).map(|index| (index * 7 + number) as u8).collect()
}

#[tokio::test]
async fn objects_go_through_shared_memory_by_default() {
    let (master, folder) = (start_http_master(None).await, tempfile::tempdir().unwrap());
    let socket = folder.path().join("store.sock");
    let path = format!("--shared-memory={}", socket.display());
    for (arguments, is_shared) in
        [(&[][..], true), (&["--shared-memory=off"], false), (&[path.as_str()], true)]
    {
        let mut store = SharingStore::start(&master.rpc, arguments).await;
        store.put(0, 40).await;
        assert!(store.has_all(40).await);
        let (mapped, checked) = store.transfers().await;
        // The first transfer opens the connection, and the memory is mapped for the second.
        assert_eq!((mapped > 70, checked > 70), (is_shared, !is_shared), "{arguments:?}: {mapped} {checked}");
        store.client.remove_all(true).await.unwrap();
        store.node.kill().await.unwrap();
    }
    assert!(socket.exists(), "the node was killed");
}

/// A holder's memory outlives its node. Each node has another mapping id, so that the client maps it again.
#[tokio::test]
async fn shared_memory_outlives_killed_nodes() {
    let (master, folder) = (start_http_master(None).await, tempfile::tempdir().unwrap());
    let socket: PathBuf = folder.path().join("holder");
    let _holder = Command::new(env!("CARGO_BIN_EXE_moongate"))
        .args(["store-holder", "--socket"])
        .arg(&socket)
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    poll_until("the holder is there", async || socket.exists()).await;
    let memory = format!("--memory=holder:{}", socket.display());
    let mut store = SharingStore::start(&master.rpc, &[&memory]).await;
    for round in 1..4 {
        store.put(20 * (round - 1), 20 * round).await;
        store.replace_node().await;
        poll_until("all objects are there", async || store.has_all(20 * round).await).await;
        let (mapped, checked) = store.transfers().await;
        assert!(mapped as usize > 10 * round, "{mapped} of {checked} after {round} nodes");
    }
}
