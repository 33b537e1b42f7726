//! KV events: a consumer of them predicts the engine's cache hits.

use std::collections::HashMap;
use std::net::SocketAddr;

use bytes::Bytes;
use mooncake_wire::events::{BlockHash, EngineEvent, EngineEventBatch, EventFrames, StorageMedium};
use moongate_block_hash::{BlockHashChain, DEFAULT_VLLM_SEED, HashScheme, HashedBlock, VllmExtraKeys};
use moongate_loadtest::engine::{
    EngineFault, KvEventOptions, SimEngine, SimEngineOptions, SimProtocol, SimRole, tokens,
};
use moongate_zmtp::{SubscriberEvent, ZmtpEndpoint, ZmtpOptions, ZmtpSubscriber, request};
use serde_json::{Value, json};

use super::{LONG, client, get, post, with};

const PAGE: usize = 16;

fn publishing(protocol: SimProtocol) -> SimEngineOptions {
    let mut config = SimEngineOptions::new(SimRole::Plain, protocol).fast();
    config.page_size = PAGE;
    config.kv_events = Some(KvEventOptions::default());
    config
}

/// A router's view of one rank's cache.
#[derive(Default)]
struct TestKvIndex {
    /// Number of the next message.
    next: u64,
    /// Tokens of each page, by medium and hash.
    pages: HashMap<(String, u64), Vec<u32>>,
    removed: HashMap<String, usize>,
    cleared: usize,
    salted: usize,
}

impl TestKvIndex {
    /// Requests all messages since the last call.
    async fn catch_up(&mut self, replay: SocketAddr, rank: u32) {
        let from = Bytes::copy_from_slice(&self.next.to_be_bytes());
        let mut replies = request(&ZmtpEndpoint::from(replay), [from].into(), &ZmtpOptions::default())
            .await
            .expect("a socket");
        loop {
            let message =
                tokio::time::timeout(LONG, replies.recv()).await.expect("in time").expect("a reply");
            let frames = EventFrames::parse(message.parts()).expect("three frames");
            if frames.ends_replay() {
                return;
            }
            assert_eq!(frames.sequence, self.next);
            self.next += 1;
            let batch = EngineEventBatch::decode(frames.payload).expect("a batch");
            assert_eq!(batch.dp_rank, Some(rank));
            for event in batch.events() {
                self.apply(&event.expect("an event"));
            }
        }
    }

    fn apply(&mut self, event: &EngineEvent<'_>) {
        match event {
            EngineEvent::Stored(stored) => {
                let medium = stored.medium.expect("a medium").to_string();
                let tokens: Vec<u32> = stored.tokens.expect("tokens").iter().collect();
                assert_eq!((stored.block_size as usize, tokens.len()), (PAGE, PAGE * stored.hashes.len()));
                let salted =
                    stored.cache_salt.is_some() || stored.extra_keys.is_some_and(|keys| keys.has_any());
                self.salted += usize::from(salted);
                for (hash, tokens) in stored.hashes.iter().zip(tokens.chunks(PAGE)) {
                    let cached = self.pages.insert((medium.clone(), hash.low64()), tokens.to_vec());
                    assert!(cached.is_none(), "stored twice");
                }
            }
            EngineEvent::Removed(removed) => {
                let medium = removed.medium.expect("a medium").to_string();
                for hash in removed.hashes.iter().map(BlockHash::low64) {
                    assert!(self.pages.remove(&(medium.clone(), hash)).is_some(), "was not there");
                    *self.removed.entry(medium.clone()).or_default() += 1;
                }
            }
            EngineEvent::Cleared(_) => {
                self.cleared += 1;
                self.pages.clear();
            }
        }
    }

    /// Pages of a prompt on a medium, from its beginning or from the end of another medium's pages.
    fn leading(&self, medium: StorageMedium<'_>, names: &[HashedBlock], prompt: &[u32]) -> usize {
        let cached = names.iter().zip(prompt.chunks(PAGE)).take_while(|(name, tokens)| {
            let reported = self.pages.get(&(medium.to_string(), name.event_hash));
            reported.inspect(|reported| assert_eq!(reported, tokens, "the page's own tokens")).is_some()
        });
        cached.count()
    }
}

