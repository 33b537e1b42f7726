//! LoRA adapters that engines load at run time, through the binary: where they settle, single loads, failures, reload.

use std::fmt::Write as _;
use std::time::Duration;

use futures_util::future::join_all;
use moongate_loadtest::engine::{SimEngine, SimEngineOptions, SimProtocol, SimRole};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::process::{GatewayAddresses, MoongateProcess};
use crate::harness::{TEST_TIMEOUT, client, openai_error};

const COMPLETIONS: &str = "/v1/completions";

/// A gateway process with engines that can load the adapters of its file.
struct AdapterGateway {
    binary: MoongateProcess,
    at: GatewayAddresses,
    engines: Vec<SimEngine>,
    folder: TempDir,
}

/// An engine that loads an adapter in 0.2 s.
fn options(role: SimRole, protocol: SimProtocol) -> SimEngineOptions {
    let mut options = SimEngineOptions::new(role, protocol).fast();
    options.service.adapter_load_s = 200.0;
    options
}

fn adapters(names: &[&str]) -> String {
    names.iter().fold(String::new(), |mut file, name| {
        let _infallible = writeln!(file, "[[adapter]]\nname = \"{name}\"\npath = \"/adapters/{name}\"");
        file
    })
}

async fn wait_until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, wait).await.expect(what);
}

impl AdapterGateway {
    async fn start(file: &str, engines: Vec<SimEngineOptions>, flags: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        std::fs::write(folder.path().join("adapters.toml"), file).unwrap();
        let mut all = vec![
            format!("--lora-adapter-file={}", folder.path().join("adapters.toml").display()),
            "--health-interval=0s".to_owned(),
        ];
        all.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let engines = join_all(engines.into_iter().map(SimEngine::start)).await;
        let engines: Vec<SimEngine> = engines.into_iter().map(Result::unwrap).collect();
        for engine in &engines {
            let role = match engine.options().role {
                SimRole::Prefill => "prefill",
                SimRole::Decode => "decode",
                SimRole::Plain => "worker",
            };
            let port = engine.bootstrap_addr().map(|at| format!(",{}", at.port())).unwrap_or_default();
            all.push(format!("--{role}={}{port}", engine.url()));
        }
        let (binary, at) = MoongateProcess::gateway(&all).await;
        let world = Self { binary, at, engines, folder };
        let (ready, count) = (format!("http://{}/ready", world.at.public), world.engines.len());
        wait_until("all engines are usable", async || {
            let response: Value = client().get(&ready).send().await.unwrap().json().await.unwrap();
            response["engines"] == count
        })
        .await;
        world
    }

    async fn vllm(names: &[&str], count: usize) -> Self {
        let engine = options(SimRole::Plain, SimProtocol::Vllm);
        Self::start(&adapters(names), vec![engine; count], &[]).await
    }

    async fn post(&self, model: &str) -> reqwest::Response {
        let body = json!({"model": model, "prompt": "a few words", "max_tokens": 2});
        client().post(format!("http://{}{COMPLETIONS}", self.at.public)).json(&body).send().await.unwrap()
    }

    /// Sends a request that must succeed.
    async fn complete(&self, model: &str) {
        let response = self.post(model).await;
        assert_eq!(response.status(), 200, "{model}: {}", response.text().await.unwrap());
    }

    /// The code and the message of the error for a request.
    async fn error(&self, model: &str) -> (String, String) {
        let error = openai_error(&self.post(model).await.bytes().await.unwrap());
        let member = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
        (member("code"), member("message"))
    }

    /// Loads per engine, and all requests for loads.
    fn loads(&self) -> (Vec<u64>, u64) {
        let stats: Vec<_> = self.engines.iter().map(SimEngine::stats).collect();
        let requests = stats.iter().map(|stats| stats.adapter_load_requests).sum();
        (stats.iter().map(|stats| stats.adapter_loads).collect(), requests)
    }

    async fn metrics(&self) -> String {
        let url = format!("http://{}/metrics", self.at.admin);
        client().get(url).send().await.unwrap().text().await.unwrap()
    }

