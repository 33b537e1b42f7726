//! Bodies that do not end take no more memory than they may.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use moongate_loadtest::engine::EngineFault;

use crate::harness::fleet::TestFleetBuilder;
use crate::harness::process::MoongateProcess;
use crate::harness::raw_http::{RawHttpConnection, exchange, post};
use crate::harness::{TEST_TIMEOUT, client, openai_error};

const MIB: usize = 1 << 20;
const CLIENTS: usize = 80;
const REFUSALS: &str = "moongate_overload_rejections_total{reason=\"body_memory\"}";
const BODY: &str = r#"{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":1}"#;

/// Kilobytes of a line in `/proc/PID/status`.
fn memory(process: u32, line: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let value = status.lines().find_map(|text| text.strip_prefix(line)).unwrap();
    value.trim_matches([':', ' ', '\t', 'k', 'B']).parse().unwrap()
}

/// Sends a head that declares `declared` bytes, and `sent` of them.
async fn half_sent(address: SocketAddr, declared: usize, sent: usize) -> RawHttpConnection {
    let mut connection = RawHttpConnection::open(address).await;
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: {declared}\r\n\r\n");
    connection.send(head.as_bytes()).await;
    let piece = vec![b' '; sent.min(MIB)];
    for _ in 0..sent / piece.len().max(1) {
        if !connection.send(&piece).await {
            break;
        }
    }
    connection
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_bodies_stay_within_their_memory_and_streams_go_on() {
    let slow = TestFleetBuilder::sglang().plain(1).engines().await;
    let mut flags = slow.flags();
    flags.extend(["--body-memory=16777216".to_owned(), "--prompt-memory=4194304".to_owned()]);
    let (gateway, addresses) = MoongateProcess::gateway(&flags).await;
    let address: SocketAddr = addresses.public.parse().unwrap();
    let url = format!("http://{address}/v1/chat/completions");
    while client().get(format!("http://{}/ready", addresses.admin)).send().await.unwrap().status() != 200 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let request =
        r#"{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":100000,"stream":true}"#;
    let mut stream = client().post(&url).body(request).send().await.unwrap().bytes_stream();
    stream.next().await.unwrap().unwrap();
    let before = memory(gateway.id(), "VmRSS");
    assert_eq!(memory(gateway.id(), "THP_enabled"), 0, "a small heap would leave most of huge pages unused");

    // All together would need 400 MiB. At most two fit: only the bytes of bodies count, not the copies in buffers.
    let clients = join_all((0..CLIENTS).map(|_| half_sent(address, 8 * MIB, 5 * MIB))).await;
    let mut responses: FuturesUnordered<_> =
        clients.into_iter().map(async |mut client: RawHttpConnection| client.response().await).collect();
    for _ in 0..CLIENTS - 2 {
        let response = responses.next().await.unwrap();
        assert_eq!(response.status, 503, "{response:?}");
        assert!(response.head.to_ascii_lowercase().contains("retry-after: 1"), "{response:?}");
        assert_eq!(openai_error(&response.body)["code"], "gateway_overloaded");
    }
    let grown = memory(gateway.id(), "VmHWM").saturating_sub(before);
    assert!(grown < 160 << 10, "memory has grown by {grown} kB");
    // Small requests have a share that large ones do not take, and the open stream flows.
    let response = exchange(address, &post("/v1/chat/completions", BODY.as_bytes())).await;
    assert_eq!(response.status, 200, "{response:?}");
    for _ in 0..3 {
        tokio::time::timeout(TEST_TIMEOUT, stream.next()).await.unwrap().unwrap().unwrap();
    }

    drop(responses);
    let admin = format!("http://{}/metrics", addresses.admin);
    let used = async || client().get(&admin).send().await.unwrap().text().await.unwrap();
    let metrics = used().await;
    let line = metrics.lines().find_map(|line| line.strip_prefix(REFUSALS)).unwrap();
    // Each refused request counts once. One that fits may still be refused by what others have at that moment.
    let refused: usize = line.trim().parse().unwrap();
    assert!((CLIENTS - 2..=CLIENTS).contains(&refused), "{refused}");
    while !used().await.contains("moongate_body_memory_bytes 0\n") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let large = format!("{}{BODY}", " ".repeat(8 * MIB));
    let response = exchange(address, &post("/v1/chat/completions", large.as_bytes())).await;
    assert_eq!(response.status, 200, "{} {}", String::from_utf8_lossy(&response.body), gateway.output_text());
}

/// What is declared costs nothing, and connections that wait for the rest of a body have a share of the memory as well: with what a container of
/// 2 GiB has for bodies, ten thousand of them stay under 100 MB, and those that find no room learn it at once.
#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_unfinished_bodies_stay_under_100_mb() {
    const CLIENTS: usize = 10_000;
    const WAITING: usize = 2048;
    const PIECE: usize = 200;
    let flags =
        ["--registration", "--body-memory=536870912", "--max-connections=10100"].map(str::to_owned).to_vec();
    let (gateway, addresses) = MoongateProcess::gateway(&flags).await;
    let address: SocketAddr = addresses.public.parse().unwrap();
    let before = memory(gateway.id(), "VmRSS");
    let mut waiting = Vec::new();
    for _ in 0..WAITING {
        waiting.push(half_sent(address, 25_000_000, PIECE).await);
    }
    let admin = format!("http://{}/metrics", addresses.admin);
    let metrics = async || client().get(&admin).send().await.unwrap().text().await.unwrap();
    while !metrics().await.contains(&format!("moongate_body_memory_bytes {}\n", WAITING * PIECE)) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for _ in WAITING..CLIENTS {
        let response = half_sent(address, 25_000_000, PIECE).await.response().await;
        assert_eq!(response.status, 503, "{response:?}");
        assert!(response.head.to_ascii_lowercase().contains("retry-after: 1"), "{response:?}");
        assert_eq!(openai_error(&response.body)["code"], "gateway_overloaded");
    }
    let metrics = metrics().await;
    assert!(metrics.contains(&format!("{REFUSALS} {}\n", CLIENTS - WAITING)), "{metrics}");
    let grown = memory(gateway.id(), "VmHWM").saturating_sub(before);
    assert!(grown < 100_000, "{grown} kB for {} bodies", waiting.len());
}

/// A body from which members were taken out is another piece of memory, and counts for as long as the request is in progress.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_without_some_members_stays_counted() {
    let engines = TestFleetBuilder::sglang().plain(1).engines().await;
    let (_gateway, addresses) = MoongateProcess::gateway(&engines.flags()).await;
    let address: SocketAddr = addresses.public.parse().unwrap();
    let admin = format!("http://{}", addresses.admin);
    while client().get(format!("{admin}/ready")).send().await.unwrap().status() != 200 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let worker = &engines.workers[0];
    worker.set_fault(EngineFault::Hang);
    let started = worker.stats().started;
    let members = BODY.strip_suffix('}').unwrap();
    let body = format!("{}{members},\"bootstrap_room\":7}}", " ".repeat(2 * MIB));
    let mut held = RawHttpConnection::open(address).await;
    assert!(held.send(&post("/v1/chat/completions", body.as_bytes())).await);
    while worker.stats().started == started {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let metrics = client().get(format!("{admin}/metrics")).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("moongate_stripped_requests_total 1\n"), "{metrics}");
    let used = metrics.lines().find_map(|line| line.strip_prefix("moongate_body_memory_bytes "));
    let used: usize = used.unwrap().parse().unwrap();
    assert!((2 * MIB..3 * MIB).contains(&used), "{used} bytes are counted");
}
