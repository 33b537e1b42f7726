//! Leader lookup of a master through a real etcd.

use std::io::ErrorKind;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;
use tempfile::TempDir;

use super::*;

const KEY: &str = "mooncake-store/mooncake_cluster/master_view";

/// A single-node etcd, killed on drop.
struct TestEtcd {
    process: Child,
    endpoint: String,
    http: reqwest::Client,
    _folder: TempDir,
}

impl Drop for TestEtcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A `HOST:PORT` on which nothing listens.
async fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string()
}

impl TestEtcd {
    /// Starts etcd. `None` if it is not installed.
    async fn start() -> Option<Self> {
        let (endpoint, peer, folder) = (free_address().await, free_address().await, TempDir::new().unwrap());
        let (client, peer) = (format!("http://{endpoint}"), format!("http://{peer}"));
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(folder.path()).stdout(Stdio::null()).stderr(Stdio::null());
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("default={peer}")]);
        let process = match command.spawn() {
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            process => process.unwrap(),
        };
        let http = moongate_runtime::plain_http_client().build().unwrap();
        let etcd = Self { process, endpoint, http, _folder: folder };
        let health = format!("http://{}/health", etcd.endpoint);
        tokio::time::timeout(LIMIT, async {
            while !etcd.http.get(&health).send().await.is_ok_and(|response| response.status().is_success()) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await
        .unwrap();
        Some(etcd)
    }

    async fn put(&self, key: &str, value: &str) {
        let body = json!({ "key": STANDARD.encode(key), "value": STANDARD.encode(value) }).to_string();
        let put = self.http.post(format!("http://{}/v3/kv/put", self.endpoint)).body(body).send().await;
        assert!(put.unwrap().status().is_success());
    }
}

/// A fake master that counts requests, and closes each connection after `max_requests`.
async fn counting_master(supervisor: &Supervisor, max_requests: usize) -> (String, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let address = server(supervisor, move |mut stream| {
        let count = Arc::clone(&counted);
        async move {
            let mut buffer = BytesMut::new();
            for _ in 0..max_requests {
                let Some(request) = request(&mut stream, &mut buffer).await else { return };
                count.fetch_add(1, Ordering::SeqCst);
                stream.write_all(&respond(Dialect::NEWEST, &request)).await.unwrap();
            }
        }
    })
    .await;
    (address, count)
}

#[tokio::test]
async fn leader_is_looked_up_in_etcd_before_each_connection() {
    let Some(etcd) = TestEtcd::start().await else {
        eprintln!("SKIPPED: etcd is not installed");
        return;
    };
    let supervisor = Supervisor::new();
    let (first, counted_first) = counting_master(&supervisor, 1).await;
    let (second, counted_second) = counting_master(&supervisor, usize::MAX).await;
    // One unreachable etcd node is tolerated.
    let address = format!("etcd://{},{}", free_address().await, etcd.endpoint);
    let master = MasterClient::new(&address, options(), &supervisor);
    let error = exists(&master, "7").await.unwrap_err().to_string();
    assert!(error.contains(KEY) && error.contains("no master is the leader"), "{error}");

    etcd.put(KEY, &first).await;
    tokio::time::timeout(LIMIT, async {
        while exists(&master, "7").await.is_err() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .unwrap();
    assert_eq!(counted_first.load(Ordering::SeqCst), 1);

    // The first master has closed the connection but still accepts new ones. Only the lookup finds the new leader.
    etcd.put(KEY, &second).await;
    tokio::time::timeout(LIMIT, async {
        while !exists(&master, "7").await.is_ok_and(|exists| exists) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .unwrap();
    assert!(counted_second.load(Ordering::SeqCst) > 0);
    assert_eq!(counted_first.load(Ordering::SeqCst), 1);

    etcd.put("mooncake-store/blue/master_view", &second).await;
    let blue = MasterClient::new(&format!("etcd://{}/blue", etcd.endpoint), options(), &supervisor);
    assert!(exists(&blue, "7").await.unwrap());
}
