//! From the queue to the sockets.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use mooncake_wire::admin::KvEventsStatus;
use mooncake_wire::events::mooncake::{
    DEFAULT_TENANT, StoreEvent, StoreEventKind, StoreEventObject, encode_batch,
};
use moongate_runtime::Supervisor;
use moongate_zmtp::{
    ZmtpEndpoint, ZmtpOptions, ZmtpPublisher, ZmtpPublisherServer, ZmtpPublisherStats, ZmtpResponder,
};

use super::number_allocator::EventNumberAllocator;
use super::queue::{KvEventBatch, KvEventQueue, QueuedEventObject, QueuedKvEvent};
use super::replay_buffer::{EventReplayBuffer, message};

/// Events in one message at most, as in Mooncake's master.
const BATCH: usize = 64;
/// Messages that wait for a slow subscriber at most, as in Mooncake's master.
const HIGH_WATER_MARK: usize = 10_000;

/// How KV events are published.
#[derive(Clone, Debug)]
pub struct KvEventPublisherOptions {
    /// Where subscribers connect: `--kv_events_bind_endpoint`.
    pub bind: ZmtpEndpoint,
    /// Where missed messages can be had again, if anywhere.
    pub replay: Option<ZmtpEndpoint>,
    /// The name of this store in its events: `--kv_events_backend_id`.
    pub backend: String,
    /// Bytes of messages that are kept for a replay.
    pub replay_bytes: usize,
}

/// A socket for events could not be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot publish KV events at {endpoint}: {source}")]
pub struct KvEventBindError {
    /// The endpoint asked for.
    pub endpoint: ZmtpEndpoint,
    /// Why not.
    pub source: moongate_zmtp::ZmtpError,
}

/// Publishes a queue's events.
#[derive(Debug)]
pub struct KvEventPublisher {
    queue: Arc<KvEventQueue>,
    backend: String,
    publisher: ZmtpPublisher,
    replay_buffer: EventReplayBuffer,
    numbers: EventNumberAllocator,
    /// The number of the last message.
    sequence: AtomicU64,
    events: AtomicU64,
    unparsed_keys: AtomicU64,
    addresses: (SocketAddr, Option<SocketAddr>),
}

impl KvEventPublisher {
    /// Opens the sockets and publishes until the supervisor stops.
    ///
    /// # Errors
    /// If an endpoint cannot be bound.
    pub async fn start(
        queue: Arc<KvEventQueue>,
        options: KvEventPublisherOptions,
        numbers: EventNumberAllocator,
        supervisor: &Supervisor,
    ) -> Result<Arc<Self>, KvEventBindError> {
        let KvEventPublisherOptions { bind, replay, backend, replay_bytes: kept_bytes } = options;
        let cannot = |endpoint: &ZmtpEndpoint| {
            let endpoint = endpoint.clone();
            move |source| KvEventBindError { endpoint, source }
        };
        let socket = ZmtpOptions { publish_queue: HIGH_WATER_MARK, ..ZmtpOptions::default() };
        let (publisher, server) = ZmtpPublisher::bind(&bind, socket).await.map_err(cannot(&bind))?;
        let responder = match &replay {
            Some(endpoint) => {
                Some(ZmtpResponder::bind(endpoint, ZmtpOptions::default()).await.map_err(cannot(endpoint))?)
            }
            None => None,
        };
        let events = Arc::new(Self {
            queue,
            backend,
            publisher,
            replay_buffer: EventReplayBuffer::new(if replay.is_some() { kept_bytes } else { 0 }),
            sequence: AtomicU64::new(numbers.starts_after()),
            numbers,
            events: AtomicU64::new(0),
            unparsed_keys: AtomicU64::new(0),
            addresses: (server.local_addr(), responder.as_ref().map(ZmtpResponder::local_addr)),
        });
        let (serving, stop) = (Arc::clone(&events), supervisor.token());
        supervisor.spawn_essential("KV events", async move {
            stop.run_until_cancelled(serving.serve(server, responder)).await;
        });
        Ok(events)
    }

