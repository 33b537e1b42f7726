//! `moongate up`, the quick start.

use std::time::Duration;

use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::harness::process::MoongateProcess;
use crate::harness::{TEST_TIMEOUT, client, openai_error};

const FREE_PORTS: [&str; 3] = ["up", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"];

/// A running `moongate up`, with its addresses from the printed banner.
struct UpFixture {
    binary: MoongateProcess,
    public: String,
    admin: String,
}

async fn up(flags: &[&str]) -> UpFixture {
    let mut binary = MoongateProcess::start(&[&FREE_PORTS[..], flags].concat());
    let address = |line: &str| {
        let (_, rest) = line.split_once("http://").unwrap_or_else(|| panic!("no URL in {line:?}"));
        rest.split(['/', ' ']).next().unwrap_or_default().to_owned()
    };
    let public = address(&binary.wait_for_line("Moongate is up").await);
    let admin = address(&binary.wait_for_line("Metrics:").await);
    UpFixture { binary, public, admin }
}

/// Runs the command that the banner suggests in a shell.
#[tokio::test(flavor = "multi_thread")]
async fn the_printed_command_works() {
    let up = up(&[]).await;
    let text = up.binary.stdout();
    for needed in
        ["2 prefill and 2 decode", "store of 2 nodes", "simulated", "curl", "base URL", "/v1", "Ctrl-C"]
    {
        assert!(text.contains(needed), "no {needed:?} in\n{text}");
    }
    let mut lines = text.lines().skip_while(|line| !line.trim_start().starts_with("curl"));
    let command: Vec<&str> = lines.by_ref().take_while(|line| !line.trim().is_empty()).collect();
    let command = command.join("\n");
    let ran = Command::new("sh").args(["-c", &command]).env("NO_PROXY", "*").output().await.unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{command}\n{said}{}", String::from_utf8_lossy(&ran.stderr));
    assert!(said.starts_with("data: {") && said.trim_end().ends_with("data: [DONE]"), "{command}\n{said}");

    let metrics = client().get(format!("http://{}/metrics", up.admin)).send().await.unwrap();
    let metrics = metrics.text().await.unwrap();
    let counted = r#"moongate_requests_total{api="chat",code="ok"} 1"#;
    assert!(metrics.contains(counted), "the request is not in the metrics:\n{metrics}");
}

/// The predicted store tokens of a prompt for an engine with an empty cache.
async fn in_store(up: &UpFixture, messages: &Value) -> u64 {
    let body = json!({"model": "moongate-sim", "messages": messages});
    let url = format!("http://{}/debug/predict/v1/chat/completions", up.admin);
    let prediction: Value = client().post(url).json(&body).send().await.unwrap().json().await.unwrap();
    // On a busy machine tokenizing may time out: then there is no prediction.
    let engines = prediction["engines"].as_array().into_iter().flatten();
    engines.map(|engine| engine["l3_tokens"].as_u64().unwrap()).max().unwrap_or(0)
}

/// The cached tokens of a prompt according to the response.
async fn cached(up: &UpFixture, messages: &Value) -> u64 {
    let body = json!({"model": "moongate-sim", "messages": messages, "max_tokens": 4});
    let url = format!("http://{}/v1/chat/completions", up.public);
    let answer: Value = client().post(url).json(&body).send().await.unwrap().json().await.unwrap();
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_else(|| panic!("{answer}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_turn_comes_from_the_store() {
    let [first, second] = two_turns("sglang", "/flush_cache", "moongate-sim_").await;
    assert_eq!((first, second), (0, 512));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_turn_comes_from_the_store_with_vllm_too() {
    // These engines transfer KV cache through the store, so even a first turn may find pages there when it is decoded.
    let [_, second] = two_turns("vllm", "/reset_prefix_cache", "moongate-sim@tp_rank:0").await;
    assert!(second >= 512, "{second}");
}

/// The cached tokens of two turns of a conversation; the engines' own caches are flushed in between.
async fn two_turns(protocol: &str, flush_path: &str, key: &str) -> [u64; 2] {
    let up = up(&["--protocol", protocol]).await;
    let long = "a word ".repeat(300);
    let first = json!([{"role": "user", "content": long}]);
    let in_first = cached(&up, &first).await;
    let stored = async {
        while in_store(&up, &first).await < 512 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let known = tokio::time::timeout(TEST_TIMEOUT, stored).await;
    assert!(known.is_ok(), "the gateway has not indexed the stored pages");

    // Flushes the engines' own caches as printed in the banner.
    let text = up.binary.stdout();
    let flush_command =
        text.lines().find(|line| line.contains(flush_path)).unwrap_or_else(|| panic!("{text}"));
    let ran = Command::new("sh").args(["-c", flush_command]).env("NO_PROXY", "*").output().await.unwrap();
    assert!(ran.status.success(), "{ran:?}");
    let second = json!([{"role": "user", "content": long}, {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and then?"}]);
    let in_second = cached(&up, &second).await;

    let list = text.lines().find_map(|line| line.trim().strip_prefix("moongate ")).unwrap();
    let ended = MoongateProcess::run(&list.split(' ').collect::<Vec<_>>()).await;
    assert!(ended.stdout.contains(key), "{ended:?}");
    [in_first, in_second]
}

#[tokio::test(flavor = "multi_thread")]
async fn both_protocols_serve() {
    for protocol in ["sglang", "vllm"] {
        let up = up(&["--protocol", protocol, "--model", "my-model", "--prefill=1", "--decode=1"]).await;
        let url = |path: &str| format!("http://{}{path}", up.public);
        let models: Value = client().get(url("/v1/models")).send().await.unwrap().json().await.unwrap();
        assert_eq!(models["data"][0]["id"], "my-model", "{protocol}: {models}");
        let chat =
            json!({"model": "my-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4});
        let answer = client().post(url("/v1/chat/completions")).json(&chat).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{protocol}");
        let answer: Value = answer.json().await.unwrap();
        assert_eq!(answer["usage"]["completion_tokens"], 4, "{protocol}: {answer}");
        let unknown = json!({"model": "other", "messages": [{"role": "user", "content": "hi"}]});
        let refused = client().post(url("/v1/chat/completions")).json(&unknown).send().await.unwrap();
        let error = openai_error(&refused.bytes().await.unwrap());
        assert!(error["message"].as_str().unwrap().contains("my-model"), "{protocol}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_stops_it_even_with_an_open_stream() {
    let up = up(&["--time-scale=1"]).await;
    let body = json!({"model": "moongate-sim", "prompt": "go on", "stream": true, "max_tokens": 10_000});
    let url = format!("http://{}/v1/completions", up.public);
    let stream = client().post(url).json(&body).send().await.unwrap();
    assert_eq!(stream.status(), 200);
    up.binary.signal("INT").await;
    let ended = up.binary.wait_within(Duration::from_secs(10)).await;
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    assert!(ended.stdout.trim_end().ends_with("stopped"), "{}", ended.stdout);
    let mut pieces = stream.bytes_stream();
    let mut text = Vec::new();
    let mut broke = false;
    while let Some(piece) = pieces.next().await {
        match piece {
            Ok(piece) => text.extend_from_slice(&piece),
            Err(_) => broke = true,
        }
    }
    let text = String::from_utf8(text).unwrap();
    assert!(broke && !text.contains("[DONE]"), "a cut stream must not look complete: {text}");
    assert!(text.contains("shutting_down"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn second_ctrl_c_aborts_streams_without_store_errors() {
    let up = up(&["--time-scale=1"]).await;
    let body = json!({"model": "moongate-sim", "prompt": "go on", "stream": true, "max_tokens": 10_000});
    let url = format!("http://{}/v1/completions", up.public);
    let mut stream = client().post(url).json(&body).send().await.unwrap().bytes_stream();
    assert!(stream.next().await.unwrap().is_ok());
    up.binary.signal("INT").await;
    // The gateway drains, so the next signal is handled as the second one.
    let draining = async {
        let ready = format!("http://{}/ready", up.admin);
        while client().get(&ready).send().await.unwrap().status() == 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, draining).await.unwrap();
    up.binary.signal("INT").await;
    let ended = up.binary.wait_within(Duration::from_secs(10)).await;
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    assert!(ended.stdout.trim_end().ends_with("stopped"), "{ended:?}");
    assert!(!ended.stderr.contains("store"), "{}", ended.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_reported() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for flags in [
        ["--listen", &address, "--admin-listen", "127.0.0.1:0"],
        ["--listen", "127.0.0.1:0", "--admin-listen", &address],
    ] {
        let ended = MoongateProcess::run(&[&["up"], &flags[..]].concat()).await;
        assert_eq!(ended.status.code(), Some(1), "{ended:?}");
        let error = ended.stderr.lines().last().unwrap_or_default();
        assert!(error.starts_with("error: ") && error.contains(&address), "{ended:?}");
        assert!(error.contains("choose another port"), "{ended:?}");
        assert!(!ended.stdout.contains("Moongate is up"), "{ended:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_flags_are_reported() {
    for (flag, word) in [
        ("--protocol=triton", "sglang"),
        ("--prefill=0", "1..=64"),
        ("--time-scale=0", "time-scale"),
        ("--policy=fastest", "least_load"),
        ("--prefil=1", "--prefill"),
    ] {
        let ended = MoongateProcess::run(&[&FREE_PORTS[..], &[flag]].concat()).await;
        assert!(matches!(ended.status.code(), Some(1 | 2)), "{flag}: {ended:?}");
        assert!(ended.stderr.contains(word), "{flag}: {ended:?}");
        assert!(!ended.stderr.contains("panicked"), "{flag}: {ended:?}");
    }
}
