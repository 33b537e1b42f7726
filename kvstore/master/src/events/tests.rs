use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_wire::events::mooncake::{SegmentChange, StoreEventBatch, StoreEventKind};
use mooncake_wire::events::{EventFrames, StorageMedium};
use mooncake_wire::types::{ObjectMeta, ReplicaType, ReplicateConfig, Segment, Uuid};
use moongate_master_core::{
    CallContext, ClientSegment, MasterCore, MasterCoreOptions, PutStartRequest, RemoveContext, StateChange,
};
use moongate_runtime::Supervisor;
use moongate_zmtp::{
    SubscriberEvent as Heard, ZmtpEndpoint, ZmtpMessage, ZmtpOptions, ZmtpSubscriber, request,
};

use super::{EventNumberAllocator, KvEventLabels, KvEventPublisher, KvEventPublisherOptions, KvEventQueue};
use crate::journal::MemoryJournal;
use crate::observer::{FactObserver, ObservingJournal};
use crate::recorder::FactRecorder;

/// Timeout that only a hanging test reaches.
const LIMIT: Duration = Duration::from_secs(60);
const CLIENT: Uuid = Uuid { first: 1, second: 1 };

fn caller(now_ms: u64) -> CallContext<'static> {
    CallContext { now_ms, client: CLIENT, tenant: "default" }
}

struct KvEventFixture {
    master: MasterCore,
    recorder: FactRecorder,
    queue: Arc<KvEventQueue>,
    now_ms: u64,
}

impl KvEventFixture {
    fn new(capacity: usize) -> Self {
        let queue = Arc::new(KvEventQueue::new(capacity));
        let observer = Arc::new(FactObserver::new(Some(Arc::clone(&queue))));
        let journal = Arc::new(ObservingJournal::new(Arc::new(MemoryJournal::new(1 << 20)), observer));
        let master = MasterCore::new(MasterCoreOptions { ramp_ms: 0, ..MasterCoreOptions::default() });
        Self { master, recorder: FactRecorder::new(journal), queue, now_ms: 1_000_000 }
    }

    fn segment(number: u64) -> Segment<String> {
        let name = format!("10.0.0.{number}:1");
        Segment {
            id: Uuid { first: 7, second: number },
            name: name.clone(),
            base: number << 40,
            size: 1 << 20,
            te_endpoint: name,
            protocol: "tcp".to_owned(),
            host_id: String::new(),
            locality: None,
        }
    }

    fn mount(&mut self, number: u64, client: Uuid) {
        self.master.mount(self.now_ms, &Self::segment(number), client, &mut self.recorder).unwrap();
    }

    fn put(&mut self, key: &str, size: u64) {
        let config = ReplicateConfig::<String> { replica_num: 1, ..ReplicateConfig::default() };
        let recorder = &mut self.recorder;
        self.master
            .put_start(caller(self.now_ms), &PutStartRequest { key, size, config: &config }, recorder)
            .unwrap();
        let object = ObjectMeta { key, object_checksum: None };
        self.master.put_end(caller(self.now_ms), &object, ReplicaType::ALL, recorder).unwrap();
    }

    /// Keys of all readable objects.
    fn keys(&self) -> BTreeSet<String> {
        let (mut keys, mut from) = (BTreeSet::new(), Some(moongate_master_core::ObjectCursor::default()));
        while let Some(cursor) = from {
            from = self.master.keys(cursor, 1000, |_, key| {
                keys.insert(key.to_owned());
            });
        }
        keys
    }
}

/// A loopback endpoint with a free port.
fn loopback() -> ZmtpEndpoint {
    "tcp://127.0.0.1:*".parse().unwrap()
}

async fn start(fixture: &KvEventFixture, supervisor: &Supervisor) -> Arc<KvEventPublisher> {
    let options = KvEventPublisherOptions {
        bind: loopback(),
        replay: Some(loopback()),
        backend: "pool-a".to_owned(),
        labels: KvEventLabels::default(),
        replay_bytes: 64 << 20,
    };
    KvEventPublisher::start(Arc::clone(&fixture.queue), options, EventNumberAllocator::default(), supervisor)
        .await
        .unwrap()
}

