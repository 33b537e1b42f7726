//! The gateway follows the events of a Mooncake master. Mooncake's PyPI build cannot publish events, so a real master is behind a proxy
//! that claims it does, and the test publishes the events.

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
use mooncake_wire::events::StorageMedium;
use mooncake_wire::events::mooncake::{
    DEFAULT_TENANT, StoreEvent, StoreEventKind, StoreEventObject, encode_batch,
};
use moongate_runtime::Supervisor;
use moongate_store_testkit::LIMIT;
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST_WITHOUT_CUDA, RealMaster, RealNode};
use moongate_zmtp::{ZmtpEndpoint, ZmtpMessage, ZmtpOptions, ZmtpPublisher};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::harness;
use crate::harness::fleet::TestFleet;
use crate::harness::metrics::metric;
use crate::harness::store_prompts::{
    BLOCK_TOKENS, SMALL_OBJECT_BYTES, objects, predicted_store_tokens, prompt, wait_for_growth_to,
    wait_for_metric,
};

/// Number of events in one message, as sent by a master.
const EVENTS_AT_ONCE: usize = 64;

/// A proxy in front of a real master's admin server that adds events.
struct MasterAdminProxy {
    address: String,
    shared: Arc<MasterAdminProxyState>,
    supervisor: Supervisor,
}

struct MasterAdminProxyState {
    /// Address of the real admin server.
    admin: String,
    client: reqwest::Client,
    published: AtomicU64,
    /// Whether the proxy delays the second half of a list of keys.
    is_list_paused: watch::Sender<bool>,
}

impl MasterAdminProxy {
    async fn start(master: &RealMaster) -> Self {
        let shared = Arc::new(MasterAdminProxyState {
            admin: master.admin.clone(),
            client: harness::client(),
            published: AtomicU64::new(0),
            is_list_paused: watch::Sender::new(false),
        });
        let app = Router::new()
            .route("/kv_events/status", get(status))
            .route("/get_all_keys", get(list))
            .fallback(forward)
            .with_state(shared.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let supervisor = Supervisor::new();
        supervisor.spawn("front", async move { axum::serve(listener, app).await.unwrap() });
        Self { address, shared, supervisor }
    }
}

async fn status(State(shared): State<Arc<MasterAdminProxyState>>) -> Response {
    let batches = shared.published.load(Ordering::Relaxed);
    axum::Json(serde_json::json!({
        "enabled": true, "published_batches": batches, "published_events": batches, "dropped_events": 0,
        "skipped_unparsed_keys": 0,
    }))
    .into_response()
}

async fn list(State(shared): State<Arc<MasterAdminProxyState>>) -> Response {
    let url = format!("http://{}/get_all_keys", shared.admin);
    let all = shared.client.get(url).send().await.unwrap().bytes().await.unwrap();
    let mut held = shared.is_list_paused.subscribe();
    let (first, second) = (all.slice(..all.len() / 2), all.slice(all.len() / 2..));
    let second = async move {
        // Keeps the sender open.
        held.wait_for(|held| !held).await.unwrap();
        Ok::<_, std::io::Error>(second)
    };
    let parts = once(async { Ok(first) }).chain(once(second));
    Body::from_stream(parts).into_response()
}

async fn forward(State(shared): State<Arc<MasterAdminProxyState>>, request: Request) -> Response {
    let url = format!("http://{}{}", shared.admin, request.uri());
    let answer = shared.client.get(url).send().await.unwrap();
    (answer.status(), answer.bytes().await.unwrap()).into_response()
}

/// The event socket of the master, bound by the test.
struct TestEventSocket {
    publisher: ZmtpPublisher,
    stop: CancellationToken,
    address: String,
    shared: Arc<MasterAdminProxyState>,
    /// Sequence number of the next message.
    sequence: u64,
}

impl TestEventSocket {
    async fn start(front: &MasterAdminProxy) -> Self {
        Self::start_at(front, "tcp://127.0.0.1:*", 1).await
    }

