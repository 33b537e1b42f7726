//! Shutdown of the binary: open requests complete, new connections are refused, and requests beyond the deadline get an error.

use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use moongate_loadtest::engine::{EngineFault, VllmConnector};
use serde_json::{Value, json};

use crate::harness::fleet::{TestEngines, TestFleetBuilder};
use crate::harness::process::{GatewayAddresses, MoongateProcess};
use crate::harness::{TEST_TIMEOUT, client, openai_error};

/// Engines in this process, a gateway process, and a client.
struct DrainFixture {
    engines: TestEngines,
    binary: MoongateProcess,
    at: GatewayAddresses,
    client: reqwest::Client,
}

impl DrainFixture {
    /// Real decoding speed, so that a stream of 100 tokens takes two seconds.
    async fn start(fleet: TestFleetBuilder, flags: &[&str]) -> Self {
        let engines = fleet
            .tune(|mut config| {
                config.service.prefill_base_s = 0.001;
                config
            })
            .engines()
            .await;
        let mut all = engines.flags();
        all.extend(flags.iter().map(|flag| (*flag).to_owned()));
        all.push("--health-interval=0s".to_owned());
        let (binary, at) = MoongateProcess::gateway(&all).await;
        let stage = Self { engines, binary, at, client: client() };
        stage.wait_until_ready_is(200).await;
        stage
    }

    /// Polls the admin listener's `/ready` until it has this status.
    async fn wait_until_ready_is(&self, status: u16) {
        let url = format!("http://{}/ready", self.at.admin);
        let waited = tokio::time::timeout(TEST_TIMEOUT, async {
            while self.client.get(&url).send().await.is_ok_and(|response| response.status() != status) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            self.client.get(&url).send().await.is_ok_and(|response| response.status() == status)
        });
        assert_eq!(waited.await, Ok(true), "/ready does not become {status}\n{}", self.binary.output_text());
    }

    /// Sends a request and returns the response when its head (for a stream: its first event) has arrived.
    async fn send(&self, stream: bool, tokens: u32) -> reqwest::Result<reqwest::Response> {
        let body = json!({"model": "sim", "prompt": "go on", "stream": stream, "max_tokens": tokens});
        self.client.post(format!("http://{}/v1/completions", self.at.public)).json(&body).send().await
    }