async fn subscribe(events: &KvEventPublisher) -> ZmtpSubscriber {
    let endpoint = ZmtpEndpoint::from(events.local_addresses().0);
    let mut subscriber = ZmtpSubscriber::connect(endpoint, vec![Bytes::new()], ZmtpOptions::default());
    assert!(matches!(subscriber.recv().await, Heard::Connected(_)));
    while events.socket().subscriptions == 0 {
        tokio::task::yield_now().await;
    }
    subscriber
}

async fn next(subscriber: &mut ZmtpSubscriber) -> ZmtpMessage {
    match tokio::time::timeout(LIMIT, subscriber.recv()).await.unwrap() {
        Heard::Message(_, message) => message,
        other => panic!("{other:?}"),
    }
}

/// Applies events to a set of keys.
#[derive(Default)]
struct TestEventSubscriber {
    keys: BTreeSet<String>,
    segments: Vec<(String, SegmentChange)>,
    last_message: u64,
    last_event: u64,
}

impl TestEventSubscriber {
    fn apply(&mut self, message: &ZmtpMessage) {
        let frames = EventFrames::parse(message.parts()).unwrap();
        assert_eq!((frames.topic, frames.sequence), (&b""[..], self.last_message + 1));
        self.last_message = frames.sequence;
        let batch = StoreEventBatch::decode(frames.payload).unwrap();
        assert!((1..=64).contains(&batch.events().len()));
        for event in batch.events() {
            let event = event.unwrap();
            assert_eq!((event.id, event.backend), (self.last_event + 1, "pool-a"));
            self.last_event = event.id;
            match event.change {
                StoreEventKind::Stored(object) => {
                    assert!(self.keys.insert(object.key.to_owned()), "{}", object.key);
                }
                StoreEventKind::Removed(object) => assert!(self.keys.remove(object.key), "{}", object.key),
                StoreEventKind::Segment { name, change } => self.segments.push((name.to_owned(), change)),
                StoreEventKind::Cleared => panic!("the master never sends this"),
            }
        }
    }

    async fn catch_up(&mut self, subscriber: &mut ZmtpSubscriber, fixture: &KvEventFixture) {
        while self.last_event < fixture.queue.last() {
            self.apply(&next(subscriber).await);
        }
        assert_eq!(self.keys, fixture.keys());
    }
}

#[tokio::test]
async fn every_removal_of_an_object_is_published() {
    let (mut fixture, supervisor) = (KvEventFixture::new(1 << 16), Supervisor::default());
    let events = start(&fixture, &supervisor).await;
    let mut subscriber = subscribe(&events).await;
    let mut subscriber_state = TestEventSubscriber::default();
    fixture.mount(1, CLIENT);
    for number in 0..200 {
        fixture.put(&format!("key{number}"), 1000);
    }
    subscriber_state.catch_up(&mut subscriber, &fixture).await;
    assert_eq!(subscriber_state.keys.len(), 200);

    let now = fixture.now_ms;
    fixture
        .master
        .remove(RemoveContext { now_ms: now, tenant: "default", force: false }, "key0", &mut fixture.recorder)
        .unwrap();
    subscriber_state.catch_up(&mut subscriber, &fixture).await;
    fixture.master.batch_remove(
        RemoveContext { now_ms: now, tenant: "default", force: false },
        &["key1", "none", "key2"],
        &mut fixture.recorder,
    );
    subscriber_state.catch_up(&mut subscriber, &fixture).await;
    assert_eq!(
        fixture.master.remove_by_regex(
            RemoveContext { now_ms: now, tenant: "default", force: false },
            "^key1.$",
            &mut fixture.recorder
        ),
        Ok(10)
    );
    subscriber_state.catch_up(&mut subscriber, &fixture).await;
    fixture.master.replica_clear(caller(now), &["key3"], "", &mut fixture.recorder);
    subscriber_state.catch_up(&mut subscriber, &fixture).await;
    assert_eq!(subscriber_state.keys.len(), 186);

    // The second object does not fit: others are evicted.
    fixture.put("large", 700_000);
    fixture.put("larger", 900_000);
    subscriber_state.catch_up(&mut subscriber, &fixture).await;
    assert!(
        subscriber_state.keys.contains("larger") && subscriber_state.keys.len() < 186,
        "{}",
        subscriber_state.keys.len()
    );

    fixture.master.remove_all(now, None, true, &mut fixture.recorder);
    subscriber_state.catch_up(&mut subscriber, &fixture).await;
    assert!(subscriber_state.keys.is_empty());

    // The node unmounts its segment.
    fixture.put("again", 1000);
    let segment = Uuid { first: 7, second: 1 };
    fixture.master.unmount(now, ClientSegment { segment, client: CLIENT }, &mut fixture.recorder).unwrap();
    subscriber_state.catch_up(&mut subscriber, &fixture).await;

    // The node mounts other memory, or is silent for too long.
    let other = Uuid { first: 2, second: 2 };
    fixture.mount(2, other);
    fixture.put("lost", 1000);
    subscriber_state.catch_up(&mut subscriber, &fixture).await;
    fixture.master.client_disconnected(fixture.now_ms, other, &mut fixture.recorder);
    fixture.master.remount(now, &[KvEventFixture::segment(2)], other, &mut fixture.recorder).unwrap();
    subscriber_state.catch_up(&mut subscriber, &fixture).await;
    assert!(subscriber_state.keys.contains("lost"), "its node recovered in time");
    fixture.master.client_disconnected(fixture.now_ms, other, &mut fixture.recorder);
    fixture.now_ms += 3_600_000;
    fixture.master.tick(fixture.now_ms, &mut fixture.recorder);
    subscriber_state.catch_up(&mut subscriber, &fixture).await;
    assert!(subscriber_state.keys.is_empty());

    use SegmentChange::{Lost, Mounted, Recovered, Silent};
    let changes: Vec<(&str, SegmentChange)> =
        subscriber_state.segments.iter().map(|(name, change)| (&**name, *change)).collect();
    let (one, two) = ("10.0.0.1:1", "10.0.0.2:1");
    assert_eq!(
        changes,
        [
            (one, Mounted),
            (one, Lost),
            (two, Mounted),
            (two, Silent),
            (two, Recovered),
            (two, Silent),
            (two, Lost)
        ]
    );
    let status = events.status();
    assert_eq!(status.published_batches, subscriber_state.last_message);
    assert_eq!(status.published_events, subscriber_state.last_event);
    assert_eq!(status.skipped_unparsed_keys, subscriber_state.last_event - 7);
    assert_eq!(status.dropped_events, 0);
    supervisor.shutdown(LIMIT).await.unwrap();
}

