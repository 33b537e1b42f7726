//! `moongate doctor` reports problems of settings and engines, each with a fix.

use std::io::Write as _;

use moongate_loadtest::engine::{KvEventOptions, SimEngineOptions, VllmConnector};
use serde_json::{Value, json};

use crate::harness::TEST_TIMEOUT;
use crate::harness::fleet::{TestEngines, TestFleetBuilder};
use crate::harness::process::{MoongateProcess, ProcessOutput};

async fn doctor(flags: &[String]) -> ProcessOutput {
    let mut args = vec!["doctor", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"];
    args.extend(flags.iter().map(String::as_str));
    MoongateProcess::run(&args).await
}

/// A port that nothing listens on.
fn closed_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

fn prefill(engines: &TestEngines, bootstrap: u16) -> String {
    format!("--prefill={},{bootstrap}", engines.prefills[0].url())
}

fn bootstrap(engines: &TestEngines) -> u16 {
    engines.prefills[0].bootstrap_addr().unwrap().port()
}

fn decode(engines: &TestEngines) -> String {
    format!("--decode={}", engines.decodes[0].url())
}

/// Asserts that doctor failed, counted its problems, and that each of `words` is in a problem or a fix.
fn finds(ended: &ProcessOutput, words: &[&str]) {
    assert_eq!(ended.status.code(), Some(1), "{}{}", ended.stdout, ended.stderr);
    let lines: Vec<&str> = ended.stdout.lines().map(str::trim_start).collect();
    let problems = lines.iter().filter(|line| line.starts_with("ERROR ")).count();
    let fixes = lines.iter().filter(|line| line.starts_with("fix: ")).count();
    assert!(problems > 0 && problems == fixes, "{}", ended.stdout);
    let total = if problems == 1 { "1 problem.".to_owned() } else { format!("{problems} problems.") };
    assert_eq!(lines.last(), Some(&total.as_str()), "{}", ended.stdout);
    let report_lines: Vec<&&str> =
        lines.iter().filter(|line| line.starts_with("ERROR ") || line.starts_with("fix: ")).collect();
    for word in words {
        assert!(report_lines.iter().any(|line| line.contains(word)), "no {word:?} in\n{}", ended.stdout);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn good_fleets_pass() {
    let fleets = [
        (TestFleetBuilder::sglang(), "SGLang 0.5.23"),
        (TestFleetBuilder::vllm(VllmConnector::Nixl), "NIXL"),
        (TestFleetBuilder::vllm(VllmConnector::Mooncake), "Mooncake"),
        (TestFleetBuilder::vllm(VllmConnector::Store), "vLLM 0.32"),
    ];
    for (fleet, word) in fleets {
        let engines = fleet.prefill(1).decode(2).engines().await;
        let ended = doctor(&engines.flags()).await;
        assert_eq!(ended.status.code(), Some(0), "{}{}", ended.stdout, ended.stderr);
        for needed in [word, "sim: 2 prefill/decode pairs, 0 plain workers", "No problems found."] {
            assert!(ended.stdout.contains(needed), "no {needed:?} in\n{}", ended.stdout);
        }
        assert!(!ended.stdout.contains("ERROR"), "{}", ended.stdout);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn caches_are_described_and_missing_features_are_no_problem() {
    for (fleet, hashes, flag) in [
        (TestFleetBuilder::sglang(), "SGLang's hashes", "start SGLang with --kv-events-config"),
        (
            TestFleetBuilder::vllm(VllmConnector::Store),
            "vLLM's hashes (sha256_cbor)",
            "start vLLM with --kv-events-config",
        ),
    ] {
        let engines = fleet.prefill(2).decode(1).engines().await;
        let ended = doctor(&engines.flags()).await;
        assert_eq!(ended.status.code(), Some(0), "{}{}", ended.stdout, ended.stderr);
        let described = ended.stdout.lines().filter(|line| line.contains("KV cache: pages of "));
        let described: Vec<&str> = described.filter(|line| line.contains(hashes)).collect();
        assert_eq!(described.len(), 3, "{}", ended.stdout);
        let advice: Vec<&str> = ended.stdout.lines().filter(|line| line.contains(flag)).collect();
        assert_eq!(advice.len(), 1, "{}", ended.stdout);
        assert!(advice[0].contains("2 engines: no KV events"), "decodes are not counted: {}", advice[0]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn running_gateway_is_asked_for_hash_rules() {
    let with_events = |config: SimEngineOptions| SimEngineOptions {
        kv_events: Some(KvEventOptions::default()),
        ..config.fast()
    };
    let world = TestFleetBuilder::vllm(VllmConnector::Store).plain(1).tune(with_events).start().await;
    let prompt = json!({"model": world.model(), "prompt": vec![7; 500], "max_tokens": 1});
    let engine = world.engines.workers[0].url();
    let admin = world.gateway.admin_url("");
    let flags = [format!("--worker={engine}"), format!("--admin-listen={}", admin.replace("http://", ""))];
    let args: Vec<&str> =
        ["doctor", "--listen=127.0.0.1:0"].into_iter().chain(flags.iter().map(String::as_str)).collect();
    world.post("/v1/completions", prompt.to_string()).await;
    let checked = async {
        loop {
            let ended = MoongateProcess::run(&args).await;
            assert!(ended.stdout.contains("Predictions of the gateway at "), "{}", ended.stdout);
            if ended.stdout.contains(&format!("ok    {engine}: block hashes confirmed")) {
                return;
            }
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, checked).await.unwrap();
    let workers: Value =
        world.client.get(world.gateway.admin_url("/workers")).send().await.unwrap().json().await.unwrap();
    assert_eq!(workers["workers"][0]["ranks"][0]["block_hashes"], "confirmed", "{workers}");
    assert_eq!(workers["workers"][0]["not_predicted"], json!([]), "{workers}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_port_is_reported() {
    let engines = TestFleetBuilder::sglang().pairs(1).engines().await;
    let closed = closed_port();
    let flags = [prefill(&engines, bootstrap(&engines)), format!("--decode=http://127.0.0.1:{closed}")];
    let ended = doctor(&flags).await;
    finds(&ended, &[&closed.to_string(), "Connection refused", "a model needs a prefill and a decode"]);
    assert!(
        ended.stdout.contains("check that the engine is running, and its host and port"),
        "{}",
        ended.stdout
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_an_engine_is_reported() {
    let engines = TestFleetBuilder::sglang().pairs(1).engines().await;
    let other = format!("--decode=http://{}", engines.prefills[0].bootstrap_addr().unwrap());
    let ended = doctor(&[prefill(&engines, bootstrap(&engines)), other]).await;
    finds(&ended, &["check that the URL is an engine's HTTP port"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_role_is_reported() {
    let engines = TestFleetBuilder::sglang().pairs(1).engines().await;
    let swapped = [
        format!("--prefill={},{}", engines.decodes[0].url(), bootstrap(&engines)),
        format!("--decode={}", engines.prefills[0].url()),
    ];
    let ended = doctor(&swapped).await;
    finds(&ended, &["list it as decode", "list it as prefill", "--disaggregation-mode prefill"]);
    let as_worker = [format!("--worker={}", engines.decodes[0].url())];
    finds(&doctor(&as_worker).await, &["list it as decode", "start it without --disaggregation-mode"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_bootstrap_server_is_reported() {
    let engines = TestFleetBuilder::sglang().pairs(1).engines().await;
    let closed = closed_port();
    let ended = doctor(&[prefill(&engines, closed), decode(&engines)]).await;
    finds(&ended, &["check --disaggregation-bootstrap-port of the prefill", &closed.to_string()]);

    let engines = TestFleetBuilder::vllm(VllmConnector::Mooncake).pairs(1).engines().await;
    let flags = [prefill(&engines, closed), decode(&engines), "--kv-connector=mooncake".to_owned()];
    finds(&doctor(&flags).await, &["VLLM_MOONCAKE_BOOTSTRAP_PORT", &closed.to_string()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_form_no_pair_are_reported() {
    let sglang = TestFleetBuilder::sglang().pairs(1).engines().await;
    let vllm = TestFleetBuilder::vllm(VllmConnector::Nixl).pairs(1).engines().await;
    let ended = doctor(&[prefill(&sglang, bootstrap(&sglang)), decode(&vllm)]).await;
    finds(&ended, &["sim cannot be served", "of the same engine kind"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_engines_and_used_ports_are_reported() {
    finds(&doctor(&[]).await, &["no engine is configured", "set --prefill and --decode"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let engines = TestFleetBuilder::sglang().plain(1).engines().await;
    let worker = format!("--worker={}", engines.workers[0].url());
    let ended =
        MoongateProcess::run(&["doctor", "--listen", &address, "--admin-listen=127.0.0.1:0", &worker]).await;
    finds(&ended, &[&address, "choose another port"]);
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

/// An invalid config file ends the command with exit code 2 before any engine is probed.
#[tokio::test(flavor = "multi_thread")]
async fn invalid_config_files_are_reported_with_the_line() {
    for (text, words) in [
        ("policy = \"least_load\"\nprefil = [\"http://127.0.0.1:1\"]\n", &[":2: ", "prefil", "prefill"][..]),
        ("attempts = 0\n", &[":1: ", "attempts", "1..=10"]),
        ("attempts = 2\nconnect-timeout = \"soon\"\n", &[":2: ", "connect-timeout"]),
        ("policy = \n", &["not valid TOML", "line 1"]),
        ("[gateway]\npolicy = \"least_load\"\n", &[":1: ", "gateway"]),
        ("decode = \"ftp://127.0.0.1:1\"\n", &[":1: ", "http://host:port"]),
    ] {
        let file = file(text);
        let path = file.path().display().to_string();
        for command in ["doctor", "gateway"] {
            let ended = MoongateProcess::run(&[command, "--config", &path]).await;
            assert_eq!(ended.status.code(), Some(2), "{command} {text}: {ended:?}");
            for word in [&[path.as_str()][..], words].concat() {
                assert!(ended.stderr.contains(word), "{command} {text}: no {word:?} in {}", ended.stderr);
            }
        }
    }
    let ended = MoongateProcess::run(&["doctor", "--config", "no-such-file.toml"]).await;
    assert_eq!(ended.status.code(), Some(2));
    assert!(ended.stderr.contains("no-such-file.toml") && ended.stderr.contains("--config"), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_are_shown_with_their_origin() {
    let engines = TestFleetBuilder::sglang().plain(1).engines().await;
    let file = file(&format!(
        "policy = \"round_robin\"\nworker = [\"{}\"]\nengine-api-key = \"sk-secret\"\n",
        engines.workers[0].url()
    ));
    let ended = doctor(&[format!("--config={}", file.path().display()), "--attempts=2".to_owned()]).await;
    assert_eq!(ended.status.code(), Some(0), "{}{}", ended.stdout, ended.stderr);
    for needed in ["policy = round_robin (from file)", "attempts = 2 (from flag)"] {
        assert!(ended.stdout.contains(needed), "no {needed:?} in\n{}", ended.stdout);
    }
    assert!(!ended.stdout.contains("sk-secret"), "the key is shown:\n{}", ended.stdout);
}