    fn write(&self, file: &str) {
        std::fs::write(self.folder.path().join("adapters.toml"), file).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn adapters_settle_on_a_few_engines() {
    const NAMES: [&str; 8] = ["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7"];
    let world = AdapterGateway::vllm(&NAMES, 4).await;
    join_all(NAMES.iter().cycle().take(24).map(|name| world.complete(name))).await;
    for round in 0..12 {
        let names = NAMES.iter().cycle().skip(round).take(4);
        join_all(names.map(|name| world.complete(name)).collect::<Vec<_>>()).await;
    }
    let (loads, requests) = world.loads();
    let total: u64 = loads.iter().sum();
    // Each once, and a second time only while its engine had a queue; without affinity, every engine would load all.
    assert!((8..=12).contains(&total), "{loads:?}");
    assert_eq!(requests, total, "no engine was asked twice: {loads:?}");
    assert!(loads.iter().all(|loads| *loads > 0), "the first loads are spread: {loads:?}");
    let metrics = world.metrics().await;
    assert!(
        metrics.contains(&format!("moongate_lora_loads_total{{outcome=\"loaded\"}} {total}\n")),
        "{metrics}"
    );
    assert!(metrics.contains(&format!("moongate_lora_load_seconds_count {total}\n")), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_for_one_adapter_share_a_load() {
    let ranks = SimEngineOptions { dp_size: 2, ..options(SimRole::Plain, SimProtocol::Vllm) };
    let world = AdapterGateway::start(&adapters(&["poet"]), vec![ranks], &[]).await;
    join_all((0..20).map(|_| world.complete("poet"))).await;
    assert_eq!(world.loads(), (vec![1], 1));
    let paths = world.engines[0].lora_adapters();
    assert_eq!(paths["poet"], "/adapters/poet");
    // The engine lists it now.
    world.complete("poet").await;
    world.complete("sim").await;
    assert_eq!(world.loads(), (vec![1], 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn both_engines_of_a_pair_load_the_adapter() {
    for protocol in [SimProtocol::Vllm, SimProtocol::Sglang] {
        let engines = [SimRole::Prefill, SimRole::Prefill, SimRole::Decode, SimRole::Decode];
        let engines = engines.map(|role| options(role, protocol)).to_vec();
        let world = AdapterGateway::start(&adapters(&["poet"]), engines, &[]).await;
        let model = if protocol == SimProtocol::Vllm { "poet" } else { "sim:poet" };
        for _ in 0..5 {
            world.complete(model).await;
        }
        let (loads, requests) = world.loads();
        assert_eq!((loads[0] + loads[1], loads[2] + loads[3], requests), (1, 1, 2), "{protocol:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_load_is_retried_on_another_engine() {
    let engine = options(SimRole::Plain, SimProtocol::Vllm);
    // Its first decision is the first engine.
    let flags = ["--policy=round_robin"];
    let world = AdapterGateway::start(&adapters(&["a0", "a1", "a2"]), vec![engine; 2], &flags).await;
    world.engines[0].allow_adapter_loads(false);
    for name in ["a0", "a1", "a2"] {
        join_all((0..3).map(|_| world.complete(name))).await;
    }
    assert_eq!(world.loads().0, [0, 3]);
    // Once for each adapter at most.
    let tried = world.engines[0].stats().adapter_load_requests;
    assert!((1..=3).contains(&tried), "{tried}");
    let metrics = world.metrics().await;
    assert!(
        metrics.contains(&format!("moongate_lora_loads_total{{outcome=\"rejected\"}} {tried}\n")),
        "{metrics}"
    );
    assert!(metrics.contains("reason=\"adapter_load\""), "{metrics}");
    // The engine still serves the base model.
    for _ in 0..10 {
        world.complete("sim").await;
    }
    assert!(world.engines[0].stats().finished > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_that_no_engine_can_load_is_an_error() {
    let world = AdapterGateway::vllm(&["poet"], 2).await;
    world.engines.iter().for_each(|engine| engine.allow_adapter_loads(false));
    let response = world.post("poet").await;
    assert_eq!(response.status(), 503);
    assert!(response.headers().contains_key("retry-after"));
    let (code, message) = world.error("poet").await;
    assert_eq!(code, "adapter_load_failed");
    assert!(message.contains("VLLM_ALLOW_RUNTIME_LORA_UPDATING"), "{message}");
    // Not repeated for a while.
    assert_eq!(world.loads(), (vec![0, 0], 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_that_takes_too_long_is_given_up() {
    let mut slow = options(SimRole::Plain, SimProtocol::Vllm);
    slow.service.adapter_load_s = 1e9;
    let world = AdapterGateway::start(&adapters(&["poet"]), vec![slow], &["--lora-load-timeout=200ms"]).await;
    let (code, message) = world.error("poet").await;
    assert_eq!(code, "adapter_load_failed");
    assert!(message.contains("--lora-load-timeout"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_adapter_that_was_loaded_elsewhere_is_used() {
    let mut world = AdapterGateway::vllm(&["poet"], 1).await;
    let body = json!({"lora_name": "poet", "lora_path": "/adapters/poet"});
    let url = format!("{}/v1/load_lora_adapter", world.engines[0].url());
    assert_eq!(client().post(url).json(&body).send().await.unwrap().status(), 200);
    world.complete("poet").await;
    assert_eq!(world.loads(), (vec![1], 2));
    let line = world.binary.wait_for_line("LoRA adapter loaded").await;
    assert!(line.contains("already_loaded"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_evicted_adapter_is_loaded_again() {
    let engine =
        SimEngineOptions { max_loaded_adapters: Some(1), ..options(SimRole::Plain, SimProtocol::Sglang) };
    let world = AdapterGateway::start(&adapters(&["a0", "a1"]), vec![engine], &[]).await;
    for (model, total) in [("sim:a0", 1), ("sim:a1", 2), ("sim:a0", 3)] {
        world.complete(model).await;
        assert_eq!(world.loads().0, [total]);
        // A probe has seen the eviction.
        let name = model.trim_start_matches("sim:");
        wait_until("only the loaded adapter is listed", async || {
            let url = format!("http://{}/workers", world.at.admin);
            let text = client().get(url).send().await.unwrap().text().await.unwrap();
            let other = if name == "a0" { "a1" } else { "a0" };
            text.contains(&format!("\"{name}\"")) && !text.contains(&format!("\"{other}\""))
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn adapters_reload_without_restart() {
    let mut world = AdapterGateway::vllm(&["poet"], 1).await;
    let url = format!("http://{}/v1/models", world.at.public);
    let listed = async || client().get(&url).send().await.unwrap().text().await.unwrap();
    assert!(listed().await.contains("\"poet\""));
    assert_eq!(world.error("coder").await.0, "model_not_found");
    world.write("[[adapter]]\nname = \"coder\"\n");
    let line = world.binary.wait_for_line("keeping the previous content").await;
    assert!(line.contains("path"), "{line}");
    world.complete("poet").await;
    world.write(&adapters(&["coder"]));
    wait_until("the new adapter is known", async || world.post("coder").await.status() == 200).await;
    assert_eq!(world.loads().0, [2], "the removed one stays loaded");
    world.complete("poet").await;
    let metrics = world.metrics().await;
    assert!(metrics.contains("moongate_lora_adapter_reloads_total{result=\"ok\"}"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn explanations_have_the_load() {
    let world = AdapterGateway::vllm(&["poet"], 1).await;
    let url = format!("http://{}{COMPLETIONS}", world.at.public);
    let body = json!({"model": "poet", "prompt": "a few words", "max_tokens": 2});
    let response = client().post(url).header("x-request-id", "mine").json(&body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let url = format!("http://{}/debug/decisions/mine", world.at.admin);
    let answer: Value = client().get(url).send().await.unwrap().json().await.unwrap();
    let load = &answer["decisions"][0]["candidates"][0]["terms"]["adapter_load"];
    assert!(load.as_f64().is_some_and(|load| load >= 1.0), "{answer}");
    let explained = MoongateProcess::run(&["explain", "mine", &format!("--admin={}", world.at.admin)]).await;
    assert!(explained.stdout.contains("adapter"), "{}", explained.stdout);
}