#[tokio::test]
async fn messages_equal_those_of_mooncake() {
    // Recorded from Mooncake's publisher: three events, each in its own message.
    let recorded = include_str!("../../tests/vectors/capture.txt");
    let payloads: Vec<Vec<u8>> = recorded
        .lines()
        .filter_map(|line| line.strip_prefix("FRAMES 3 topic b'' seq ")?.split_once(" payload "))
        .map(|(_, hex)| {
            let digit = |index: usize| u8::from_str_radix(&hex[index..index + 2], 16).unwrap();
            (0..hex.len()).step_by(2).map(digit).collect()
        })
        .collect();
    let (queue, supervisor) = (Arc::new(KvEventQueue::new(100)), Supervisor::default());
    let options = KvEventPublisherOptions {
        bind: loopback(),
        replay: None,
        backend: "pool-a".to_owned(),
        labels: KvEventLabels::default(),
        replay_bytes: 0,
    };
    let events =
        KvEventPublisher::start(Arc::clone(&queue), options, EventNumberAllocator::default(), &supervisor)
            .await
            .unwrap();
    let mut subscriber = subscribe(&events).await;
    for (index, payload) in payloads.iter().enumerate() {
        let batch = StoreEventBatch::decode(payload).unwrap();
        let event = batch.events().next().unwrap().unwrap();
        let owned_medium = |medium: StorageMedium<'_>| {
            if medium == StorageMedium::StoreDisk {
                StorageMedium::StoreDisk
            } else {
                StorageMedium::StoreMemory
            }
        };
        match event.change {
            StoreEventKind::Stored(object) => {
                queue.stored(event.tenant, object.key, object.group, owned_medium(object.medium));
            }
            StoreEventKind::Removed(object) => {
                queue.removed(event.tenant, object.key, object.group, owned_medium(object.medium));
            }
            other => panic!("{other:?}"),
        }
        let message = next(&mut subscriber).await;
        let frames = EventFrames::parse(message.parts()).unwrap();
        assert_eq!(message.parts().len(), 3);
        let without_times = |payload: &[u8], id: u64| {
            let mut bytes = payload.to_vec();
            let batch = StoreEventBatch::decode(payload).unwrap();
            let time = batch.timestamp_ms.to_be_bytes();
            let event_time = batch.events().next().unwrap().unwrap().timestamp_ms.to_be_bytes();
            for index in 0..bytes.len() - 8 {
                if bytes[index..index + 8] == time || bytes[index..index + 8] == event_time {
                    bytes[index..index + 8].fill(0);
                }
            }
            let name = b"event_id";
            let index = bytes.windows(name.len()).position(|window| window == name).unwrap() + name.len();
            assert_eq!(u64::from(bytes[index]), id);
            bytes[index] = 0;
            bytes
        };
        let published = without_times(frames.payload, frames.sequence);
        assert_eq!(published, without_times(&payloads[index], index as u64 + 1), "{index}");
    }
    supervisor.shutdown(LIMIT).await.unwrap();
}

