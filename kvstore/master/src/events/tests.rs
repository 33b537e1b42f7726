use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_wire::events::mooncake::{SegmentChange, StoreEventBatch, StoreEventKind};
use mooncake_wire::events::{EventFrames, StorageMedium};
use mooncake_wire::types::{ObjectMeta, ReplicaType, ReplicateConfig, Segment, Uuid};
use moongate_master_core::{MasterCore, MasterCoreOptions, StateChange};
use moongate_runtime::Supervisor;
use moongate_zmtp::{
    SubscriberEvent as Heard, ZmtpEndpoint, ZmtpMessage, ZmtpOptions, ZmtpSubscriber, request,
};

use super::{EventNumberAllocator, KvEventPublisher, KvEventPublisherOptions, KvEventQueue};
use crate::journal::{FactRecorder, MemoryJournal};
use crate::observer::{FactObserver, ObservingJournal};

/// Long, because it only says when a test hangs.
const LIMIT: Duration = Duration::from_secs(60);
const CLIENT: Uuid = Uuid { first: 1, second: 1 };

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
        }
    }

    fn mount(&mut self, number: u64, client: Uuid) {
        self.master.mount(self.now_ms, &Self::segment(number), client, &mut self.recorder).unwrap();
    }

    fn put(&mut self, key: &str, size: u64) {
        let config = ReplicateConfig::<String> { replica_num: 1, ..ReplicateConfig::default() };
        let fx = &mut self.recorder;
        self.master.put_start(self.now_ms, CLIENT, "default", key, size, &config, fx).unwrap();
        let object = ObjectMeta { key, object_checksum: None };
        self.master.put_end(self.now_ms, CLIENT, "default", &object, ReplicaType::ALL, fx).unwrap();
    }

    /// The keys that can be read.
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

/// An endpoint on loopback, whose port the kernel chooses.
fn anywhere() -> ZmtpEndpoint {
    "tcp://127.0.0.1:*".parse().unwrap()
}

async fn start(world: &KvEventFixture, supervisor: &Supervisor) -> Arc<KvEventPublisher> {
    let options = KvEventPublisherOptions {
        bind: anywhere(),
        replay: Some(anywhere()),
        backend: "pool-a".to_owned(),
        replay_bytes: 64 << 20,
    };
    KvEventPublisher::start(Arc::clone(&world.queue), options, EventNumberAllocator::default(), supervisor)
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

/// Follows events: which keys there are.
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
                StoreEventKind::Cleared => panic!("nobody sends this"),
            }
        }
    }

    async fn catch_up(&mut self, subscriber: &mut ZmtpSubscriber, world: &KvEventFixture) {
        while self.last_event < world.queue.last() {
            self.apply(&next(subscriber).await);
        }
        assert_eq!(self.keys, world.keys());
    }
}