    async fn serve(&self, server: ZmtpPublisherServer, responder: Option<ZmtpResponder>) {
        let replays = async {
            match responder {
                Some(responder) => responder.run(|request| self.replay_buffer.replay(&request)).await,
                None => std::future::pending().await,
            }
        };
        tokio::join!(server.run(), replays, self.publish());
    }

    async fn publish(&self) {
        loop {
            let taken = self.queue.take(BATCH).await;
            self.numbers.reserve(taken.first + taken.events.len() as u64).await;
            self.publish_batch(&taken);
            // A burst must not keep the sockets waiting.
            tokio::task::yield_now().await;
        }
    }

    fn publish_batch(&self, taken: &KvEventBatch) {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_ms = u64::try_from(since_1970.as_millis()).unwrap_or(0);
        let events: Vec<StoreEvent<'_>> =
            (taken.first..).zip(&taken.events).map(|(id, news)| self.event(id, now_ms, news)).collect();
        let no_hashes = events.iter().filter(|event| !has_hash(event)).count();
        let mut payload = Vec::new();
        encode_batch(now_ms, &events, &mut payload);
        let payload = Bytes::from(payload);
        let number = self.sequence.load(Relaxed) + if taken.gap { 2 } else { 1 };
        // Kept before it counts as published, so that who reads the number can have the message.
        self.replay_buffer.push(number, payload.clone());
        self.sequence.store(number, Relaxed);
        self.events.fetch_add(events.len() as u64, Relaxed);
        self.unparsed_keys.fetch_add(no_hashes as u64, Relaxed);
        self.publisher.publish(message(number, payload));
    }

    fn event<'a>(&'a self, id: u64, timestamp_ms: u64, news: &'a QueuedKvEvent) -> StoreEvent<'a> {
        fn object(name: &QueuedEventObject) -> StoreEventObject<'_> {
            StoreEventObject { key: &name.key, group: name.group.as_deref(), medium: name.medium }
        }
        let (tenant, change) = match news {
            QueuedKvEvent::Stored(name) => (name.tenant(), StoreEventKind::Stored(object(name))),
            QueuedKvEvent::Removed(name) => (name.tenant(), StoreEventKind::Removed(object(name))),
            QueuedKvEvent::Segment(name, change) => {
                (DEFAULT_TENANT, StoreEventKind::Segment { name, change: *change })
            }
        };
        StoreEvent { id, timestamp_ms, tenant, backend: &self.backend, change }
    }

    /// What has been published. The number of batches is the number of the last message, so that who counts messages knows what is
    /// due; numbers that were left out count as batches.
    pub fn status(&self) -> KvEventsStatus {
        KvEventsStatus {
            enabled: true,
            published_batches: self.sequence(),
            published_events: self.events.load(Relaxed),
            dropped_events: self.queue.dropped(),
            skipped_unparsed_keys: self.unparsed_keys.load(Relaxed),
        }
    }

    /// The number of the last message.
    pub fn sequence(&self) -> u64 {
        self.sequence.load(Relaxed)
    }

    /// The number of the last event that has happened, published or not yet. Smaller if that number could be given out again by
    /// another master.
    pub fn last_event(&self) -> u64 {
        self.queue.last().min(self.numbers.reserved())
    }

    /// How the socket does.
    pub fn socket(&self) -> ZmtpPublisherStats {
        self.publisher.stats()
    }

    /// The addresses that the sockets listen on: for subscribers, and for replays.
    pub fn local_addresses(&self) -> (SocketAddr, Option<SocketAddr>) {
        self.addresses
    }
}

/// Whether an event's key is a hash, or needs none.
fn has_hash(event: &StoreEvent<'_>) -> bool {
    match &event.change {
        StoreEventKind::Stored(object) | StoreEventKind::Removed(object) => object.hash().is_some(),
        _ => true,
    }
}
