//! Whether the gateway follows the events of a Mooncake master. Mooncake's build for PyPI cannot publish any, so a real master stands
//! behind a front that says it does, and what would be published is published here.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "tests fail by panicking")]

#[path = "../kvstore/tests/store/world.rs"]
mod store;
mod world;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use bytes::Bytes;
use futures_util::stream::{StreamExt as _, once};
use mooncake_wire::events::Medium;
use mooncake_wire::events::mooncake::{Change, DEFAULT_TENANT, Event, Object, encode_batch};
use moongate_runtime::Supervisor;
use moongate_zmtp::{Endpoint, Message, Options, Publisher};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use store::{HANDSHAKE, LIMIT, NEWEST, RealMaster, RealNode};
use world::fleet::World;
use world::stored::{PAGE, SMALL, foretold, grows_to, metric, metric_is, objects, prompt};

/// Events in one message, as a master sends them.
const EVENTS_AT_ONCE: usize = 64;

/// A real master's admin server, behind a front that adds events.
struct Front {
    address: String,
    shared: Arc<Shared>,
    supervisor: Supervisor,
}

struct Shared {
    /// The real one.
    admin: String,
    client: reqwest::Client,
    published: AtomicU64,
    /// Whether the second half of a list of keys is kept back.
    held: watch::Sender<bool>,
}

impl Front {
    async fn start(master: &RealMaster) -> Self {
        let shared = Arc::new(Shared {
            admin: master.admin.clone(),
            client: world::client(),
            published: AtomicU64::new(0),
            held: watch::Sender::new(false),
        });
        let app = Router::new()
            .route("/kv_events/status", get(status))
            .route("/get_all_keys", get(list))
            .fallback(pass)
            .with_state(shared.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let supervisor = Supervisor::new();
        supervisor.spawn("front", async move { axum::serve(listener, app).await.unwrap() });
        Self { address, shared, supervisor }
    }
}

async fn status(State(shared): State<Arc<Shared>>) -> Response {
    let batches = shared.published.load(Ordering::Relaxed);
    axum::Json(serde_json::json!({
        "enabled": true, "published_batches": batches, "published_events": batches, "dropped_events": 0,
        "skipped_unparsed_keys": 0,
    }))
    .into_response()
}

async fn list(State(shared): State<Arc<Shared>>) -> Response {
    let url = format!("http://{}/get_all_keys", shared.admin);
    let all = shared.client.get(url).send().await.unwrap().bytes().await.unwrap();
    let mut held = shared.held.subscribe();
    let (first, second) = (all.slice(..all.len() / 2), all.slice(all.len() / 2..));
    let second = async move {
        // The sender stays.
        held.wait_for(|held| !held).await.unwrap();
        Ok::<_, std::io::Error>(second)
    };
    let parts = once(async { Ok(first) }).chain(once(second));
    Body::from_stream(parts).into_response()
}

async fn pass(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let url = format!("http://{}{}", shared.admin, request.uri());
    let answer = shared.client.get(url).send().await.unwrap();
    (answer.status(), answer.bytes().await.unwrap()).into_response()
}

/// The master's event socket.
struct Events {
    publisher: Publisher,
    stop: CancellationToken,
    address: String,
    shared: Arc<Shared>,
    /// The next message's.
    sequence: u64,
}

impl Events {
    async fn start(front: &Front) -> Self {
        Self::start_at(front, "tcp://127.0.0.1:*", 1).await
    }

