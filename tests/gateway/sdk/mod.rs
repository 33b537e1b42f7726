//! The official OpenAI SDKs for Python and Node against `moongate up`, with both engine protocols; SDKs of agents against the gateway in
//! front of a plain engine; and the gateway in front of the HTTP server that engines use: requests that clients must not send never reach it.

mod steering;

use std::path::{Path, PathBuf};
use std::time::Duration;

use moongate_loadtest::engine::VllmConnector;
use tokio::process::Command;

use crate::harness::commands::run_to_success;
use crate::harness::fleet::{TestFleet, TestFleetBuilder};
use crate::harness::process::MoongateProcess;
use crate::harness::{TEST_TIMEOUT, client};

/// Time limit for installing the SDKs on a slow network.
const SETUP_LIMIT: Duration = Duration::from_secs(300);
/// Time limit for all checks of one SDK.
const CHECK_LIMIT: Duration = Duration::from_secs(90);
/// Time limit for all checks of the SDKs of agents, most of which is their import.
const AGENTS_LIMIT: Duration = Duration::from_secs(180);

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gateway/sdk")
}

/// A command without the machine's proxy, which must not be used for loopback, and without its API keys.
fn command(program: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).env("NO_PROXY", "*").env("no_proxy", "*").env_remove("OPENAI_API_KEY");
    // Neither look for newer versions nor report their use.
    command.env("LITELLM_LOCAL_MODEL_COST_MAP", "True").env("LANGSMITH_TRACING", "false");
    command
}

/// Installs the SDKs if necessary; returns their folder.
async fn installed() -> PathBuf {
    let into = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("sdk");
    // The package indexes may be reachable only through the machine's proxy.
    run_to_success(SETUP_LIMIT, Command::new(folder().join("setup")).arg(&into)).await;
    into
}

/// Starts `moongate up` with one protocol; returns its base URL and metrics URL.
async fn up(protocol: &str) -> (MoongateProcess, String, String) {
    let mut binary = MoongateProcess::start(&[
        "up",
        "--listen=127.0.0.1:0",
        "--admin-listen=127.0.0.1:0",
        "--protocol",
        protocol,
    ]);
    let url = |line: &str| {
        format!("http://{}", line.split_once("http://").unwrap().1.split_whitespace().next().unwrap())
    };
    let base = format!("{}/v1", url(&binary.wait_for_line("Moongate is up").await));
    let metrics = url(&binary.wait_for_line("Metrics:").await);
    (binary, base, metrics)
}

#[tokio::test(flavor = "multi_thread")]
async fn python() {
    let sdk = installed().await;
    for protocol in ["sglang", "vllm"] {
        let (_binary, base_url, metrics) = up(protocol).await;
        let check = folder().join("check.py");
        let args = [check.to_str().unwrap(), &base_url, &metrics, "moongate-sim"];
        let said = run_to_success(CHECK_LIMIT, &mut command(&sdk.join("venv/bin/python"), &args)).await;
        assert_eq!(said.matches("ok ").count(), 8, "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn python_with_keys() {
    const KEY: &str = "sk-of-the-sdk-0123456789";
    let sdk = installed().await;
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("access.toml");
    let text = format!("[[key]]\nkey = \"{KEY}\"\ntenant = \"sdk\"\n[quota]\nrequests_per_second = 0.1\n");
    std::fs::write(&file, text).unwrap();
    let engines = TestFleetBuilder::sglang().plain(1).engines().await;
    let mut flags = engines.flags();
    flags.push(format!("--access-file={}", file.display()));
    let (binary, at) = MoongateProcess::gateway(&flags).await;
    let ready = format!("http://{}/ready", at.public);
    let waited = tokio::time::timeout(TEST_TIMEOUT, async {
        while client().get(&ready).send().await.unwrap().status() != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert!(waited.await.is_ok(), "{}", binary.output_text());
    let check = folder().join("keys.py");
    let args = [check.to_str().unwrap(), &format!("http://{}/v1", at.public), "sim", KEY];
    let said = run_to_success(CHECK_LIMIT, &mut command(&sdk.join("venv/bin/python"), &args)).await;
    assert_eq!(said.matches("ok ").count(), 4, "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn python_batches() {
    let sdk = installed().await;
    let stored = tempfile::tempdir().unwrap();
    let engines = TestFleetBuilder::sglang().plain(1).engines().await;
    let mut flags = engines.flags();
    flags.push(format!("--batch-store={}", stored.path().display()));
    let (_binary, at) = MoongateProcess::gateway(&flags).await;
    let check = folder().join("batches.py");
    let args = [check.to_str().unwrap(), &format!("http://{}/v1", at.public), "sim"];
    let said = run_to_success(CHECK_LIMIT, &mut command(&sdk.join("venv/bin/python"), &args)).await;
    assert_eq!(said.matches("ok ").count(), 3, "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn node() {
    let sdk = installed().await;
    for protocol in ["sglang", "vllm"] {
        let (_binary, base_url, metrics) = up(protocol).await;
        let check = folder().join("check.mjs");
        let args = [check.to_str().unwrap(), sdk.to_str().unwrap(), &base_url, &metrics, "moongate-sim"];
        let said = run_to_success(CHECK_LIMIT, &mut command(Path::new("node"), &args)).await;
        assert_eq!(said.matches("ok ").count(), 8, "{said}");
    }
}

/// A gateway that stores responses, in front of a pair of vLLM engines.
async fn one_pair() -> TestFleet {
    TestFleetBuilder::vllm(VllmConnector::Nixl).pairs(1).flag("--response-store=1048576").start().await
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_in_python() {
    let (sdk, fleet) = (installed().await, one_pair().await);
    let check = folder().join("agent_sdks.py");
    let args = [check.to_str().unwrap(), &fleet.gateway.url(""), "sim"];
    let said = run_to_success(AGENTS_LIMIT, &mut command(&sdk.join("venv/bin/python"), &args)).await;
    assert_eq!(said.lines().filter(|line| line.starts_with("ok ")).count(), 10, "{said}");
    assert!(fleet.engines.prefills[0].stats().started > 9, "the prefill legs");
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_in_node() {
    let (sdk, fleet) = (installed().await, one_pair().await);
    let check = folder().join("agent_sdks.mjs");
    let args = [check.to_str().unwrap(), sdk.to_str().unwrap(), &fleet.gateway.url(""), "sim"];
    let said = run_to_success(AGENTS_LIMIT, &mut command(Path::new("node"), &args)).await;
    assert_eq!(said.lines().filter(|line| line.starts_with("ok ")).count(), 5, "{said}");
    assert!(fleet.engines.prefills[0].stats().started > 5, "the prefill legs");
}
