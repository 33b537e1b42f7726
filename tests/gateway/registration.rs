//! Registration of engines at the gateway's admin listener, as by curl, another gateway's tools or a sidecar.

use std::fs::OpenOptions;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use moongate_loadtest::engine::SimEngine;
use moongate_testkit::free_port;
use reqwest::Method;
use serde_json::{Value, json};

use crate::harness::fleet::TestFleetBuilder;
use crate::harness::gateway::TestGateway;
use crate::harness::{TEST_TIMEOUT, client, openai_error};

async fn gateway(flags: &[&str]) -> TestGateway {
    let flags: Vec<String> = ["--registration"].iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
    TestGateway::start(&flags).await
}

/// Sends a request to the admin listener; `id` is escaped as one path segment.
async fn send(gateway: &TestGateway, method: Method, id: &str, body: Option<Value>) -> (u16, Value) {
    let id = id.replace('/', "%2F");
    let url = gateway.admin_url(if id.is_empty() { "/workers" } else { "/workers/" }) + &id;
    let mut request = client().request(method, url);
    if let Some(body) = body {
        request = request.json(&body);
    }
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

/// Polls an engine's description until it meets a condition.
async fn wait_until(gateway: &TestGateway, id: &str, what: &str, condition: impl Fn(u16, &Value) -> bool) {
    let waited = tokio::time::timeout(TEST_TIMEOUT, async {
        loop {
            let (status, worker) = send(gateway, Method::GET, id, None).await;
            if condition(status, &worker) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "not within {TEST_TIMEOUT:?}: {what}");
}

async fn complete(gateway: &TestGateway, tokens: u32) -> reqwest::Response {
    let body = json!({"model": "sim", "prompt": "go on", "max_tokens": tokens});
    client().post(gateway.url("/v1/completions")).json(&body).send().await.unwrap()
}

fn registration(engine: &SimEngine) -> Value {
    json!({"id": "ns/pod-0@uid", "url": engine.url(), "worker_type": "regular", "lease_seconds": 60})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registered_engine_serves_until_unavailable_or_removed() {
    let engines = TestFleetBuilder::sglang().plain(1).engines().await;
    let engine = &engines.workers[0];
    let gateway = gateway(&[]).await;
    assert_eq!(complete(&gateway, 2).await.status(), 503, "no engine serves yet");

    let (status, answer) = send(&gateway, Method::POST, "", Some(registration(engine))).await;
    assert_eq!((status, &answer["id"]), (200, &json!("ns/pod-0@uid")), "{answer}");
    wait_until(&gateway, "ns/pod-0@uid", "usable", |_, worker| worker["usable"] == true).await;
    assert_eq!(complete(&gateway, 2).await.status(), 200);
    let (_, list) = send(&gateway, Method::GET, "", None).await;
    let worker = &list["workers"][0];
    let members =
        ["url", "worker_type", "source", "model_id", "is_healthy", "load"].map(|name| worker[name].clone());
    let expected =
        [json!(engine.url()), json!("regular"), json!("registry"), json!("sim"), json!(true), json!(0)];
    assert_eq!((list["total"].as_u64(), members), (Some(1), expected), "{list}");

    let mut held = registration(engine);
    held["held"] = json!("draining");
    send(&gateway, Method::POST, "", Some(held)).await;
    wait_until(&gateway, "ns/pod-0@uid", "held", |_, worker| worker["usable"] == false).await;
    let (_, worker) = send(&gateway, Method::GET, "ns/pod-0@uid", None).await;
    assert_eq!(worker["reason"], "draining");
    let refused = complete(&gateway, 2).await;
    assert_ne!(refused.status(), 200, "no new request is sent to it");

    send(&gateway, Method::POST, "", Some(registration(engine))).await;
    wait_until(&gateway, "ns/pod-0@uid", "usable again", |_, worker| worker["usable"] == true).await;
    let (status, _) = send(&gateway, Method::DELETE, "ns/pod-0@uid", None).await;
    assert_eq!(status, 200);
    wait_until(&gateway, "ns/pod-0@uid", "gone", |status, _| status == 404).await;
    let (status, _) = send(&gateway, Method::DELETE, "ns/pod-0@uid", None).await;
    assert_eq!(status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_is_removed_when_its_lease_expires() {
    let engines = TestFleetBuilder::sglang().plain(1).engines().await;
    let gateway = gateway(&[]).await;
    let mut short = registration(&engines.workers[0]);
    short["lease_seconds"] = json!(1);
    send(&gateway, Method::POST, "", Some(short)).await;
    wait_until(&gateway, "ns/pod-0@uid", "listed", |status, _| status == 200).await;
    wait_until(&gateway, "ns/pod-0@uid", "removed", |status, _| status == 404).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_registrations_are_rejected_with_the_reason() {
    let gateway = gateway(&[]).await;
    for (body, part) in [
        (json!({"url": "http://a:1"}), "role"),
        (json!({"url": "https://a:1/v1", "role": "decode"}), "path"),
        (json!({"url": "http://a:1", "role": "decode", "lease_seconds": 0}), "lease_seconds"),
        (json!({"url": "http://a:1", "role": "decode", "id": "a".repeat(70_000)}), "KiB"),
    ] {
        let (status, answer) = send(&gateway, Method::POST, "", Some(body)).await;
        let error = openai_error(answer.to_string().as_bytes());
        assert!((400..500).contains(&status) && error["message"].as_str().unwrap().contains(part), "{error}");
    }
    let (_, list) = send(&gateway, Method::GET, "", None).await;
    assert_eq!(list["total"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn registration_is_off_by_default_and_requires_its_token() {
    let engines = TestFleetBuilder::sglang().plain(1).engines().await;
    let closed = TestGateway::start(&engines.flags()).await;
    let (status, _) = send(&closed, Method::POST, "", Some(registration(&engines.workers[0]))).await;
    assert_eq!(status, 404);
    let (status, list) = send(&closed, Method::GET, "", None).await;
    assert_eq!((status, &list["total"]), (200, &json!(1)), "engines of flags are listed");

    let gateway = gateway(&["--registration-token=right"]).await;
    for (token, expected) in [(None, 401), (Some("wrong"), 401), (Some("right"), 200)] {
        for method in [Method::GET, Method::POST] {
            let mut request = client().request(method.clone(), gateway.admin_url("/workers"));
            if let Some(token) = token {
                request = request.bearer_auth(token);
            }
            if method == Method::POST {
                request = request.json(&registration(&engines.workers[0]));
            }
            assert_eq!(request.send().await.unwrap().status(), expected, "{method} {token:?}");
        }
    }
}

/// A child process that is killed when dropped, also in a failing test.
struct ChildKillGuard(Child);

impl Drop for ChildKillGuard {
    fn drop(&mut self) {
        // Ignores the error if it has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Fetches a path of a program, retrying until it serves.
async fn scrape(address: &str, path: &str) -> String {
    let asked = tokio::time::timeout(TEST_TIMEOUT, async {
        loop {
            if let Ok(response) = client().get(format!("http://{address}{path}")).send().await
                && let Ok(text) = response.text().await
            {
                return text;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    asked.await.unwrap_or_else(|_| panic!("{address}{path} is not answered"))
}

fn dropped_log_lines(metrics: &str) -> u64 {
    let value = metrics.lines().find_map(|line| line.strip_prefix("moongate_log_lines_lost_total "));
    value.unwrap().parse().unwrap()
}

/// An address with a free port: the log with a port chosen by the program is not readable here.
fn free_address() -> String {
    format!("127.0.0.1:{}", free_port())
}

/// With standard error closed, a pipe without a reader, or a full disk: lines are dropped and counted, and the programs serve.
#[tokio::test(flavor = "multi_thread")]
async fn programs_serve_with_any_kind_of_standard_error() {
    for stderr in ["closed", "no reader", "full"] {
        let admin = [(); 4].map(|()| free_address());
        let [gateway, master, sidecar, store] = &admin;
        let (metrics_port, http_port) =
            (master.rsplit_once(':').unwrap().1, store.rsplit_once(':').unwrap().1);
        let rpc = free_address();
        let programs = [
            format!("gateway --registration --listen=127.0.0.1:0 --admin-listen={gateway}"),
            format!(
                "master --rpc_address=127.0.0.1 --rpc_port={} --metrics_host=127.0.0.1 --metrics_port={metrics_port}",
                rpc.rsplit_once(':').unwrap().1
            ),
            format!("sidecar --listen={sidecar}"),
            format!(
                "store --port={http_port} -Dmaster_server_address={rpc} -Dlocal_hostname=127.0.0.1 -Dglobal_segment_size=16mb"
            ),
        ];
        let mut children = Vec::new();
        for program in &programs {
            let moongate = env!("CARGO_BIN_EXE_moongate");
            let mut command = Command::new("sh");
            let line = if stderr == "closed" { "exec \"$0\" $1 2>&-" } else { "exec \"$0\" $1" };
            command
                .args(["-c", line, moongate, program])
                .env_clear()
                .stdin(Stdio::null())
                .stdout(Stdio::null());
            command.stderr(match stderr {
                "full" => OpenOptions::new().write(true).open("/dev/full").unwrap().into(),
                "no reader" => {
                    let (reader, writer) = std::io::pipe().unwrap();
                    drop(reader);
                    Stdio::from(writer)
                }
                _ => Stdio::null(),
            });
            children.push(ChildKillGuard(command.spawn().unwrap()));
        }
        for ((program, address), child) in programs.iter().zip(&admin).zip(&mut children) {
            // If closed, it is replaced by /dev/null at start, so that no socket gets its descriptor.
            let drops_lines = stderr != "closed";
            let counted = tokio::time::timeout(TEST_TIMEOUT, async {
                // Lines are written in a thread of their own, maybe after the first scrape.
                while (dropped_log_lines(&scrape(address, "/metrics").await) > 0) != drops_lines {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            });
            assert!(counted.await.is_ok(), "{stderr}: {program}");
            assert_eq!(child.0.try_wait().unwrap(), None, "{stderr}: {program}");
        }
        for mut child in children {
            let stopped = Command::new("kill").arg(child.0.id().to_string()).status().unwrap();
            assert!(stopped.success());
            assert_eq!(child.0.wait().unwrap().code(), Some(0), "{stderr}");
        }
    }
}

/// The reader of the log exits. Tasks that log continue, such as the one that probes a new engine.
#[tokio::test(flavor = "multi_thread")]
async fn engines_are_probed_after_the_log_reader_has_exited() {
    let engines = TestFleetBuilder::sglang().plain(1).engines().await;
    let mut gateway = ChildKillGuard(
        Command::new(env!("CARGO_BIN_EXE_moongate"))
            .args(["gateway", "--registration", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"])
            .env_clear()
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let log = BufReader::new(gateway.0.stderr.take().unwrap());
    let listens = log.lines().map(Result::unwrap).find(|line| line.contains("gateway listening")).unwrap();
    let admin = listens.split_whitespace().find_map(|word| word.strip_prefix("admin=")).unwrap();

    let workers = format!("http://{admin}/workers");
    let answer = client().post(&workers).json(&registration(&engines.workers[0])).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let usable = tokio::time::timeout(TEST_TIMEOUT, async {
        while !scrape(admin, "/workers").await.contains("\"usable\":true") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(usable.await.is_ok(), "{}", scrape(admin, "/workers").await);
    let metrics = scrape(admin, "/metrics").await;
    assert!(dropped_log_lines(&metrics) > 0, "the engine's discovery is logged");
    assert!(metrics.contains("\nmoongate_task_panics_total 0\n"), "{metrics}");
}
