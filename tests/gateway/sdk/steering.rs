//! Encodings of paths and names × paths × content types, against uvicorn and FastAPI behind the real gateway, in front of a plain worker and
//! of a pair: no member, field, parameter or header that steers KV transfer arrives, and no path beyond inference.

use std::net::SocketAddr;
use std::process::Stdio;

use fastrand::Rng;
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use super::{folder, installed};
use crate::harness::client;
use crate::harness::gateway::TestGateway;
use crate::harness::raw_http::exchange;

/// Requests for each shape of the fleet.
const CASES: u64 = 400;
/// Number of requests that are open at the same time.
const CONCURRENCY: usize = 8;
/// Part of every value that must not arrive; the gateway's own values never contain it.
const MARK: &str = "evil6666";

/// In a text that an engine must not read as a form.
const MARK_IN_TEXT: &str = "harmless";

const PATHS: [&str; 14] = [
    "/v1/chat/completions",
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/transcriptions",
    "/tokenize",
    "/invocations",
    "/flush_cache",
    "/v1/load_lora_adapter",
    "/v1/loads",
    "/pause_generation",
];
/// What may arrive; the last is from the settings.
const INFERENCE: [&str; 8] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/tokenize",
    "/invocations",
];
const CONTENT_TYPES: [&str; 8] = [
    "application/json",
    "application/json; charset=utf-8",
    "application/vnd.engine+json",
    "text/plain",
    "application/octet-stream",
    "application/x-www-form-urlencoded",
    "",
    "multipart/form-data; boundary=b0",
];
const MEMBERS: [&str; 12] = [
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "data_parallel_rank",
    "decode_tp_size",
    "kv_hints",
    "http_worker_ipc",
];
const HEADERS: [&str; 5] = [
    "X-Data-Parallel-Rank",
    "x-override-bootstrap-host",
    "X-Override-Disagg-Prefill-Dp-Rank",
    "x-prefiller-host-port",
    "x-kv-cache-source-host-port",
];

/// The path in one of the forms that servers take for the same, or for another.
fn encoded(rng: &mut Rng, path: &str) -> String {
    let at = rng.usize(1..path.len());
    let escape = |at: usize| format!("{}%{:02x}{}", &path[..at], path.as_bytes()[at], &path[at + 1..]);
    match rng.u8(0..10) {
        0 | 1 => path.to_owned(),
        2 => escape(at),
        3 => path[1..].replace('/', "%2f").replacen("", "/", 1),
        4 => path.replace('/', "//"),
        5 => format!("/v1/..{path}"),
        6 => format!("/v1/%2e%2E{path}/"),
        7 => escape(at).replace('%', "%25"),
        8 => format!("{path};a=b"),
        _ => path
            .bytes()
            .fold("/".to_owned(), |all, byte| all + &format!("%{byte:02X}"))
            .replacen("%2F", "", 1),
    }
}

/// A member's name in quotes, with some of its characters escaped.
fn quoted(rng: &mut Rng, name: &str) -> String {
    let escaped = rng.bool();
    let letters = name.chars().map(|letter| {
        if escaped && rng.u8(0..4) == 0 {
            format!("\\u{:04x}", u32::from(letter))
        } else {
            letter.to_string()
        }
    });
    format!("\"{}\"", letters.collect::<String>())
}

fn steering(rng: &mut Rng) -> String {
    let name = MEMBERS[rng.usize(..MEMBERS.len())];
    let member = quoted(rng, name);
    match rng.u8(0..5) {
        0 => format!("{member}:\"{MARK}\""),
        1 => format!("{member} : {{ \"remote_host\":\"{MARK}\",\"do_remote_prefill\":true}}"),
        2 => format!("{member}:[\"{MARK}\",null]"),
        3 => format!("\"vllm_xargs\":{{\"a\":1,{member}:\"{MARK}\"}}"),
        _ => format!("\"sampling_params\":{{\"extra_args\":{{{member}:{{\"x\":[\"{MARK}\"]}}}}}}"),
    }
}

/// A JSON body that keeps a user's own words, among them such names.
fn body(rng: &mut Rng) -> String {
    // The text is a form as well, if an engine reads it as one.
    let form = format!("\"user\":\"&{}=x{MARK_IN_TEXT}&\"", MEMBERS[rng.usize(..MEMBERS.len())]);
    let mut members = vec![
        form,
        "\"model\":\"m\"".to_owned(),
        "\"messages\":[{\"role\":\"user\",\"content\":\"\\\"kv_transfer_params\\\":1\",\"kv_hints\":1}]"
            .to_owned(),
        "\"prompt\":\"a\",\"text\":\"a\",\"input\":\"a\"".to_owned(),
        "\"keep\": 1.50".to_owned(),
    ];
    // The same container twice would be the user's mistake; the same member twice is what is tried here.
    for _ in 0..rng.usize(1..4) {
        let steering = steering(rng);
        let twice =
            rng.u8(0..4) == 0 && !steering.starts_with("\"sampling") && !steering.starts_with("\"vllm");
        members.push(if twice { format!("{steering},{steering}") } else { steering });
    }
    let mut seen = 0;
    members.retain(|member| {
        seen += usize::from(member.starts_with("\"sampling"));
        !member.starts_with("\"sampling") || seen == 1
    });
    rng.shuffle(&mut members);
    format!("{{ {} }}", members.join(" , "))
}

