//! Several batches beside interactive requests, while an engine and a gateway are killed: each line has one result, and no interactive
//! request fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use moongate_loadtest::engine::VllmConnector;
use moongate_runtime::Supervisor;
use moongate_testkit::S3Server;
use parking_lot::Mutex;
use reqwest::Method;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{BatchGateway, ids, ids_of, lines};
use crate::harness::fleet::{TestEngines, TestFleetBuilder};
use crate::harness::{TEST_TIMEOUT, client};

const BATCHES: usize = 3;
/// Lines of each batch, and fewer where another gateway runs most of them.
const LINES: usize = 60;
const BUCKET_LINES: usize = 8;
/// Interactive clients, each with one request at a time, and pauses between them.
const CLIENTS: usize = 2;
const PAUSE: Duration = Duration::from_millis(100);

async fn engines() -> TestEngines {
    let builder = TestFleetBuilder::vllm(VllmConnector::Nixl).plain(3);
    let slower = builder.tune(|mut config| {
        config.service.prefill_base_s = 0.002;
        config
    });
    slower.engines().await
}

/// Clients that send requests to one gateway until stopped.
struct InteractiveClients {
    succeeded: Arc<AtomicU64>,
    failures: Arc<Mutex<Vec<String>>>,
    tasks: Supervisor,
}

impl InteractiveClients {
    fn start(gateway: &BatchGateway) -> Self {
        let clients = Self { succeeded: Arc::default(), failures: Arc::default(), tasks: Supervisor::new() };
        for number in 0..CLIENTS {
            let url = format!("http://{}/v1/completions", gateway.at.public);
            let (succeeded, failures) = (clients.succeeded.clone(), clients.failures.clone());
            let stop = clients.tasks.token();
            clients.tasks.spawn("interactive-client", async move {
                let mut sent = 0;
                while !stop.is_cancelled() {
                    match send(&url, &format!("{number} {sent}")).await {
                        Ok(()) => drop(succeeded.fetch_add(1, Ordering::Relaxed)),
                        Err(failure) => failures.lock().push(failure),
                    }
                    sent += 1;
                    // Without a pause, no engine would ever be idle, and no line would start.
                    tokio::time::sleep(PAUSE).await;
                }
            });
        }
        clients
    }

    /// Number of requests, of which none has failed.
    async fn end(self) -> u64 {
        self.tasks.shutdown(TEST_TIMEOUT).await.unwrap();
        assert!(self.failures.lock().is_empty(), "{:?}", self.failures);
        self.succeeded.load(Ordering::Relaxed)
    }
}

async fn send(url: &str, prompt: &str) -> Result<(), String> {
    let body = json!({"model": "sim", "prompt": prompt, "max_tokens": 8});
    let response = client().post(url).json(&body).send().await.map_err(|error| error.to_string())?;
    let status = response.status();
    let response: Value = response.json().await.map_err(|error| error.to_string())?;
    match status.is_success() && response["usage"]["completion_tokens"] == 8 {
        true => Ok(()),
        false => Err(format!("{status} {response}")),
    }
}

async fn create_batches(gateway: &BatchGateway, count: usize, tokens: u32) -> Vec<String> {
    let mut batches = Vec::new();
    for _ in 0..BATCHES {
        let file = gateway.upload(&lines(count, tokens)).await;
        batches.push(gateway.create(&file).await);
    }
    batches
}

/// Waits until so many lines of all batches have results.
async fn wait_for_lines(gateway: &BatchGateway, batches: &[String], count: u64) {
    let enough = async || {
        let mut completed = 0;
        for batch in batches {
            completed += gateway.batch(batch).await["request_counts"]["completed"].as_u64().unwrap();
        }
        completed >= count
    };
    gateway.wait_until("some lines have results", enough).await;
}

async fn check_results(gateway: &BatchGateway, batches: &[String], lines: usize) {
    for id in batches {
        let batch = gateway.wait_for(id, "completed").await;
        assert_eq!(batch["request_counts"], json!({"total": lines, "completed": lines, "failed": 0}));
        assert_eq!(ids(&gateway.results(&batch["output_file_id"]).await), ids_of(0..lines));
        assert_eq!(batch["error_file_id"], Value::Null);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_line_has_one_result_after_kills_under_load() {
    let folder = TempDir::new().unwrap();
    let mut engines = engines().await;
    let mut gateway = BatchGateway::start(&engines, folder.path(), &[]).await;
    let other = BatchGateway::start(&engines, &folder.path().join("other"), &[]).await;
    let clients = InteractiveClients::start(&other);
    let batches = create_batches(&gateway, LINES, 4).await;
    wait_for_lines(&gateway, &batches, 20).await;
    engines.workers.remove(0).stop().await;
    wait_for_lines(&gateway, &batches, 60).await;
    gateway = gateway.kill_and_restart().await;
    wait_for_lines(&gateway, &batches, 100).await;
    gateway = gateway.kill_and_restart().await;
    check_results(&gateway, &batches, LINES).await;
    assert!(clients.end().await > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_gateway_continues_from_a_bucket() {
    let server = S3Server::start().unwrap();
    let engines = engines().await;
    // Few at once, so that some lines are left for the other gateway.
    let flags = ["--batch-concurrency=4".to_owned()];
    let gateway = BatchGateway::start_with_bucket(&engines, &server, &flags).await;
    let standby = BatchGateway::start_with_bucket(&engines, &server, &flags).await;
    let failure = standby.failure(Method::GET, "/v1/batches", None).await;
    assert_eq!(failure, (500, "storage_failed".to_owned()), "only one gateway owns the batches");
    // Their requests go elsewhere: on a slow machine, the credit for delays of the standby's own requests would soon be spent.
    let other = BatchGateway::with_flags(engines.flags(), Vec::new()).await;
    let clients = InteractiveClients::start(&other);
    let batches = create_batches(&gateway, BUCKET_LINES, 20).await;
    wait_for_lines(&gateway, &batches, 1).await;
    gateway.kill().await;
    let owns = async || standby.status("/v1/batches").await == 200;
    let expires = async {
        while !owns().await {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(3 * TEST_TIMEOUT, expires).await.expect("the lease of the killed gateway expires");
    check_results(&standby, &batches, BUCKET_LINES).await;
    assert!(clients.end().await > 0);
    // A gateway that ends in order releases the lease, so the next one need not wait.
    standby.binary.signal("TERM").await;
    standby.binary.wait().await;
    let next = BatchGateway::start_with_bucket(&engines, &server, &[]).await;
    assert_eq!(next.get("/v1/batches").await["data"].as_array().unwrap().len(), BATCHES);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_that_cannot_be_used_is_an_error() {
    let server = S3Server::start().unwrap();
    for (place, reason) in [("s3://missing/x", "s3://missing/x"), ("gs://bucket", "the only scheme is s3")] {
        let flags = ["gateway", "--registration", "--batch-store", place];
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_moongate"));
        let command = command.args(flags).env_clear().envs(server.environment());
        let ended = crate::harness::process::MoongateProcess::spawn(command).wait().await;
        assert!(!ended.status.success() && ended.stderr.contains(reason), "{ended:?}");
    }
}
