//! `moongate sidecar` between simulated engines and gateways: registration, drain, restarts, LoRA adapters.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Parser as _;
use moongate_loadtest::engine::{SimEngine, SimEngineOptions, SimProtocol, SimRole};
use moongate_runtime::Supervisor;
use moongate_sidecar::SidecarOptions;
use serde_json::{Value, json};

use crate::harness;
use crate::harness::gateway::TestGateway;
use crate::harness::process::MoongateProcess;
use crate::harness::{TEST_TIMEOUT, client};

#[derive(Debug, clap::Parser)]
struct SidecarTestArgs {
    #[command(flatten)]
    options: SidecarOptions,
}

/// A sidecar in this process, which is stopped when dropped.
struct TestSidecar {
    address: SocketAddr,
    supervisor: Supervisor,
}

impl TestSidecar {
    fn start(engine: &str, gateways: &[&TestGateway], flags: &[String]) -> Self {
        let mut args = vec!["sidecar".to_owned(), "--listen=127.0.0.1:0".to_owned()];
        args.push(format!("--engine-url={engine}"));
        args.extend(gateways.iter().map(|gateway| format!("--gateway={}", gateway.running.admin_address)));
        args.extend_from_slice(flags);
        let options = SidecarTestArgs::try_parse_from(args).unwrap().options;
        let supervisor = Supervisor::new();
        let address = moongate_sidecar::start(options, &supervisor).unwrap();
        Self { address, supervisor }
    }