    async fn start_at(front: &Front, address: &str, sequence: u64) -> Self {
        let endpoint: Endpoint = address.parse().unwrap();
        let bound = async {
            loop {
                if let Ok(bound) = Publisher::bind(&endpoint, Options::default()).await {
                    return bound;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let (publisher, server) = tokio::time::timeout(LIMIT, bound).await.expect("the port is free");
        let address = format!("tcp://{}", server.local_addr());
        let stop = front.supervisor.token().child_token();
        let until = stop.clone();
        front.supervisor.spawn("events", async move {
            let _stopped = until.run_until_cancelled(server.run()).await;
        });
        front.shared.published.store(0, Ordering::Relaxed);
        Self { publisher, stop, address, shared: front.shared.clone(), sequence }
    }

    fn flag(&self) -> String {
        format!("--mooncake-events={}", self.address)
    }

    /// Publishes that objects came, or went.
    fn publish<'k>(&mut self, keys: &'k [String], change: fn(Object<'k>) -> Change<'k>) {
        for keys in keys.chunks(EVENTS_AT_ONCE) {
            let changes =
                keys.iter().map(|key| change(Object { key, group: None, medium: Medium::StoreMemory }));
            self.send(DEFAULT_TENANT, changes);
        }
    }

    fn send<'a>(&mut self, tenant: &'a str, changes: impl Iterator<Item = Change<'a>>) {
        let timestamp_ms = now_ms();
        let events: Vec<Event<'_>> = changes
            .map(|change| Event { id: self.sequence, timestamp_ms, tenant, backend: "pool", change })
            .collect();
        let mut payload = Vec::new();
        encode_batch(timestamp_ms, &events, &mut payload);
        self.send_payload(payload);
    }

    fn send_payload(&mut self, payload: Vec<u8>) {
        let sequence = Bytes::copy_from_slice(&self.sequence.to_be_bytes());
        self.shared.published.fetch_add(1, Ordering::Relaxed);
        self.publisher.publish(Message::new(vec![Bytes::new(), sequence, payload.into()]));
        self.sequence += 1;
    }

    /// Messages that are published, but never come.
    fn lose(&mut self, messages: u64) {
        self.shared.published.fetch_add(messages, Ordering::Relaxed);
        self.sequence += messages;
    }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

/// A store, and a gateway that follows its events.
struct Setup {
    master: RealMaster,
    node: RealNode,
    front: Front,
    events: Events,
    world: World,
}

impl Setup {
    async fn start() -> Self {
        let master = RealMaster::start(NEWEST).await;
        let node = RealNode::start(&master, HANDSHAKE, 64).await;
        let front = Front::start(&master).await;
        let events = Events::start(&front).await;
        let world = world::stored::world(&front.address, &[&events.flag()]).await;
        let mut setup = Self { master, node, front, events, world };
        setup.is_current().await;
        metric_is(&setup.world, "moongate_store_nodes", |nodes| nodes == 1).await;
        // The node's coming may cause another reading, which would be counted later. What comes before a gap is read with it.
        setup.events.lose(1);
        setup.events.publish(&["unknown".to_owned()], Change::Stored);
        setup.gaps_are(1).await;
        setup.is_current().await;
        setup
    }

    async fn gaps_are(&self, gaps: u64) {
        metric_is(&self.world, "moongate_store_event_gaps_total", |now| now == gaps).await;
    }

    /// Waits until events come, and what was missed before has been read.
    async fn is_current(&self) {
        metric_is(&self.world, "moongate_store_events_current", |current| current == 1).await;
    }

    async fn readings(&self) -> u64 {
        metric(&self.world, "moongate_store_readings_total").await
    }

    /// Stores a prompt's pages, and tells.
    async fn put(&mut self, prompt: &[u32]) {
        let keys = self.put_silently(prompt).await;
        self.events.publish(&keys, Change::Stored);
    }

    async fn put_silently(&mut self, prompt: &[u32]) -> Vec<String> {
        let keys = objects(prompt).concat();
        assert_eq!(self.node.fill(&keys, SMALL).await, 0);
        keys
    }

    async fn remove_silently(&mut self, keys: &[String]) {
        for key in keys {
            self.node.remove(key).await;
        }
    }

    /// Waits until the index has so many pages, as nobody asks for them.
    async fn has_pages(&self, pages: usize) {
        metric_is(&self.world, "moongate_index_pages", |known| known == pages as u64).await;
    }

    /// Checks that the index has as many pages as the store, and that these prompts are foretold as far as their pages are there.
    async fn agrees_with_the_store(&self, prompts: &[Vec<u32>]) {
        let (mut listed, mut keys) = (BTreeSet::new(), self.master.admin().keys().await.unwrap());
        while let Some(page) = keys.next().await.unwrap() {
            listed.extend(page.iter().map(str::to_owned));
        }
        let pages: BTreeSet<&str> = listed.iter().filter_map(|key| key.split('_').nth(1)).collect();
        self.has_pages(pages.len()).await;
        for prompt in prompts {
            let complete =
                objects(prompt).iter().take_while(|page| page.iter().all(|key| listed.contains(key))).count();
            grows_to(&self.world, prompt, u32::try_from(complete).unwrap()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_are_known_a_moment_after_their_event() {
    let mut setup = Setup::start().await;
    let readings = setup.readings().await;
    let mut took = Vec::new();
    for number in 1..=21 {
        let keys = setup.put_silently(&prompt(number, 10)).await;
        let told = Instant::now();
        setup.events.publish(&keys, Change::Stored);
        setup.has_pages(number as usize * 10).await;
        took.push(told.elapsed());
    }
    took.sort();
    println!("pages are known {:?} after their event, at most {:?}", took[10], took[20]);
    // The 20 ms are the test's own: it looks so often.
    assert!(took[10] < Duration::from_millis(100), "{took:?}");
    // One object less, and the page is not complete, although it was seen in the store just now.
    let last = prompt(21, 10);
    grows_to(&setup.world, &last, 10).await;
    let heard = metric(&setup.world, "moongate_store_events_total").await;
    let gone = objects(&last)[7][1].clone();
    setup.node.remove(&gone).await;
    setup.events.publish(std::slice::from_ref(&gone), Change::Removed);
    metric_is(&setup.world, "moongate_store_events_total", |now| now > heard).await;
    assert_eq!(foretold(&setup.world, &last).await, 7 * u64::from(PAGE));
    setup.node.put(&gone, SMALL).await;
    setup.events.publish(&[gone], Change::Stored);
    grows_to(&setup.world, &last, 10).await;
    assert_eq!(setup.readings().await, readings, "events were enough");
    setup.gaps_are(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_missed_is_read_once() {
    let mut setup = Setup::start().await;
    let [known, missed, late] = [1, 2, 3].map(|number| prompt(number, 10));
    setup.put(&known).await;
    setup.has_pages(10).await;
    let readings = setup.readings().await;
    setup.put_silently(&missed).await;
    let removed = objects(&known)[4].clone();
    setup.remove_silently(&removed).await;
    setup.events.lose(3);
    setup.put(&late).await;
    let begun = Instant::now();
    loop {
        let pages = metric(&setup.world, "moongate_index_pages").await;
        assert!(pages >= 10 - 1, "{pages} pages: nothing is forgotten");
        if metric(&setup.world, "moongate_store_event_gaps_total").await == 2 && pages == 29 {
            break;
        }
        assert!(begun.elapsed() < LIMIT, "{pages} pages");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    setup.is_current().await;
    setup.agrees_with_the_store(&[known, missed, late]).await;
    assert_eq!(setup.readings().await, readings + 1);
    // The next ones are no news of a gap.
    let next = prompt(4, 10);
    setup.put(&next).await;
    setup.has_pages(39).await;
    assert_eq!(setup.readings().await, readings + 1);
    setup.gaps_are(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_may_start_again() {
    let mut setup = Setup::start().await;
    let prompts = [1, 2, 3, 4].map(|number| prompt(number, 10));
    setup.put(&prompts[0]).await;
    setup.has_pages(10).await;
    let address = setup.events.address.clone();
    let lost = Events::start(&setup.front).await;
    std::mem::replace(&mut setup.events, lost).stop.cancel();
    metric_is(&setup.world, "moongate_store_events_current", |current| current == 0).await;
    setup.put_silently(&prompts[1]).await;
    setup.events = Events::start_at(&setup.front, &address, 0).await;
    setup.is_current().await;
    setup.agrees_with_the_store(&prompts[..2]).await;
    let readings = setup.readings().await;
    for (known, prompt) in (3..).zip(&prompts[2..]) {
        setup.put(prompt).await;
        setup.has_pages(known * 10).await;
    }
    assert_eq!(setup.readings().await, readings, "numbers that begin at 0 have no gap");
    setup.agrees_with_the_store(&prompts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_during_a_reading_count() {
    let mut setup = Setup::start().await;
    let prompts: Vec<Vec<u32>> = (1..=100).map(|number| prompt(number, 10)).collect();
    for prompt in &prompts {
        setup.put_silently(prompt).await;
    }
    // The reading that a gap causes stops in the middle.
    setup.front.shared.held.send_replace(true);
    setup.events.lose(1);
    let applied = "moongate_store_event_lag_seconds_count";
    let before = metric(&setup.world, applied).await;
    setup.events.publish(&objects(&prompts[0])[0][..1], Change::Stored);
    metric_is(&setup.world, applied, |times| times == before + 1).await;
    metric_is(&setup.world, "moongate_index_pages", |pages| pages > 100).await;
    // This is applied while the reading lasts.
    let during = prompt(101, 10);
    setup.put(&during).await;
    metric_is(&setup.world, applied, |times| times > before + 1).await;
    // Some of these have been read already, some not.
    let mut removed: Vec<String> =
        prompts.iter().step_by(5).flat_map(|prompt| objects(prompt)[5].clone()).collect();
    // One object alone makes its page useless too.
    removed.push(objects(&prompts[1])[8][0].clone());
    setup.remove_silently(&removed).await;
    setup.events.publish(&removed, Change::Removed);
    setup.front.shared.held.send_replace(false);
    setup.is_current().await;
    let all: Vec<Vec<u32>> = prompts.into_iter().chain([during]).collect();
    setup.agrees_with_the_store(&all).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_about_others_are_passed_over() {
    let mut setup = Setup::start().await;
    let (ours, other) = (prompt(1, 10), prompt(2, 10));
    setup.put(&ours).await;
    setup.has_pages(10).await;
    let heard = metric(&setup.world, "moongate_store_events_total").await;
    let keys = setup.put_silently(&other).await;
    let object = |key| Change::Stored(Object { key, group: None, medium: Medium::StoreMemory });
    let strangers: Vec<String> = keys.iter().map(|key| key.replace("sim_", "another-model_")).collect();
    setup.events.publish(&strangers, Change::Stored);
    setup.events.publish(&["12345".to_owned(), "warm-up".to_owned(), String::new()], Change::Stored);
    setup.events.send("somebody", keys.iter().map(|key| object(key)));
    setup.events.send_payload(b"garbage".to_vec());
    // What is stored by an event may have been removed since: the master is asked.
    let [gone, _] = objects(&ours)[9].clone();
    setup.node.remove(&gone).await;
    setup.events.publish(&[gone], Change::Stored);
    metric_is(&setup.world, "moongate_store_events_total", |now| now == heard + 1).await;
    metric_is(&setup.world, "moongate_store_events_unread_total", |unread| unread == 1).await;
    assert_eq!(metric(&setup.world, "moongate_index_pages").await, 10);
    setup.gaps_are(1).await;
    // A tenant's objects are gone all at once.
    setup.events.send(DEFAULT_TENANT, std::iter::once(Change::Cleared));
    setup.has_pages(0).await;
    grows_to(&setup.world, &ours, 9).await;
}