#[tokio::test]
async fn every_way_in_which_an_object_can_vanish_is_told() {
    let (mut world, supervisor) = (KvEventFixture::new(1 << 16), Supervisor::default());
    let events = start(&world, &supervisor).await;
    let mut subscriber = subscribe(&events).await;
    let mut follower = TestEventSubscriber::default();
    world.mount(1, CLIENT);
    for number in 0..200 {
        world.put(&format!("key{number}"), 1000);
    }
    follower.catch_up(&mut subscriber, &world).await;
    assert_eq!(follower.keys.len(), 200);

    let now = world.now_ms;
    world.master.remove(now, "default", "key0", false, &mut world.recorder).unwrap();
    follower.catch_up(&mut subscriber, &world).await;
    world.master.batch_remove(now, "default", &["key1", "none", "key2"], false, &mut world.recorder);
    follower.catch_up(&mut subscriber, &world).await;
    assert_eq!(world.master.remove_by_regex(now, "default", "^key1.$", false, &mut world.recorder), Ok(10));
    follower.catch_up(&mut subscriber, &world).await;
    world.master.replica_clear(now, "default", &["key3"], CLIENT, "", &mut world.recorder);
    follower.catch_up(&mut subscriber, &world).await;
    assert_eq!(follower.keys.len(), 186);

    // One more than fits: others are evicted.
    world.put("large", 700_000);
    world.put("larger", 900_000);
    follower.catch_up(&mut subscriber, &world).await;
    assert!(follower.keys.contains("larger") && follower.keys.len() < 186, "{}", follower.keys.len());

    world.master.remove_all(now, None, true, &mut world.recorder);
    follower.catch_up(&mut subscriber, &world).await;
    assert!(follower.keys.is_empty());

    // Its node unmounts.
    world.put("again", 1000);
    let segment = Uuid { first: 7, second: 1 };
    world.master.unmount(now, segment, CLIENT, &mut world.recorder).unwrap();
    follower.catch_up(&mut subscriber, &world).await;

    // Its node mounts other memory, or is silent for too long.
    let other = Uuid { first: 2, second: 2 };
    world.mount(2, other);
    world.put("lost", 1000);
    follower.catch_up(&mut subscriber, &world).await;
    world.master.client_disconnected(world.now_ms, other, &mut world.recorder);
    world.master.remount(now, &[KvEventFixture::segment(2)], other, &mut world.recorder).unwrap();
    follower.catch_up(&mut subscriber, &world).await;
    assert!(follower.keys.contains("lost"), "its node came back in time");
    world.master.client_disconnected(world.now_ms, other, &mut world.recorder);
    world.now_ms += 3_600_000;
    world.master.tick(world.now_ms, &mut world.recorder);
    follower.catch_up(&mut subscriber, &world).await;
    assert!(follower.keys.is_empty());

    use SegmentChange::{Lost, Mounted, Recovered, Silent};
    let told: Vec<(&str, SegmentChange)> =
        follower.segments.iter().map(|(name, it)| (&**name, *it)).collect();
    let (one, two) = ("10.0.0.1:1", "10.0.0.2:1");
    assert_eq!(
        told,
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
    assert_eq!(status.published_batches, follower.last_message);
    assert_eq!(status.published_events, follower.last_event);
    assert_eq!(status.skipped_unparsed_keys, follower.last_event - 7);
    assert_eq!(status.dropped_events, 0);
    supervisor.shutdown(LIMIT).await.unwrap();
}

#[tokio::test]
async fn the_bytes_are_those_that_were_recorded() {
    // Recorded from Mooncake's publisher: three events, each in a message of its own.
    let recorded = include_str!("../../tests/vectors/capture.txt");
    let payloads: Vec<Vec<u8>> = recorded
        .lines()
        .filter_map(|line| line.strip_prefix("FRAMES 3 topic b'' seq ")?.split_once(" payload "))
        .map(|(_, hex)| {
            let digit = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
            (0..hex.len()).step_by(2).map(digit).collect()
        })
        .collect();
    let (queue, supervisor) = (Arc::new(KvEventQueue::new(100)), Supervisor::default());
    let options = KvEventPublisherOptions {
        bind: anywhere(),
        replay: None,
        backend: "pool-a".to_owned(),
        replay_bytes: 0,
    };
    let events =
        KvEventPublisher::start(Arc::clone(&queue), options, EventNumberAllocator::default(), &supervisor)
            .await
            .unwrap();
    let mut subscriber = subscribe(&events).await;
    for (at, payload) in payloads.iter().enumerate() {
        let batch = StoreEventBatch::decode(payload).unwrap();
        let event = batch.events().next().unwrap().unwrap();
        let known = |medium: StorageMedium<'_>| {
            if medium == StorageMedium::StoreDisk {
                StorageMedium::StoreDisk
            } else {
                StorageMedium::StoreMemory
            }
        };
        match event.change {
            StoreEventKind::Stored(it) => queue.stored(event.tenant, it.key, it.group, known(it.medium)),
            StoreEventKind::Removed(it) => queue.removed(event.tenant, it.key, it.group, known(it.medium)),
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
            for at in 0..bytes.len() - 8 {
                if bytes[at..at + 8] == time || bytes[at..at + 8] == event_time {
                    bytes[at..at + 8].fill(0);
                }
            }
            let name = b"event_id";
            let at = bytes.windows(name.len()).position(|it| it == name).unwrap() + name.len();
            assert_eq!(u64::from(bytes[at]), id);
            bytes[at] = 0;
            bytes
        };
        let ours = without_times(frames.payload, frames.sequence);
        assert_eq!(ours, without_times(&payloads[at], at as u64 + 1), "{at}");
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
async fn missed_messages_can_be_had_again() {
    let (mut world, supervisor) = (KvEventFixture::new(1 << 16), Supervisor::default());
    let events = start(&world, &supervisor).await;
    world.mount(1, CLIENT);
    for number in 0..100 {
        world.put(&format!("key{number}"), 10);
    }
    while events.status().published_events < world.queue.last() {
        tokio::task::yield_now().await;
    }
    let last = events.sequence();
    assert!(last >= 3, "segments have a message of their own, and 64 is the most");
    assert_eq!(replay(&events, 0).await, (1..=last).collect::<Vec<_>>());
    assert_eq!(replay(&events, last).await, [last]);
    assert!(replay(&events, last + 1).await.is_empty());
    supervisor.shutdown(LIMIT).await.unwrap();
}

#[tokio::test]
async fn what_is_dropped_leaves_a_gap() {
    let (world, supervisor) = (KvEventFixture::new(10), Supervisor::default());
    for number in 0..25 {
        world.queue.stored("default", &number.to_string(), None, StorageMedium::StoreMemory);
    }
    let events = start(&world, &supervisor).await;
    while events.status().published_events < 10 {
        tokio::task::yield_now().await;
    }
    world.queue.stored("default", "another", None, StorageMedium::StoreMemory);
    while events.status().published_events < 11 {
        tokio::task::yield_now().await;
    }
    assert_eq!(replay(&events, 0).await, [2, 3]);
    let status = events.status();
    assert_eq!((status.dropped_events, status.published_batches), (15, 3));
    supervisor.shutdown(LIMIT).await.unwrap();
}

#[test]
fn what_nobody_could_read_is_not_told_to_be_gone() {
    let mut world = KvEventFixture::new(100);
    world.mount(1, CLIENT);
    let before = world.queue.last();
    let config = ReplicateConfig::<String> { replica_num: 1, ..ReplicateConfig::default() };
    let fx = &mut world.recorder;
    world.master.put_start(world.now_ms, CLIENT, "default", "x", 10, &config, fx).unwrap();
    world.master.put_revoke(CLIENT, "default", "x", ReplicaType::ALL, fx).unwrap();
    assert_eq!(world.queue.last(), before);
}

#[test]
fn facts_that_only_rebuild_a_master_are_no_events() {
    let queue = Arc::new(KvEventQueue::new(10));
    let observer = FactObserver::new(Some(Arc::clone(&queue)));
    observer.observe(&StateChange::ClientExpired { client: CLIENT });
    observer.observe(&StateChange::TenantQuota { tenant: "t".into(), requested: None });
    assert_eq!(queue.last(), 0);
}