    /// Repeats a request until it returns 200; panics with the last response on a timeout.
    async fn until_ok(&self, method: reqwest::Method, path: &str) -> Value {
        let url = format!("http://{}{path}", self.address);
        let mut last = Value::Null;
        let waited = tokio::time::timeout(TEST_TIMEOUT, async {
            loop {
                let response = client().request(method.clone(), &url).send().await.unwrap();
                let status = response.status();
                last = response.json().await.unwrap_or_default();
                if status == 200 {
                    return;
                }
                assert_eq!(status, 202, "{path}: {last}");
                assert!(last["waiting_for"].is_string(), "{path}: {last}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        assert!(waited.await.is_ok(), "{path}: {last}");
        last
    }

    async fn settled(&self) -> Value {
        self.until_ok(reqwest::Method::GET, "/settled").await
    }
}

impl Drop for TestSidecar {
    fn drop(&mut self) {
        self.supervisor.token().cancel();
    }
}

async fn gateway(flags: &[&str]) -> TestGateway {
    let flags: Vec<String> = ["--registration"].iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
    TestGateway::start(&flags).await
}

async fn engine(role: SimRole, protocol: SimProtocol) -> SimEngine {
    SimEngine::start(SimEngineOptions::new(role, protocol).fast()).await.unwrap()
}

async fn workers(gateway: &TestGateway) -> Vec<Value> {
    let list: Value = client().get(gateway.admin_url("/workers")).send().await.unwrap().json().await.unwrap();
    list["workers"].as_array().unwrap().clone()
}

async fn until_workers(gateway: &TestGateway, what: &str, condition: impl Fn(&[Value]) -> bool) {
    let mut last = Vec::new();
    let waited = tokio::time::timeout(TEST_TIMEOUT, async {
        loop {
            last = workers(gateway).await;
            if condition(&last) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    assert!(waited.await.is_ok(), "{what}: {last:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn started_engine_registers_its_facts_with_every_gateway() {
    for (role, protocol, worker_type) in [
        (SimRole::Plain, SimProtocol::Vllm, "regular"),
        (SimRole::Prefill, SimProtocol::Sglang, "prefill"),
        (SimRole::Decode, SimProtocol::Sglang, "decode"),
    ] {
        let gateways = [gateway(&[]).await, gateway(&["--registration-token=secret"]).await];
        let place = engine(role, protocol).await;
        let (url, address) = (place.url(), place.addr());
        place.stop().await;
        let flags = ["--id=ns/pod-0@uid", "--registration-token=secret", "--node=n1"].map(str::to_owned);
        let sidecar = TestSidecar::start(&url, &[&gateways[0], &gateways[1]], &flags);
        let settled = client().get(format!("http://{}/settled", sidecar.address)).send().await.unwrap();
        assert_eq!(settled.status(), 202, "no engine yet");
        assert!(workers(&gateways[0]).await.is_empty());

        let mut config = SimEngineOptions::new(role, protocol).fast();
        config.listen = address;
        let _engine = SimEngine::start(config).await.unwrap();
        sidecar.settled().await;
        let known = workers(&gateways[0]).await;
        let known = (&known[0]["id"], &known[0]["worker_type"], &known[0]["usable"]);
        assert_eq!(known, (&json!("ns/pod-0@uid"), &json!(worker_type), &json!(true)));
        let with_token = gateways[1].admin_url("/workers");
        let listed = client().get(with_token).bearer_auth("secret").send().await.unwrap();
        assert_eq!(listed.json::<Value>().await.unwrap()["total"], 1);
        let metrics = client().get(format!("http://{}/metrics", sidecar.address)).send().await.unwrap();
        let metrics = metrics.text().await.unwrap();
        let of_engine = if protocol == SimProtocol::Vllm { "vllm:num_requests_running" } else { "sglang:" };
        for line in ["moongate_sidecar_engine_up 1\n", "gateways{state=\"using\"} 2\n", of_engine] {
            assert!(metrics.contains(line), "{line}: {metrics}");
        }
    }
}

/// Polls `what` every few milliseconds; returns the time at which it was first true.
async fn wait_for_first<F: Future<Output = bool>>(what: &str, is_so: impl Fn() -> F) -> Instant {
    let waited = tokio::time::timeout(TEST_TIMEOUT, async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Instant::now()
    });
    waited.await.unwrap_or_else(|_| panic!("{what}"))
}

/// Measures the time from the engine's first success on `/health` until the gateway uses it. The sidecar polls every 0.1 s, so more than
/// a second is due to a busy machine; the best median of several rounds excludes that.
#[tokio::test(flavor = "multi_thread")]
async fn a_ready_engine_is_used_within_a_second() {
    let gateway = gateway(&[]).await;
    let first = engine(SimRole::Plain, SimProtocol::Vllm).await;
    let (url, address) = (first.url(), first.addr());
    let _sidecar = TestSidecar::start(&url, &[&gateway], &[]);
    let is_used = || async { workers(&gateway).await.iter().any(|worker| worker["usable"] == true) };
    wait_for_first("the engine is used", is_used).await;
    first.stop().await;
    let mut medians = Vec::new();
    for _round in 0..5 {
        let mut late = Vec::new();
        for _restart in 0..3 {
            wait_for_first("the engine is away", || async { !is_used().await }).await;
            let health = format!("{url}/health");
            let answers = || async { client().get(&health).send().await.is_ok_and(|it| it.status() == 200) };
            let start = async {
                let mut config = SimEngineOptions::new(SimRole::Plain, SimProtocol::Vllm).fast();
                config.listen = address;
                SimEngine::start(config).await.unwrap()
            };
            let ready = wait_for_first("the engine answers", answers);
            let used = wait_for_first("the engine is used again", is_used);
            let (engine, ready, used) = tokio::join!(start, ready, used);
            late.push(used.saturating_duration_since(ready));
            engine.stop().await;
        }
        late.sort();
        medians.push(late[1]);
        if late[1] <= Duration::from_secs(1) {
            return;
        }
    }
    panic!("used so long after it was ready: {medians:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sidecar_without_a_gateway_logs_a_warning() {
    let mut sidecar =
        MoongateProcess::start(&["sidecar", "--listen=127.0.0.1:0", "--engine-url=http://127.0.0.1:9"]);
    let line = sidecar.wait_for_line("no gateway is configured").await;
    assert!(line.contains("WARN") && line.contains("--gateway HOST:PORT"), "{line}");
}

/// Sends requests without a pause; every one must be answered in full.
struct SidecarLoad {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    clients: Supervisor,
}

impl SidecarLoad {
    fn start(gateway: &TestGateway) -> Self {
        let load = Self { stop: Arc::default(), answered: Arc::default(), clients: Supervisor::new() };
        for number in 0..6 {
            let (stop, answered) = (Arc::clone(&load.stop), Arc::clone(&load.answered));
            let (http, url) = (client(), gateway.url("/v1/completions"));
            load.clients.spawn("client", async move {
                while !stop.load(Ordering::Relaxed) {
                    let count = answered.fetch_add(1, Ordering::Relaxed);
                    let prompt = format!("request {count} of client {number}");
                    let body = json!({"model": "sim", "prompt": prompt, "stream": true, "max_tokens": 40});
                    let response = http.post(&url).json(&body).send().await.unwrap();
                    let status = response.status();
                    let text = response.text().await.unwrap();
                    assert!(status == 200 && text.ends_with("data: [DONE]\n\n"), "{status}: {text}");
                }
            });
        }
        load
    }

    /// Stops the load and returns the number of completed requests.
    async fn end(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        self.clients.shutdown(TEST_TIMEOUT).await.unwrap();
        assert_eq!(self.clients.panics(), 0, "a request failed");
        self.answered.load(Ordering::Relaxed)
    }
}

/// The operator's sequence of drain, restart and settled, during which no request may fail.
#[tokio::test(flavor = "multi_thread")]
async fn engine_drains_and_restarts_under_load_without_failures() {
    for protocol in [SimProtocol::Sglang, SimProtocol::Vllm] {
        let gateway = gateway(&["--policy=round_robin"]).await;
        // Slow enough that requests are always in flight.
        let slow = || SimEngineOptions::new(SimRole::Plain, protocol);
        let (first, second) =
            (SimEngine::start(slow()).await.unwrap(), SimEngine::start(slow()).await.unwrap());
        let sidecars = [&first, &second].map(|engine| TestSidecar::start(&engine.url(), &[&gateway], &[]));
        for sidecar in &sidecars {
            sidecar.settled().await;
        }
        let load = SidecarLoad::start(&gateway);
        assert!(first.wait_for(TEST_TIMEOUT, |stats| stats.active > 0).await, "no request came");

        sidecars[0].until_ok(reqwest::Method::POST, "/drain").await;
        let drained = first.stats();
        assert_eq!(drained.active, 0, "the drain is complete");
        let settled = client().get(format!("http://{}/settled", sidecars[0].address)).send().await.unwrap();
        assert_eq!(settled.status(), 202);
        assert_eq!(settled.json::<Value>().await.unwrap()["drained"], true);
        let served = second.stats().finished;
        assert!(
            second.wait_for(TEST_TIMEOUT, |stats| stats.finished > served + 6).await,
            "the other one works on"
        );
        assert_eq!(first.stats().started, drained.started, "no request after the drain");

        let address = first.addr();
        first.stop().await;
        // The sidecar must detect that the engine is down; a real engine restarts more slowly than the poll interval.
        until_workers(&gateway, "the engine is away", |workers| {
            workers.iter().any(|worker| worker["usable"] == false)
        })
        .await;
        let ready = format!("http://{}/readyz", sidecars[0].address);
        tokio::time::timeout(TEST_TIMEOUT, async {
            let gone = || async { client().get(&ready).send().await.unwrap().text().await.unwrap() };
            let metrics = format!("http://{}/metrics", sidecars[0].address);
            while !client().get(&metrics).send().await.unwrap().text().await.unwrap().contains("engine_up 0")
            {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            assert_eq!(gone().await, "draining");
        })
        .await
        .unwrap();
        let restarted = SimEngine::start(SimEngineOptions { listen: address, ..slow() }).await.unwrap();
        sidecars[0].settled().await;
        assert!(restarted.wait_for(TEST_TIMEOUT, |stats| stats.finished > 0).await, "it gets requests again");
        assert!(load.end().await > 12);
    }
}

/// `moongate sidecar drain`, as in the preStop hook of an engine: its exit code and messages.
async fn drain_command(sidecar: &TestSidecar, flags: &[&str]) -> (Option<i32>, String) {
    let url = format!("--url=http://{}", sidecar.address);
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_moongate"));
    let output = command.args(["sidecar", "drain", &url, "--notice=0s"]).args(flags).output().await.unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drain_command_waits_for_running_requests() {
    let gateway = gateway(&[]).await;
    let engine = SimEngine::start(SimEngineOptions::new(SimRole::Plain, SimProtocol::Vllm)).await.unwrap();
    let sidecar = TestSidecar::start(&engine.url(), &[&gateway], &[]);
    sidecar.settled().await;
    let body = json!({"model": "sim", "prompt": "long", "stream": true, "max_tokens": 4_000});
    let stream = client().post(gateway.url("/v1/completions")).json(&body).send().await.unwrap();
    assert_eq!(stream.status(), 200);
    let (code, message) = drain_command(&sidecar, &["--limit=2s"]).await;
    assert_eq!(code, Some(1), "{message}");
    assert!(message.contains("has not drained within 2s") && message.contains("request"), "{message}");
    drop(stream);
    assert_eq!(drain_command(&sidecar, &["--limit=30s"]).await.0, Some(0));
    assert_eq!(engine.stats().active, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_can_be_cancelled() {
    let gateway = gateway(&[]).await;
    let engine = engine(SimRole::Plain, SimProtocol::Vllm).await;
    let sidecar = TestSidecar::start(&engine.url(), &[&gateway], &[]);
    sidecar.settled().await;
    sidecar.until_ok(reqwest::Method::POST, "/drain").await;
    until_workers(&gateway, "held", |workers| workers[0]["reason"] == "draining").await;
    sidecar.until_ok(reqwest::Method::DELETE, "/drain").await;
    sidecar.settled().await;
    until_workers(&gateway, "used", |workers| workers[0]["usable"] == true).await;
}

/// What the removal of an engine costs: the prompt tokens that it found in its cache.
#[tokio::test(flavor = "multi_thread")]
async fn the_removal_cost_follows_the_engines_cache_hits() {
    for protocol in [SimProtocol::Vllm, SimProtocol::Sglang] {
        let gateway = gateway(&[]).await;
        let engine = engine(SimRole::Plain, protocol).await;
        let sidecar = TestSidecar::start(&engine.url(), &[&gateway], &[]);
        sidecar.settled().await;
        let cost =
            async || sidecar.until_ok(reqwest::Method::GET, "/removal-cost").await["cost"].as_i64().unwrap();
        assert_eq!(cost().await, 0);
        let body = json!({"model": "sim", "prompt": "all work and no play ".repeat(100), "max_tokens": 2});
        for _ in 0..2 {
            let sent = client().post(gateway.url("/v1/completions")).json(&body).send().await.unwrap();
            assert_eq!(sent.status(), 200);
        }
        let cost = cost().await;
        assert!((100..1000).contains(&cost), "{protocol:?}: the second prompt was cached: {cost}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engine_is_registered_again_with_a_restarted_gateway() {
    let engine = engine(SimRole::Plain, SimProtocol::Sglang).await;
    let first = gateway(&[]).await;
    let sidecar = TestSidecar::start(&engine.url(), &[&first], &[]);
    sidecar.settled().await;
    let admin = format!("--admin-listen={}", first.running.admin_address);
    first.running.drain().await;
    first.supervisor.shutdown(TEST_TIMEOUT).await.unwrap();
    drop(first);
    let second = gateway(&[&admin]).await;
    until_workers(&second, "registered again", |workers| {
        workers.iter().any(|worker| worker["usable"] == true)
    })
    .await;
}

/// After SIGKILL of the sidecar the engine is removed when its lease expires; after SIGTERM it is deregistered at once.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_without_its_sidecar_is_removed() {
    let gateway = gateway(&[]).await;
    let engine = engine(SimRole::Plain, SimProtocol::Vllm).await;
    let engine_url = format!("--engine-url={}", engine.url());
    let gateway_flag = format!("--gateway={}", gateway.running.admin_address);
    for (signal, lease) in [("KILL", "--lease=2s"), ("TERM", "--lease=3600s")] {
        let sidecar =
            MoongateProcess::start(&["sidecar", "--listen=127.0.0.1:0", &engine_url, &gateway_flag, lease]);
        until_workers(&gateway, "registered", |workers| {
            workers.iter().any(|worker| worker["usable"] == true)
        })
        .await;
        sidecar.signal(signal).await;
        until_workers(&gateway, "gone", <[Value]>::is_empty).await;
        let ended = sidecar.wait().await;
        if signal == "TERM" {
            assert_eq!(ended.status.code(), Some(0), "{ended:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lora_adapters_follow_a_file_or_an_annotation_and_are_served() {
    let folder = tempfile::tempdir().unwrap();
    for (protocol, file, annotation) in
        [(SimProtocol::Vllm, "lora", false), (SimProtocol::Sglang, "annotations", true)]
    {
        let path = folder.path().join(file);
        let write = |wanted: &str| {
            let text = format!("moongate.io/rack=\"r1\"\nmoongate.io/lora-adapters={}\n", json!(wanted));
            fs::write(&path, if annotation { text } else { wanted.to_owned() }).unwrap();
        };
        let flag = if annotation { "--pod-info" } else { "--lora-file" };
        let flag = format!("{flag}={}", path.display());
        write("first=/adapters/1, second=/adapters/2");
        let gateway = gateway(&[]).await;
        let engine = engine(SimRole::Plain, protocol).await;
        let sidecar = TestSidecar::start(&engine.url(), &[&gateway], &[flag]);
        sidecar.settled().await;
        let loaded = |engine: &SimEngine| engine.lora_adapters();
        let expected = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(name, path)| ((*name).to_owned(), (*path).to_owned())).collect()
        };
        harness::wait_until("both are loaded", || {
            loaded(&engine) == expected(&[("first", "/adapters/1"), ("second", "/adapters/2")])
        })
        .await;
        let names = |worker: &Value| worker["models"].clone();
        // SGLang selects an adapter by a name with the base model.
        let served = |adapters: &[&str]| {
            let qualified = adapters.iter().map(|name| format!("sim:{name}"));
            let qualified = qualified.filter(|_| protocol == SimProtocol::Sglang);
            let plain = ["sim"].iter().chain(adapters).map(|name| (*name).to_owned());
            json!(plain.chain(qualified).collect::<Vec<_>>())
        };
        until_workers(&gateway, "served", |workers| names(&workers[0]) == served(&["first", "second"])).await;
        let body = json!({"model": "second", "prompt": "go on", "max_tokens": 2});
        let asked = client().post(gateway.url("/v1/completions")).json(&body).send().await.unwrap();
        assert_eq!(asked.status(), 200);

        write("second=/adapters/3");
        harness::wait_until("one is gone, the other another", || {
            loaded(&engine) == expected(&[("second", "/adapters/3")])
        })
        .await;
        until_workers(&gateway, "served", |workers| names(&workers[0]) == served(&["second"])).await;
        write("");
        harness::wait_until("none is left", || loaded(&engine).is_empty()).await;
    }
}