    async fn start_at(front: &MasterAdminProxy, address: &str, sequence: u64) -> Self {
        let endpoint: ZmtpEndpoint = address.parse().unwrap();
        let bound = async {
            loop {
                if let Ok(bound) = ZmtpPublisher::bind(&endpoint, ZmtpOptions::default()).await {
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

    /// Publishes events of stored or removed objects.
    fn publish<'k>(&mut self, keys: &'k [String], change: fn(StoreEventObject<'k>) -> StoreEventKind<'k>) {
        for keys in keys.chunks(EVENTS_AT_ONCE) {
            let changes = keys
                .iter()
                .map(|key| change(StoreEventObject { key, group: None, medium: StorageMedium::StoreMemory }));
            self.send(DEFAULT_TENANT, changes);
        }
    }

    fn send<'a>(&mut self, tenant: &'a str, changes: impl Iterator<Item = StoreEventKind<'a>>) {
        let timestamp_ms = now_ms();
        let events: Vec<StoreEvent<'_>> = changes
            .map(|change| StoreEvent { id: self.sequence, timestamp_ms, tenant, backend: "pool", change })
            .collect();
        let mut payload = Vec::new();
        encode_batch(timestamp_ms, &events, &mut payload);
        self.send_payload(payload);
    }

    fn send_payload(&mut self, payload: Vec<u8>) {
        let sequence = Bytes::copy_from_slice(&self.sequence.to_be_bytes());
        self.shared.published.fetch_add(1, Ordering::Relaxed);
        self.publisher.publish(ZmtpMessage::new(vec![Bytes::new(), sequence, payload.into()]));
        self.sequence += 1;
    }

    /// Skips sequence numbers, as if messages were lost.
    fn skip_messages(&mut self, messages: u64) {
        self.shared.published.fetch_add(messages, Ordering::Relaxed);
        self.sequence += messages;
    }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

/// A store, and a gateway that follows its events.
struct StoreEventsFixture {
    master: RealMaster,
    node: RealNode,
    admin_proxy: MasterAdminProxy,
    events: TestEventSocket,
    world: TestFleet,
}

impl StoreEventsFixture {
    async fn start() -> Self {
        let master = RealMaster::start(NEWEST_WITHOUT_CUDA).await;
        let node = RealNode::start(&master, HANDSHAKE, 64).await;
        let front = MasterAdminProxy::start(&master).await;
        let events = TestEventSocket::start(&front).await;
        let world = harness::store_prompts::start_fleet_with_store(&front.address, &[&events.flag()]).await;
        let mut setup = Self { master, node, admin_proxy: front, events, world };
        setup.wait_until_current().await;
        wait_for_metric(&setup.world, "moongate_store_nodes", |nodes| nodes == 1).await;
        // A new node may cause another listing, which would be counted later. Events before a gap are covered by its listing.
        setup.events.skip_messages(1);
        setup.events.publish(&["unknown".to_owned()], StoreEventKind::Stored);
        setup.wait_for_gaps(1).await;
        setup.wait_until_current().await;
        setup
    }

    async fn wait_for_gaps(&self, gaps: u64) {
        wait_for_metric(&self.world, "moongate_store_event_gaps_total", |now| now == gaps).await;
    }

    /// Waits until events arrive and missed ones have been replaced by a listing.
    async fn wait_until_current(&self) {
        wait_for_metric(&self.world, "moongate_store_events_in_sync", |current| current == 1).await;
    }

    async fn key_listings(&self) -> u64 {
        metric(&self.world, "moongate_store_scans_total").await
    }

    /// Stores a prompt's pages and publishes the events.
    async fn put(&mut self, prompt: &[u32]) {
        let keys = self.put_without_event(prompt).await;
        self.events.publish(&keys, StoreEventKind::Stored);
    }

    async fn put_without_event(&mut self, prompt: &[u32]) -> Vec<String> {
        let keys = objects(prompt).concat();
        assert_eq!(self.node.fill(&keys, SMALL_OBJECT_BYTES).await, 0);
        keys
    }

    async fn remove_without_event(&mut self, keys: &[String]) {
        for key in keys {
            self.node.remove(key).await;
        }
    }

    /// Waits until the index has this number of pages, without requesting any.
    async fn wait_for_indexed_blocks(&self, pages: usize) {
        wait_for_metric(&self.world, "moongate_index_blocks", |known| known == pages as u64).await;
    }

    /// Checks that the index has as many pages as the store, and that the predictions of these prompts match their stored pages.
    async fn assert_matches_store(&self, prompts: &[Vec<u32>]) {
        let (mut listed, mut keys) = (BTreeSet::new(), self.master.admin().keys().await.unwrap());
        while let Some(page) = keys.next().await.unwrap() {
            listed.extend(page.iter().map(str::to_owned));
        }
        let pages: BTreeSet<&str> = listed.iter().filter_map(|key| key.split('_').nth(1)).collect();
        self.wait_for_indexed_blocks(pages.len()).await;
        for prompt in prompts {
            let complete =
                objects(prompt).iter().take_while(|page| page.iter().all(|key| listed.contains(key))).count();
            wait_for_growth_to(&self.world, prompt, u32::try_from(complete).unwrap()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_are_indexed_shortly_after_their_event() {
    let mut setup = StoreEventsFixture::start().await;
    let readings = setup.key_listings().await;
    let mut took = Vec::new();
    for number in 1..=21 {
        let keys = setup.put_without_event(&prompt(number, 10)).await;
        let published_at = Instant::now();
        setup.events.publish(&keys, StoreEventKind::Stored);
        setup.wait_for_indexed_blocks(number as usize * 10).await;
        took.push(published_at.elapsed());
    }
    took.sort();
    println!("pages are known {:?} after their event, at most {:?}", took[10], took[20]);
    // The 20 ms are the poll interval of this test.
    assert!(took[10] < Duration::from_millis(100), "{took:?}");
    // Without one of its objects, the page is incomplete, although it was listed just before.
    let last = prompt(21, 10);
    wait_for_growth_to(&setup.world, &last, 10).await;
    let heard = metric(&setup.world, "moongate_store_events_total").await;
    let gone = objects(&last)[7][1].clone();
    setup.node.remove(&gone).await;
    setup.events.publish(std::slice::from_ref(&gone), StoreEventKind::Removed);
    wait_for_metric(&setup.world, "moongate_store_events_total", |now| now > heard).await;
    assert_eq!(predicted_store_tokens(&setup.world, &last).await, 7 * u64::from(BLOCK_TOKENS));
    setup.node.put(&gone, SMALL_OBJECT_BYTES).await;
    setup.events.publish(&[gone], StoreEventKind::Stored);
    wait_for_growth_to(&setup.world, &last, 10).await;
    assert_eq!(setup.key_listings().await, readings, "events were enough");
    setup.wait_for_gaps(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn missed_events_cause_one_listing() {
    let mut setup = StoreEventsFixture::start().await;
    let [known, missed, late] = [1, 2, 3].map(|number| prompt(number, 10));
    setup.put(&known).await;
    setup.wait_for_indexed_blocks(10).await;
    let readings = setup.key_listings().await;
    setup.put_without_event(&missed).await;
    let removed = objects(&known)[4].clone();
    setup.remove_without_event(&removed).await;
    setup.events.skip_messages(3);
    setup.put(&late).await;
    let started = Instant::now();
    loop {
        let pages = metric(&setup.world, "moongate_index_blocks").await;
        assert!(pages >= 10 - 1, "{pages} pages: no page is lost");
        if metric(&setup.world, "moongate_store_event_gaps_total").await == 2 && pages == 29 {
            break;
        }
        assert!(started.elapsed() < LIMIT, "{pages} pages");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    setup.wait_until_current().await;
    setup.assert_matches_store(&[known, missed, late]).await;
    assert_eq!(setup.key_listings().await, readings + 1);
    // The following messages are not a new gap.
    let next = prompt(4, 10);
    setup.put(&next).await;
    setup.wait_for_indexed_blocks(39).await;
    assert_eq!(setup.key_listings().await, readings + 1);
    setup.wait_for_gaps(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_may_restart() {
    let mut setup = StoreEventsFixture::start().await;
    let prompts = [1, 2, 3, 4].map(|number| prompt(number, 10));
    setup.put(&prompts[0]).await;
    setup.wait_for_indexed_blocks(10).await;
    let address = setup.events.address.clone();
    let lost = TestEventSocket::start(&setup.admin_proxy).await;
    std::mem::replace(&mut setup.events, lost).stop.cancel();
    wait_for_metric(&setup.world, "moongate_store_events_in_sync", |current| current == 0).await;
    setup.put_without_event(&prompts[1]).await;
    setup.events = TestEventSocket::start_at(&setup.admin_proxy, &address, 0).await;
    setup.wait_until_current().await;
    setup.assert_matches_store(&prompts[..2]).await;
    let readings = setup.key_listings().await;
    for (known, prompt) in (3..).zip(&prompts[2..]) {
        setup.put(prompt).await;
        setup.wait_for_indexed_blocks(known * 10).await;
    }
    assert_eq!(setup.key_listings().await, readings, "numbers that begin at 0 have no gap");
    setup.assert_matches_store(&prompts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_during_a_listing_are_applied() {
    let mut setup = StoreEventsFixture::start().await;
    let prompts: Vec<Vec<u32>> = (1..=100).map(|number| prompt(number, 10)).collect();
    for prompt in &prompts {
        setup.put_without_event(prompt).await;
    }
    // The listing caused by a gap pauses halfway.
    setup.admin_proxy.shared.is_list_paused.send_replace(true);
    setup.events.skip_messages(1);
    let applied = "moongate_store_event_lag_seconds_count";
    let before = metric(&setup.world, applied).await;
    setup.events.publish(&objects(&prompts[0])[0][..1], StoreEventKind::Stored);
    wait_for_metric(&setup.world, applied, |times| times == before + 1).await;
    wait_for_metric(&setup.world, "moongate_index_blocks", |pages| pages > 100).await;
    // This event is applied during the listing.
    let during = prompt(101, 10);
    setup.put(&during).await;
    wait_for_metric(&setup.world, applied, |times| times > before + 1).await;
    // Some of these have been listed already, some not.
    let mut removed: Vec<String> =
        prompts.iter().step_by(5).flat_map(|prompt| objects(prompt)[5].clone()).collect();
    // Removing a single object makes its page useless too.
    removed.push(objects(&prompts[1])[8][0].clone());
    setup.remove_without_event(&removed).await;
    setup.events.publish(&removed, StoreEventKind::Removed);
    setup.admin_proxy.shared.is_list_paused.send_replace(false);
    setup.wait_until_current().await;
    let all: Vec<Vec<u32>> = prompts.into_iter().chain([during]).collect();
    setup.assert_matches_store(&all).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_other_objects_are_ignored() {
    let mut setup = StoreEventsFixture::start().await;
    let (ours, other) = (prompt(1, 10), prompt(2, 10));
    setup.put(&ours).await;
    setup.wait_for_indexed_blocks(10).await;
    let heard = metric(&setup.world, "moongate_store_events_total").await;
    let keys = setup.put_without_event(&other).await;
    let object = |key| {
        StoreEventKind::Stored(StoreEventObject { key, group: None, medium: StorageMedium::StoreMemory })
    };
    let strangers: Vec<String> = keys.iter().map(|key| key.replace("sim_", "another-model_")).collect();
    setup.events.publish(&strangers, StoreEventKind::Stored);
    setup.events.publish(&["12345".to_owned(), "warm-up".to_owned(), String::new()], StoreEventKind::Stored);
    setup.events.send("somebody", keys.iter().map(|key| object(key)));
    setup.events.send_payload(b"garbage".to_vec());
    // An object of an event may have been removed since: the gateway queries the master.
    let [gone, _] = objects(&ours)[9].clone();
    setup.node.remove(&gone).await;
    setup.events.publish(&[gone], StoreEventKind::Stored);
    wait_for_metric(&setup.world, "moongate_store_events_total", |now| now == heard + 1).await;
    wait_for_metric(&setup.world, "moongate_store_events_undecodable_total", |unread| unread == 1).await;
    assert_eq!(metric(&setup.world, "moongate_index_blocks").await, 10);
    setup.wait_for_gaps(1).await;
    // All objects of a tenant are removed at once.
    setup.events.send(DEFAULT_TENANT, std::iter::once(StoreEventKind::Cleared));
    setup.wait_for_indexed_blocks(0).await;
    wait_for_growth_to(&setup.world, &ours, 9).await;
}