fn form(rng: &mut Rng) -> String {
    let field = |name: &str, value: &str| {
        format!("--b0\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
    };
    let member = MEMBERS[rng.usize(..MEMBERS.len())];
    let mut fields = vec![
        field("model", "m"),
        field("keep", "1.50"),
        field(member, MARK),
        field("vllm_xargs", &format!("{{\"a\":1, {}}}", steering(rng))),
        format!(
            "--b0\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n\0\u{1}\r\n"
        ),
    ];
    rng.shuffle(&mut fields);
    format!("{}--b0--\r\n", fields.concat())
}

fn request(rng: &mut Rng, case: u64) -> Vec<u8> {
    let path = PATHS[rng.usize(..PATHS.len())];
    let content_type = CONTENT_TYPES[rng.usize(..CONTENT_TYPES.len())];
    let body = if content_type.starts_with("multipart") { form(rng) } else { body(rng) };
    let query = match rng.u8(0..4) {
        0 => format!("?a=1&{}={MARK}", MEMBERS[rng.usize(..MEMBERS.len())].replace('_', "%5f")),
        1 => "?keep=1.50".to_owned(),
        _ => String::new(),
    };
    let header = HEADERS[rng.usize(..HEADERS.len())];
    let content_type =
        if content_type.is_empty() { String::new() } else { format!("content-type: {content_type}\r\n") };
    let target = encoded(rng, path);
    format!(
        "POST {target}{query} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\nx-case: {case}\r\nx-request-id: case-{case}\r\n{header}: {MARK}\r\n\
         {content_type}content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Engines on a real server.
struct UvicornEngines {
    engines: Vec<SocketAddr>,
    _child: Child,
}

impl UvicornEngines {
    async fn start(roles: &[&str]) -> Self {
        let python = installed().await.join("venv/bin/python");
        let mut command = Command::new(python);
        command.arg(folder().join("engines.py")).args(roles).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ports: Vec<u16> = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
        Self {
            engines: ports.into_iter().map(|port| SocketAddr::from(([127, 0, 0, 1], port))).collect(),
            _child: child,
        }
    }

    /// What reached all of them from clients.
    async fn received(&self) -> Vec<Value> {
        let mut all = Vec::new();
        for engine in &self.engines {
            let seen = client().get(format!("http://{engine}/seen")).send().await.unwrap();
            all.extend(seen.json::<Vec<Value>>().await.unwrap());
        }
        all
    }
}

async fn assert_nothing_steers(served: UvicornEngines, flags: Vec<String>, is_pair: bool) {
    let flags: Vec<String> = flags.into_iter().chain(["--inference-path=/invocations".to_owned()]).collect();
    let gateway = TestGateway::start_ready(&flags).await;
    let address = gateway.running.address;
    let mut rng = Rng::with_seed(20);
    let requests: Vec<Vec<u8>> = (0..CASES).map(|case| request(&mut rng, case)).collect();
    let statuses: Vec<u16> = futures_util::stream::iter(requests)
        .map(|request| async move { exchange(address, &request).await.status })
        .buffer_unordered(CONCURRENCY)
        .collect()
        .await;
    assert!(statuses.iter().all(|status| matches!(status, 200 | 400 | 404 | 405 | 415)), "{statuses:?}");

    let seen = served.received().await;
    let served_cases = statuses.iter().filter(|status| **status == 200).count();
    assert!(served_cases > 100 && seen.len() >= served_cases, "{served_cases} served, {} seen", seen.len());
    for one in &seen {
        let path = one["path"].as_str().unwrap();
        assert!(INFERENCE.contains(&path), "{one:#}");
        assert!(!one.to_string().contains(MARK), "{one:#}");
        assert!(!one["form"].to_string().contains(MARK_IN_TEXT), "{one:#}");
        assert_eq!(
            one["headers"]["x-request-id"],
            format!("case-{}", one["headers"]["x-case"].as_str().unwrap())
        );
        if one["form"] == json!({}) {
            assert_eq!(one["json"]["keep"], json!(1.5), "{one:#}");
            assert_eq!(one["json"]["messages"][0]["kv_hints"], json!(1), "{one:#}");
        } else {
            assert_eq!(one["form"]["keep"], json!([1.5]), "{one:#}");
            assert_eq!(one["form"]["vllm_xargs"][0]["a"], json!(1), "{one:#}");
        }
        if is_pair && matches!(path, "/v1/chat/completions" | "/v1/completions" | "/generate") {
            // Whatever the path looked like, the gateway has driven the pair's protocol for it.
            assert_eq!(one["json"]["bootstrap_host"], "127.0.0.1", "{one:#}");
        }
    }
    for path in INFERENCE {
        assert!(seen.iter().any(|one| one["path"] == path), "{path} was never reached");
    }
    assert!(seen.iter().any(|one| one["form"] != json!({})), "no form was taken");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_steers_kv_transfer_reaches_a_plain_worker() {
    let served = UvicornEngines::start(&["null"]).await;
    let flags = vec![format!("--worker=http://{}", served.engines[0])];
    assert_nothing_steers(served, flags, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_steers_kv_transfer_reaches_a_pair() {
    let served = UvicornEngines::start(&["prefill", "decode"]).await;
    let [prefill, decode] = served.engines[..] else { panic!("two engines were asked for") };
    let flags =
        vec![format!("--prefill=http://{prefill},{}", prefill.port()), format!("--decode=http://{decode}")];
    assert_nothing_steers(served, flags, true).await;
}