async fn replay(events: &KvEventPublisher, from: u64) -> Vec<u64> {
    let endpoint = ZmtpEndpoint::from(events.local_addresses().1.unwrap());
    let body = ZmtpMessage::from([Bytes::copy_from_slice(&from.to_be_bytes())]);
    let mut replies = request(&endpoint, body, &ZmtpOptions::default()).await.unwrap();
    let mut numbers = Vec::new();
    loop {
        let reply = tokio::time::timeout(LIMIT, replies.recv()).await.unwrap().unwrap();
        let frames = EventFrames::parse(reply.parts()).unwrap();
        if frames.ends_replay() {
            return numbers;
        }
        assert!(StoreEventBatch::decode(frames.payload).unwrap().events().len() > 0);
        numbers.push(frames.sequence);
    }
}

#[tokio::test]
async fn missed_messages_can_be_replayed() {
    let (mut fixture, supervisor) = (KvEventFixture::new(1 << 16), Supervisor::default());
    let events = start(&fixture, &supervisor).await;
    fixture.mount(1, CLIENT);
    for number in 0..100 {
        fixture.put(&format!("key{number}"), 10);
    }
    while events.status().published_events < fixture.queue.last() {
        tokio::task::yield_now().await;
    }
    let last = events.sequence();
    assert!(last >= 3, "segments have their own messages, and a batch has at most 64 events");
    assert_eq!(replay(&events, 0).await, (1..=last).collect::<Vec<_>>());
    assert_eq!(replay(&events, last).await, [last]);
    assert!(replay(&events, last + 1).await.is_empty());
    supervisor.shutdown(LIMIT).await.unwrap();
}

#[tokio::test]
async fn dropped_events_leave_a_gap() {
    let (fixture, supervisor) = (KvEventFixture::new(10), Supervisor::default());
    for number in 0..25 {
        fixture.queue.stored("default", &number.to_string(), None, StorageMedium::StoreMemory);
    }
    let events = start(&fixture, &supervisor).await;
    while events.status().published_events < 10 {
        tokio::task::yield_now().await;
    }
    fixture.queue.stored("default", "another", None, StorageMedium::StoreMemory);
    while events.status().published_events < 11 {
        tokio::task::yield_now().await;
    }
    assert_eq!(replay(&events, 0).await, [2, 3]);
    let status = events.status();
    assert_eq!((status.dropped_events, status.published_batches), (15, 3));
    supervisor.shutdown(LIMIT).await.unwrap();
}

#[test]
fn revoked_writes_publish_no_removal() {
    let mut fixture = KvEventFixture::new(100);
    fixture.mount(1, CLIENT);
    let last_event = fixture.queue.last();
    let config = ReplicateConfig::<String> { replica_num: 1, ..ReplicateConfig::default() };
    let recorder = &mut fixture.recorder;
    fixture
        .master
        .put_start(caller(fixture.now_ms), &PutStartRequest { key: "x", size: 10, config: &config }, recorder)
        .unwrap();
    fixture.master.put_revoke(caller(fixture.now_ms), "x", ReplicaType::ALL, recorder).unwrap();
    assert_eq!(fixture.queue.last(), last_event);
}

#[test]
fn records_without_object_changes_publish_no_events() {
    let queue = Arc::new(KvEventQueue::new(10));
    let observer = FactObserver::new(Some(Arc::clone(&queue)));
    observer.observe(&StateChange::ClientExpired { client: CLIENT });
    observer.observe(&StateChange::TenantQuota { tenant: "t".into(), requested: None });
    assert_eq!(queue.last(), 0);
}