    async fn wait_until_refused(&self) {
        let refused = tokio::time::timeout(TEST_TIMEOUT, async {
            while tokio::net::TcpStream::connect(&self.at.public).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        assert!(refused.await.is_ok(), "new connections are accepted while draining");
    }
}

/// The rest of a stream, and whether its body ended cleanly according to HTTP.
async fn rest(response: reqwest::Response) -> (String, bool) {
    let mut text = Vec::new();
    let mut pieces = response.bytes_stream();
    while let Some(piece) = pieces.next().await {
        match piece {
            Ok(piece) => text.extend_from_slice(&piece),
            Err(_) => return (String::from_utf8(text).unwrap(), false),
        }
    }
    (String::from_utf8(text).unwrap(), true)
}

fn tokens(stream: &str) -> usize {
    let events = stream.lines().filter_map(|line| line.strip_prefix("data: {"));
    events.filter(|event| event.contains("\"text\":\"")).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn open_streams_complete_and_new_connections_are_refused() {
    for fleet in [TestFleetBuilder::sglang(), TestFleetBuilder::vllm(VllmConnector::Nixl)] {
        let stage = DrainFixture::start(fleet.pairs(2), &[]).await;
        let mut streams = Vec::new();
        for _ in 0..3 {
            let response = stage.send(true, 60).await.unwrap();
            assert_eq!(response.status(), 200);
            streams.push(response);
        }
        stage.binary.signal("TERM").await;
        stage.wait_until_ready_is(503).await;
        // `/ready` fails shortly before the listener is closed.
        stage.wait_until_refused().await;
        for stream in streams {
            let (text, clean) = rest(stream).await;
            assert!(clean && text.ends_with("data: [DONE]\n\n"), "{text}");
            assert!(tokens(&text) >= 59, "{} tokens: {text}", tokens(&text));
        }
        let DrainFixture { engines, binary, .. } = stage;
        let ended = binary.wait_within(Duration::from_secs(5)).await;
        assert_eq!(ended.status.code(), Some(0), "{ended:?}");
        for engine in engines.all() {
            let stats = engine.stats();
            assert_eq!((stats.aborted_by_disconnect, stats.aborted_by_rid, stats.active), (0, 0, 0));
        }
    }
}

/// Load balancers need time to react: during the delay `/ready` fails on both listeners, and requests are served.
#[tokio::test(flavor = "multi_thread")]
async fn during_the_drain_delay_requests_are_served() {
    let stage = DrainFixture::start(TestFleetBuilder::sglang().pairs(1), &["--drain-delay=2s"]).await;
    let before = stage.send(false, 2).await.unwrap();
    assert_eq!(before.headers().get("connection"), None);
    stage.binary.signal("TERM").await;
    stage.wait_until_ready_is(503).await;
    let public = stage.client.get(format!("http://{}/ready", stage.at.public)).send().await.unwrap();
    assert_eq!(public.status(), 503);
    let answer: Value = public.json().await.unwrap();
    assert_eq!(answer["status"], "shutting down");
    let response = stage.send(false, 2).await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(
        response.headers()["connection"],
        "close",
        "the client should send its next request to another gateway"
    );
    let ended = stage.binary.wait().await;
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_beyond_the_drain_deadline_ends_with_an_error() {
    for fleet in [TestFleetBuilder::sglang(), TestFleetBuilder::vllm(VllmConnector::Mooncake)] {
        let stage = DrainFixture::start(fleet.pairs(1), &["--drain-deadline=300ms"]).await;
        let response = stage.send(true, 10_000).await.unwrap();
        stage.binary.signal("TERM").await;
        let (text, clean) = rest(response).await;
        assert!(!clean, "the body ended as if it were complete");
        assert!(!text.contains("[DONE]"), "{text}");
        let last = text.trim_end().rsplit("\n\n").next().unwrap();
        let error = openai_error(last.strip_prefix("data: ").unwrap().as_bytes());
        assert_eq!(error["code"], "shutting_down", "{error}");
        assert!(error["message"].as_str().unwrap().contains("incomplete"), "{error}");

        let DrainFixture { engines, binary, .. } = stage;
        let ended = binary.wait_within(Duration::from_secs(5)).await;
        assert_eq!(ended.status.code(), Some(0), "{ended:?}");
        let idle = engines.decodes[0].wait_for(TEST_TIMEOUT, |stats| stats.active == 0).await;
        assert!(idle, "the request was not aborted on the engine");
    }
}

/// A request without a response at the deadline gets a typed error, not a closed connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_response_at_the_deadline_gets_an_error() {
    for stream in [false, true] {
        let stage =
            DrainFixture::start(TestFleetBuilder::sglang().pairs(1), &["--drain-deadline=300ms"]).await;
        stage.engines.decodes[0].set_fault(EngineFault::Hang);
        let asked = stage.send(stream, 4);
        let signalled = async {
            let started = stage.engines.decodes[0].wait_for(TEST_TIMEOUT, |stats| stats.started > 0).await;
            assert!(started, "the request has not reached the decode");
            stage.binary.signal("TERM").await;
        };
        let (response, ()) = tokio::join!(asked, signalled);
        let response = response.unwrap_or_else(|error| panic!("{error:?}\n{}", stage.binary.output_text()));
        assert_eq!(response.status(), 503);
        let error = openai_error(&response.bytes().await.unwrap());
        assert_eq!(error["code"], "shutting_down", "{error}");
        let ended = stage.binary.wait_within(Duration::from_secs(5)).await;
        assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_do_not_delay_the_shutdown() {
    let stage = DrainFixture::start(TestFleetBuilder::sglang().pairs(1), &[]).await;
    // One connection that has served a request and is kept alive, and one that has never sent a byte.
    assert_eq!(stage.send(false, 2).await.unwrap().status(), 200);
    let _silent = tokio::net::TcpStream::connect(&stage.at.public).await.unwrap();
    stage.binary.signal("INT").await;
    let ended = stage.binary.wait_within(Duration::from_secs(5)).await;
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_stops_at_once() {
    let stage = DrainFixture::start(TestFleetBuilder::sglang().pairs(1), &[]).await;
    let response = stage.send(true, 10_000).await.unwrap();
    stage.binary.signal("TERM").await;
    stage.wait_until_ready_is(503).await;
    let second_signal = Instant::now();
    stage.binary.signal("TERM").await;
    let (text, clean) = rest(response).await;
    assert!(!clean && !text.contains("[DONE]"), "a cut stream must not look complete: {text}");
    let ended = stage.binary.wait_within(Duration::from_secs(5)).await;
    assert!(second_signal.elapsed() < Duration::from_secs(5), "it did not wait for 25 s");
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    assert!(ended.stderr.contains("second signal"), "{}", ended.stderr);
}
