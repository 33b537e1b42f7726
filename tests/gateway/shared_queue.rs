//! Several gateways with one queue.

use std::time::Duration;

use moongate_testkit::free_port;
use serde_json::{Value, json};

use crate::harness::client;
use crate::harness::fleet::{TestEngines, TestFleetBuilder};
use crate::harness::gateway::TestGateway;
use crate::harness::metrics::metric_at;
use crate::harness::process::MoongateProcess;
use crate::harness::tls::{generate_certificates, get_over_tls};
use crate::harness::{TEST_TIMEOUT, wait_until};

const FOLLOWS: &str = "moongate_shared_queue_follows";
const FOLLOWERS: &str = "moongate_shared_queue_followers";
const BY_LEADER: &str = "moongate_shared_queue_requests_total{outcome=\"decided_by_leader\"}";
const QUEUED: &str = "moongate_requests_queued";
const DECODE_TOKENS: &str = "moongate_engine_active_decode_tokens";

/// Gateways in front of the same engines. The first one is the oldest, so it leads.
struct GatewayGroup {
    engines: TestEngines,
    gateways: Vec<TestGateway>,
    client: reqwest::Client,
}

impl GatewayGroup {
    /// Starts `count` gateways one after the other, each with `flags`, and waits until all others follow the first.
    async fn start(fleet: TestFleetBuilder, count: usize, flags: &[&str]) -> Self {
        let engines = fleet.engines().await;
        let ports: Vec<u16> = (0..count).map(|_| free_port()).collect();
        let client = client();
        let mut gateways = Vec::new();
        for port in &ports {
            let mut all = engines.flags();
            all.push(format!("--admin-listen=127.0.0.1:{port}"));
            all.extend(ports.iter().map(|port| format!("--queue-peer=127.0.0.1:{port}")));
            all.extend(flags.iter().map(|&flag| flag.to_owned()));
            gateways.push(TestGateway::start_ready(&all).await);
            // Starts in the same millisecond would be ordered by a random number.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let group = Self { engines, gateways, client };
        group.wait_for(0, FOLLOWERS, count as u64 - 1).await;
        group
    }

    async fn metric(&self, gateway: usize, name: &str) -> u64 {
        metric_at(&self.client, &self.gateways[gateway].admin_url(""), name).await
    }

    async fn wait_for(&self, gateway: usize, name: &str, value: u64) {
        let waited = tokio::time::timeout(TEST_TIMEOUT, async {
            while self.metric(gateway, name).await != value {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        assert!(waited.await.is_ok(), "{name} of gateway {gateway} is not {value}");
    }

    /// Sends a completion through one gateway.
    #[expect(clippy::disallowed_methods, reason = "the tests await their requests")]
    fn send(&self, gateway: usize, id: &str, prompt_words: usize) -> tokio::task::JoinHandle<u16> {
        let model = self.engines.all().next().unwrap().options().model.clone();
        let prompt = format!("{id} {}", "word ".repeat(prompt_words));
        let body = json!({"model": model, "prompt": prompt, "max_tokens": 2, "stream": true});
        let url = self.gateways[gateway].url("/v1/completions");
        let request = self.client.post(url).header("x-request-id", id).json(&body);
        tokio::spawn(async move {
            let response = request.send().await.unwrap();
            let status = response.status().as_u16();
            assert!(response.bytes().await.unwrap().ends_with(b"data: [DONE]\n\n"));
            status
        })
    }
}

/// Words of a prompt for which a request waits in the queue while another one is computed.
const LONG: usize = 20_000;

/// A prefill that computes any prompt for a part of a second, and one decode.
fn slow_pair() -> TestFleetBuilder {
    TestFleetBuilder::sglang().pairs(1).tune(|mut config| {
        config = config.fast();
        config.service.prefill_base_s = 400.0;
        config
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn oldest_gateway_decides_for_all() {
    let group = GatewayGroup::start(TestFleetBuilder::sglang().pairs(2), 3, &[]).await;
    for gateway in 0..3 {
        for number in 0..5 {
            let id = format!("g{gateway}-{number}");
            assert_eq!(group.send(gateway, &id, 10).await.unwrap(), 200);
        }
    }
    for gateway in [1, 2] {
        assert_eq!(group.metric(gateway, BY_LEADER).await, 5);
        assert_eq!(group.metric(gateway, FOLLOWS).await, 1);
    }
    // The leader explains the decisions for all.
    let admin = group.gateways[0].admin_url("/debug/decisions/g2-3");
    let answer: Value = group.client.get(admin).send().await.unwrap().json().await.unwrap();
    assert_eq!(answer["decisions"][0]["policy"], "predictive", "{answer}");
    // No load is left at the leader.
    for engine in group.engines.decodes.iter() {
        group.wait_for(0, &format!("{DECODE_TOKENS}{{instance=\"{}\"", engine.url()), 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shortest_request_of_all_gateways_goes_first() {
    let group = GatewayGroup::start(slow_pair(), 2, &[]).await;
    let first = group.send(0, "first", LONG);
    wait_until("the first request is computed", || group.engines.started() > 0).await;
    let long = group.send(0, "long", LONG);
    let queued = |count| group.wait_for(0, QUEUED, count);
    queued(1).await;
    let short = group.send(1, "short", LONG / 20);
    queued(2).await;
    for request in [first, long, short] {
        assert_eq!(request.await.unwrap(), 200);
    }
    let order: Vec<String> = group.engines.prefills[0]
        .recent_requests(3)
        .iter()
        .filter_map(|sent| first_word(&sent.body))
        .collect();
    assert_eq!(order, ["first", "short", "long"]);
}

fn first_word(body: &[u8]) -> Option<String> {
    let body: Value = serde_json::from_slice(body).ok()?;
    Some(body["prompt"].as_str()?.split(' ').next()?.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn queued_requests_survive_their_leader() {
    let mut group = GatewayGroup::start(slow_pair(), 3, &[]).await;
    let requests: Vec<_> =
        (0..6).map(|number| group.send(1 + number % 2, &format!("r{number}"), LONG)).collect();
    group.wait_for(0, QUEUED, 5).await;
    drop(group.gateways.remove(0));
    for request in requests {
        assert_eq!(request.await.unwrap(), 200);
    }
    // The second gateway leads now.
    group.wait_for(0, FOLLOWERS, 1).await;
    let before = group.metric(1, BY_LEADER).await;
    assert_eq!(group.send(1, "after", 10).await.unwrap(), 200);
    assert_eq!(group.metric(1, BY_LEADER).await, before + 1);
    group.wait_for(0, FOLLOWS, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn followers_that_leave_take_their_requests_with_them() {
    let mut group = GatewayGroup::start(slow_pair(), 2, &[]).await;
    let requests: Vec<_> = (0..3).map(|number| group.send(1, &format!("r{number}"), LONG)).collect();
    group.wait_for(0, QUEUED, 2).await;
    requests.iter().for_each(tokio::task::JoinHandle::abort);
    drop(group.gateways.remove(1));
    group.wait_for(0, QUEUED, 0).await;
    group.wait_for(0, FOLLOWERS, 0).await;
    assert_eq!(group.send(0, "own", 10).await.unwrap(), 200);
    let decode = group.engines.decodes[0].url();
    group.wait_for(0, &format!("{DECODE_TOKENS}{{instance=\"{decode}\""), 0).await;
}

/// The admin listeners require certificates that they all have.
#[tokio::test(flavor = "multi_thread")]
async fn gateways_with_certificates_share_a_queue() {
    let (authority, server, own) = generate_certificates();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let ca = file("ca.pem", &authority);
    let ports = [free_port(), free_port()];
    let flags = [
        format!("--admin-tls-cert={}", file("server.pem", &server.0)),
        format!("--admin-tls-key={}", file("server.key", &server.1)),
        format!("--admin-tls-client-ca={ca}"),
        format!("--queue-peer-ca={ca}"),
        format!("--queue-peer-tls-cert={}", file("own.pem", &own.0)),
        format!("--queue-peer-tls-key={}", file("own.key", &own.1)),
        "--queue-peer-tls-name=localhost".to_owned(),
    ];
    let engines = TestFleetBuilder::sglang().pairs(1).engines().await;
    let mut gateways = Vec::new();
    for port in ports {
        let mut all = [&engines.flags()[..], &flags].concat();
        all.push(format!("--admin-listen=127.0.0.1:{port}"));
        all.extend(ports.map(|port| format!("--queue-peer=https://127.0.0.1:{port}")));
        gateways.push(TestGateway::start(&all).await);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let client = client();
    let model = engines.prefills[0].options().model.clone();
    let body = json!({"model": model, "prompt": "x", "max_tokens": 1});
    let leader = format!("127.0.0.1:{}", ports[0]);
    let decided = tokio::time::timeout(TEST_TIMEOUT, async {
        for number in 0.. {
            let id = format!("r{number}");
            let url = gateways[1].url("/v1/completions");
            drop(client.post(url).header("x-request-id", &id).json(&body).send().await.unwrap());
            let path = format!("/debug/decisions/{id}");
            let status = get_over_tls(&leader, &path, &authority, Some(&own)).await.unwrap();
            if status.contains("200") {
                return;
            }
        }
    });
    assert!(decided.await.is_ok(), "the first gateway decides nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn gateways_need_the_token_of_their_peers() {
    let token = "--admin-token=secret-secret-secret";
    let engines = TestFleetBuilder::sglang().pairs(1).engines().await;
    let (port, client) = (free_port(), client());
    let mut flags = engines.flags();
    flags.extend([
        format!("--admin-listen=127.0.0.1:{port}"),
        token.to_owned(),
        format!("--queue-peer=127.0.0.1:{port}"),
    ]);
    let leader = TestGateway::start(&flags).await;
    for path in ["/queue/identity", "/queue/tickets"] {
        let method = if path.ends_with("identity") { reqwest::Method::GET } else { reqwest::Method::POST };
        let response = client.request(method, leader.admin_url(path)).send().await.unwrap();
        assert_eq!(response.status(), 401, "{path}");
    }
    // A gateway without it decides alone, and logs why.
    let mut flags = engines.flags();
    flags.push(format!("--queue-peer=127.0.0.1:{port}"));
    let (mut other, _) = MoongateProcess::gateway(&flags).await;
    let line = other.wait_for_line("of the shared queue does not answer").await;
    assert!(line.contains("HTTP status 401") && line.contains("--queue-peer-token"), "{line}");
}