/// Hashes of a prompt's pages under the namespace of a request.
fn names(protocol: SimProtocol, prompt: &[u32], namespace: &Value) -> Vec<HashedBlock> {
    let cache_salt = namespace["cache_salt"].as_str();
    let scheme = match protocol {
        SimProtocol::Sglang => HashScheme::sglang_events(PAGE as u32, cache_salt),
        SimProtocol::Vllm => HashScheme::vllm_sha256_cbor(
            PAGE as u32,
            DEFAULT_VLLM_SEED,
            VllmExtraKeys { adapter: None, cache_salt },
        ),
    };
    let mut names = Vec::new();
    BlockHashChain::new(scheme.expect("a scheme")).extend(prompt, &mut names);
    names
}

async fn complete(engine: &SimEngine, prompt: &[u32], more: &Value) -> (usize, String) {
    let body = with(&json!({"model": "sim", "prompt": prompt, "max_tokens": 20}), more.clone());
    let (status, response) = post(engine, "/v1/completions", &body).await;
    assert_eq!(status, 200);
    let cached = response["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default();
    (
        usize::try_from(cached).expect("small"),
        response["choices"][0]["text"].as_str().expect("a text").to_owned(),
    )
}

/// Conversations of several tenants, in a cache that is too small for them.
#[tokio::test]
async fn events_predict_every_hit() {
    for protocol in [SimProtocol::Sglang, SimProtocol::Vllm] {
        let mut config = publishing(protocol);
        (config.device_tokens, config.host_tokens) = (30 * PAGE, 45 * PAGE);
        let engine = SimEngine::start(config).await.expect("an engine");
        let (_, replay) = engine.kv_event_addrs(0).expect("events");
        let host =
            if protocol == SimProtocol::Sglang { StorageMedium::CpuPinned } else { StorageMedium::Cpu };
        let mut namespaces = vec![json!({}), json!({"cache_salt": "tenant"})];
        if protocol == SimProtocol::Vllm {
            // vLLM ignores this member.
            namespaces.push(json!({"cache_salt": "tenant", "extra_key": "lane"}));
        }
        let mut random = fastrand::Rng::with_seed(7);
        let mut conversations: Vec<Vec<u32>> = (0..6).map(|start| vec![start; 40]).collect();
        let mut index = TestKvIndex::default();
        let (mut on_device, mut on_host) = (0, 0);
        for number in 0..150 {
            let prompt = random.choice(&mut conversations).expect("some");
            if prompt.len() > 400 {
                prompt.truncate(90);
            }
            let namespace = random.choice(&namespaces).expect("some");
            index.catch_up(replay, 0).await;
            let all = names(protocol, prompt, namespace);
            let usable = &all[..(prompt.len() - 1) / PAGE];
            let device = index.leading(StorageMedium::Gpu, usable, prompt);
            let on_host_after = index.leading(host, &usable[device..], &prompt[device * PAGE..]);
            let (cached, text) = complete(&engine, prompt, namespace).await;
            assert_eq!(cached, (device + on_host_after) * PAGE, "{protocol:?} turn {number}");
            (on_device, on_host) = (on_device + device, on_host + on_host_after);
            prompt.extend(tokens::tokens_of_text(&text));
            prompt.extend((0..random.u32(0..30)).map(|_| random.u32(..1_000)));
        }
        assert!(on_device > 100 && on_host > 10, "{protocol:?} {on_device} {on_host}");
        assert!(
            index.removed["GPU"] > 50 && index.removed[host.name()] > 50 && index.salted > 10,
            "{protocol:?}"
        );
        // SGLang publishes one clear at its start.
        let initial_clears = usize::from(protocol == SimProtocol::Sglang);
        assert_eq!(index.cleared, initial_clears);
        let path = if protocol == SimProtocol::Sglang { "/flush_cache" } else { "/reset_prefix_cache" };
        client().post(format!("{}{path}", engine.url())).send().await.expect("a response");
        index.catch_up(replay, 0).await;
        assert_eq!((index.cleared, index.pages.len()), (initial_clears + 1, 0));
    }
}

/// SGLang separates prompts with different extra keys, but its events give them the same hash.
#[tokio::test]
async fn sglang_events_omit_extra_keys() {
    let engine = SimEngine::start(publishing(SimProtocol::Sglang)).await.expect("an engine");
    let (_, replay) = engine.kv_event_addrs(0).expect("events");
    for (number, namespace) in [(1, json!({})), (2, json!({"extra_key": "lane"}))] {
        let more = with(&namespace, json!({"max_tokens": 1}));
        assert_eq!(complete(&engine, &[5; 33], &more).await.0, 0);
        assert_eq!(complete(&engine, &[5; 33], &more).await.0, 32);
        let payload = replayed(replay, number).await;
        let events: Vec<_> = EngineEventBatch::decode(&payload).expect("a batch").events().collect();
        let [Ok(EngineEvent::Stored(stored))] = events[..] else { panic!("{events:?}") };
        let reported: Vec<u64> = stored.hashes.iter().map(BlockHash::low64).collect();
        let expected: Vec<u64> =
            names(SimProtocol::Sglang, &[5; 32], &json!({})).iter().map(|page| page.event_hash).collect();
        assert_eq!(reported, expected);
    }
}

/// Payloads of real engines, recorded for the decoder's tests.
fn recorded(name: &str) -> Vec<(Value, Vec<u8>)> {
    let path = format!("{}/../kvstore/wire/tests/vectors/events/{name}.jsonl", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).expect("a recording");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    lines
        .map(|line| {
            let hex = line["payload_hex"].as_str().expect("hex");
            let byte = |start| u8::from_str_radix(&hex[start..start + 2], 16).expect("hex");
            (line["batch"][1].clone(), (0..hex.len()).step_by(2).map(byte).collect())
        })
        .collect()
}

/// The first payload from a number on.
async fn replayed(replay: SocketAddr, number: u64) -> Vec<u8> {
    let (endpoint, options) = (ZmtpEndpoint::from(replay), ZmtpOptions::default());
    let body = [Bytes::copy_from_slice(&number.to_be_bytes())].into();
    let mut replies = request(&endpoint, body, &options).await.expect("a socket");
    let reply = tokio::time::timeout(LONG, replies.recv()).await.expect("in time").expect("a reply");
    let frames = EventFrames::parse(reply.parts()).expect("three frames");
    assert_eq!(frames.sequence, number);
    frames.payload.to_vec()
}

/// A prompt that was recorded with a real engine has the same pages here, in the same bytes.
#[tokio::test]
async fn recorded_prompts_give_the_recorded_payloads() {
    // Head of the array and timestamp.
    const BEFORE_EVENTS: usize = 10;
    for (protocol, name) in
        [(SimProtocol::Sglang, "sglang-0.5.23"), (SimProtocol::Vllm, "vllm-0.32-mooncake-store")]
    {
        let mut config = publishing(protocol);
        config.page_size = 32;
        config.host_tokens = if protocol == SimProtocol::Sglang { 100_000 } else { 0 };
        let (mut compared, mut salted) = (0, 0);
        for (events, payload) in recorded(name) {
            let own = ["GPU", "CPU_PINNED"].iter().position(|medium| events[0]["medium"] == **medium);
            let ([event], Some(message)) = (events.as_array().expect("events").as_slice(), own) else {
                continue;
            };
            if event["type"] != "BlockStored" || !event["parent_block_hash"].is_null() {
                continue;
            }
            let salt = if protocol == SimProtocol::Sglang {
                &event["cache_salt"]
            } else {
                &event["extra_keys"][0][0]
            };
            let mut prompt: Vec<u32> = serde_json::from_value(event["token_ids"].clone()).expect("tokens");
            prompt.push(7);
            let engine = SimEngine::start(config.clone()).await.expect("an engine");
            complete(&engine, &prompt, &json!({"cache_salt": salt, "max_tokens": 1})).await;
            let (_, replay) = engine.kv_event_addrs(0).expect("events");
            let number = message as u64 + u64::from(protocol == SimProtocol::Sglang);
            let simulated = replayed(replay, number).await;
            assert!(simulated[BEFORE_EVENTS..] == payload[BEFORE_EVENTS..], "{name}: {event}");
            (compared, salted) = (compared + 1, salted + usize::from(!salt.is_null()));
        }
        assert!(compared > 5 && salted > 0, "{name}: {compared}, {salted} salted");
    }
}

async fn next_subscriber_event(subscriber: &mut ZmtpSubscriber) -> SubscriberEvent {
    tokio::time::timeout(LONG, subscriber.recv()).await.expect("an event in time")
}

/// Receives a message and returns its number.
async fn next(subscriber: &mut ZmtpSubscriber) -> u64 {
    let event = next_subscriber_event(subscriber).await;
    let SubscriberEvent::Message(_, message) = event else { panic!("{event:?}") };
    EventFrames::parse(message.parts()).expect("three frames").sequence
}

async fn until_connected(subscriber: &mut ZmtpSubscriber) {
    while !matches!(next_subscriber_event(subscriber).await, SubscriberEvent::Connected(_)) {}
}

async fn until_disconnected(subscriber: &mut ZmtpSubscriber) {
    while !matches!(next_subscriber_event(subscriber).await, SubscriberEvent::Disconnected(..)) {}
}

/// Sends new prompts until the subscriber receives a message; returns its number.
async fn until_delivered(engine: &SimEngine, subscriber: &mut ZmtpSubscriber, prompt: &mut u32) -> u64 {
    loop {
        *prompt += 1;
        complete(engine, &[*prompt; 17], &json!({"max_tokens": 1})).await;
        // A subscription may reach the publisher after the first message.
        if let Ok(SubscriberEvent::Message(_, message)) =
            tokio::time::timeout(std::time::Duration::from_millis(200), subscriber.recv()).await
        {
            return EventFrames::parse(message.parts()).expect("three frames").sequence;
        }
    }
}

#[tokio::test]
async fn subscribers_detect_gaps_and_restarts() {
    let engine = SimEngine::start(publishing(SimProtocol::Sglang)).await.expect("an engine");
    let (live, replay) = engine.kv_event_addrs(0).expect("events");
    let mut subscriber =
        ZmtpSubscriber::connect(ZmtpEndpoint::from(live), vec![Bytes::new()], ZmtpOptions::default());
    until_connected(&mut subscriber).await;
    let mut prompt = 0;
    let mut last = until_delivered(&engine, &mut subscriber, &mut prompt).await;
    while last < u64::from(prompt) {
        last = next(&mut subscriber).await;
    }

    assert_eq!(post(&engine, "/_sim/kv_events", &json!({"drop_every": 2})).await.0, 200);
    for prompt in 1_000..1_004 {
        complete(&engine, &[prompt; 17], &json!({"max_tokens": 1})).await;
    }
    assert_eq!((next(&mut subscriber).await, next(&mut subscriber).await), (last + 1, last + 3));
    let mut index = TestKvIndex::default();
    index.catch_up(replay, 0).await;
    assert_eq!(index.next, last + 5, "lost messages can be replayed");
    engine.drop_kv_events(0);

    let before = complete(&engine, &[1_000; 17], &json!({})).await.0;
    assert_eq!(post(&engine, "/_sim/kv_events", &json!({"restart": true})).await.0, 200);
    until_disconnected(&mut subscriber).await;
    until_connected(&mut subscriber).await;
    let after = complete(&engine, &[1_000; 17], &json!({"max_tokens": 1})).await.0;
    assert_eq!((before, after), (PAGE, 0));
    // Since then: the clear at the start, and a message per new prompt.
    let prompts = u64::from(prompt);
    let number = until_delivered(&engine, &mut subscriber, &mut prompt).await;
    let since = 2 + u64::from(prompt) - prompts;
    let mut index = TestKvIndex::default();
    index.catch_up(replay, 0).await;
    assert!(number < since, "{number} of {since}: numbers restart");
    assert_eq!((index.next, index.cleared, index.pages.len() as u64), (since, 1, since - 1));

    let url = format!("{}/_sim/kv_events", engine.url());
    assert_eq!(client().post(url).body("{}").send().await.expect("a response").status(), 400);

    // A killed process closes these sockets too.
    engine.set_fault(EngineFault::Refuse);
    until_disconnected(&mut subscriber).await;
    engine.set_fault(EngineFault::None);
    until_connected(&mut subscriber).await;
}

#[tokio::test]
async fn each_rank_publishes_on_its_reported_address() {
    for protocol in [SimProtocol::Sglang, SimProtocol::Vllm] {
        let mut config = publishing(protocol);
        config.dp_size = 2;
        config.kv_events =
            Some(KvEventOptions { topic: "kv".to_owned(), buffer_steps: 3, ..KvEventOptions::default() });
        let engine = SimEngine::start(config).await.expect("an engine");
        let (live, replay) = engine.kv_event_addrs(1).expect("events");
        if protocol == SimProtocol::Sglang {
            let reported = get(&engine, "/server_info").await["kv_events"].clone();
            let expected = json!({"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": live.port() - 1,
                "replay_endpoint_port_base": replay.port() - 1, "topic": "kv", "block_size": PAGE, "dp_size": 2});
            assert_eq!(reported, expected);
        } else {
            let reported = get(&engine, "/kv_event_sources").await;
            assert_eq!(reported.as_object().expect("ranks").len(), 2);
            assert_eq!(reported["1"]["endpoint"], format!("tcp://*:{}", live.port()));
            assert_eq!(reported["1"]["replay_endpoint"], format!("tcp://*:{}", replay.port()));
            let metrics = client().get(format!("{}/metrics", engine.url())).send().await.expect("a response");
            let metrics = metrics.text().await.expect("text");
            let info =
                metrics.lines().find(|line| line.starts_with("vllm:cache_config_info{")).expect("a line");
            for label in ["block_size=\"16\"", "prefix_caching_hash_algo=\"sha256_cbor\""] {
                assert!(info.contains(label), "{info}");
            }
        }
        for prompt in 0..8 {
            let body = json!({"model": "sim", "prompt": vec![prompt; 17], "max_tokens": 1});
            let request =
                client().post(format!("{}/v1/completions", engine.url())).header("x-data-parallel-rank", "1");
            assert_eq!(request.json(&body).send().await.expect("a response").status(), 200);
        }
        // The buffer holds the latest three.
        let first = if protocol == SimProtocol::Sglang { 6 } else { 5 };
        let mut index = TestKvIndex { next: first, ..TestKvIndex::default() };
        index.catch_up(replay, 1).await;
        assert_eq!((index.next, index.pages.len()), (first + 3, 3));
        let (endpoint, options) = (ZmtpEndpoint::from(replay), ZmtpOptions::default());
        let mut early =
            request(&endpoint, [Bytes::from_static(&[0; 8])].into(), &options).await.expect("a socket");
        let reply = early.recv().await.expect("a reply");
        let frames = EventFrames::parse(reply.parts()).expect("three frames");
        assert_eq!((frames.topic, frames.sequence), (&b"kv"[..], first));
    }
}

#[tokio::test]
async fn engines_without_events_report_none() {
    let sglang = super::start(SimRole::Plain, SimProtocol::Sglang).await;
    assert_eq!(get(&sglang, "/server_info").await["kv_events"], Value::Null);
    assert_eq!(sglang.kv_event_addrs(0), None);
    let vllm = super::start(SimRole::Plain, SimProtocol::Vllm).await;
    assert_eq!(get(&vllm, "/kv_event_sources").await, json!({}));
}

#[tokio::test]
async fn both_engines_tokenize() {
    for protocol in [SimProtocol::Sglang, SimProtocol::Vllm] {
        let engine = super::start(SimRole::Plain, protocol).await;
        let body =
            json!({"model": "sim", "messages": [{"role": "user", "content": "how many tokens am I?"}]});
        let (status, reported) = post(&engine, "/tokenize", &body).await;
        let (_, response) =
            post(&engine, "/v1/chat/completions", &with(&body, json!({"max_tokens": 1}))).await;
        assert_eq!((status, &reported["count"]), (200, &response["usage"]["prompt_tokens"]));
        assert_eq!(
            reported["tokens"].as_array().expect("tokens").len() as u64,
            reported["count"].as_u64().expect("a count")
        );
        assert_eq!(reported["max_model_len"], 1_000_000);
    }
}
