//! Publishes queued events on a ZeroMQ socket.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use mooncake_wire::admin::KvEventsStatus;
use mooncake_wire::events::mooncake::{
    DEFAULT_TENANT, StoreEvent, StoreEventKind, StoreEventLabels, StoreEventObject, encode_labelled_batch,
};
use moongate_runtime::Supervisor;
use moongate_zmtp::{
    ZmtpEndpoint, ZmtpOptions, ZmtpPublisher, ZmtpPublisherServer, ZmtpPublisherStats, ZmtpResponder,
};

use super::number_allocator::EventNumberAllocator;
use super::queue::{KvEventBatch, KvEventQueue, QueuedEventObject, QueuedKvEvent};
use super::replay_buffer::{EventReplayBuffer, message};

/// Maximum events per message, as in Mooncake's master.
const BATCH: usize = 64;
/// Maximum messages queued for a slow subscriber, as in Mooncake's master.
const HIGH_WATER_MARK: usize = 10_000;

/// What is stated in all events: `--kv_events_model_name` and so on. `None` is published as nil.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvEventLabels {
    pub model: Option<String>,
    pub block_size: Option<u64>,
    pub salt: Option<String>,
    pub lora: Option<String>,
    pub dp_rank: Option<u64>,
}

impl KvEventLabels {
    fn as_encoded(&self) -> StoreEventLabels<'_> {
        StoreEventLabels {
            model: self.model.as_deref(),
            block_size: self.block_size,
            salt: self.salt.as_deref(),
            lora: self.lora.as_deref(),
            dp_rank: self.dp_rank,
        }
    }
}

/// Settings of the KV event publisher.
#[derive(Clone, Debug)]
pub struct KvEventPublisherOptions {
    /// Endpoint for subscribers: `--kv_events_bind_endpoint`.
    pub bind: ZmtpEndpoint,
    /// Endpoint for replays of missed messages; `None` disables them.
    pub replay: Option<ZmtpEndpoint>,
    /// Name of this store in its events: `--kv_events_backend_id`.
    pub backend: String,
    pub labels: KvEventLabels,
    /// Size of the replay buffer in bytes.
    pub replay_bytes: usize,
}

/// An event socket could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot publish KV events at {endpoint}: {source}")]
pub struct KvEventBindError {
    pub endpoint: ZmtpEndpoint,
    pub source: moongate_zmtp::ZmtpError,
}

/// Publishes the events of a queue.
#[derive(Debug)]
pub struct KvEventPublisher {
    queue: Arc<KvEventQueue>,
    backend: String,
    labels: KvEventLabels,
    publisher: ZmtpPublisher,
    replay_buffer: EventReplayBuffer,
    numbers: EventNumberAllocator,
    /// Number of the last message.
    sequence: AtomicU64,
    events: AtomicU64,
    unparsed_keys: AtomicU64,
    addresses: (SocketAddr, Option<SocketAddr>),
}

impl KvEventPublisher {
    /// Opens the sockets and publishes until the supervisor stops.
    ///
    /// # Errors
    /// An endpoint cannot be bound.
    pub async fn start(
        queue: Arc<KvEventQueue>,
        options: KvEventPublisherOptions,
        numbers: EventNumberAllocator,
        supervisor: &Supervisor,
    ) -> Result<Arc<Self>, KvEventBindError> {
        let KvEventPublisherOptions { bind, replay, backend, labels, replay_bytes } = options;
        let bind_error = |endpoint: &ZmtpEndpoint| {
            let endpoint = endpoint.clone();
            move |source| KvEventBindError { endpoint, source }
        };
        let socket = ZmtpOptions { publish_queue: HIGH_WATER_MARK, ..ZmtpOptions::default() };
        let (publisher, server) = ZmtpPublisher::bind(&bind, socket).await.map_err(bind_error(&bind))?;
        let responder = match &replay {
            Some(endpoint) => Some(
                ZmtpResponder::bind(endpoint, ZmtpOptions::default()).await.map_err(bind_error(endpoint))?,
            ),
            None => None,
        };
        let events = Arc::new(Self {
            queue,
            backend,
            labels,
            publisher,
            replay_buffer: EventReplayBuffer::new(if replay.is_some() { replay_bytes } else { 0 }),
            sequence: AtomicU64::new(numbers.starts_after()),
            numbers,
            events: AtomicU64::new(0),
            unparsed_keys: AtomicU64::new(0),
            addresses: (server.local_addr(), responder.as_ref().map(ZmtpResponder::local_addr)),
        });
        let (publisher_task, stop) = (Arc::clone(&events), supervisor.token());
        supervisor.spawn_essential("KV events", async move {
            stop.run_until_cancelled(publisher_task.serve(server, responder)).await;
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
            let batch = self.queue.take(BATCH).await;
            self.numbers.reserve(batch.first + batch.events.len() as u64).await;
            self.publish_batch(&batch);
            // Under a burst of events, the sockets need time too.
            tokio::task::yield_now().await;
        }
    }

    fn publish_batch(&self, batch: &KvEventBatch) {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_ms = u64::try_from(since_1970.as_millis()).unwrap_or(0);
        let events: Vec<StoreEvent<'_>> =
            (batch.first..).zip(&batch.events).map(|(id, queued)| self.event(id, now_ms, queued)).collect();
        let unparsed = events.iter().filter(|event| !has_hash(event)).count();
        let mut payload = Vec::new();
        encode_labelled_batch(now_ms, &events, &self.labels.as_encoded(), &mut payload);
        let payload = Bytes::from(payload);
        let number = self.sequence.load(Relaxed) + if batch.gap { 2 } else { 1 };
        // Stored before the number is visible, so that a reader of the number can replay the message.
        self.replay_buffer.push(number, payload.clone());
        self.sequence.store(number, Relaxed);
        self.events.fetch_add(events.len() as u64, Relaxed);
        self.unparsed_keys.fetch_add(unparsed as u64, Relaxed);
        self.publisher.publish(message(number, payload));
    }

    fn event<'a>(&'a self, id: u64, timestamp_ms: u64, queued: &'a QueuedKvEvent) -> StoreEvent<'a> {
        fn object(name: &QueuedEventObject) -> StoreEventObject<'_> {
            StoreEventObject { key: &name.key, group: name.group.as_deref(), medium: name.medium }
        }
        let (tenant, change) = match queued {
            QueuedKvEvent::Stored(name) => (name.tenant(), StoreEventKind::Stored(object(name))),
            QueuedKvEvent::Removed(name) => (name.tenant(), StoreEventKind::Removed(object(name))),
            QueuedKvEvent::Segment(name, change) => {
                (DEFAULT_TENANT, StoreEventKind::Segment { name, change: *change })
            }
        };
        StoreEvent { id, timestamp_ms, tenant, backend: &self.backend, change }
    }

    /// Counters of the publisher. The number of batches is the number of the last message, skipped numbers included: a subscriber that
    /// counts messages can compare it.
    pub fn status(&self) -> KvEventsStatus {
        KvEventsStatus {
            enabled: true,
            published_batches: self.sequence(),
            published_events: self.events.load(Relaxed),
            dropped_events: self.queue.dropped(),
            skipped_unparsed_keys: self.unparsed_keys.load(Relaxed),
        }
    }

    pub fn sequence(&self) -> u64 {
        self.sequence.load(Relaxed)
    }

    /// The number of the last event, published or not yet. Smaller while that number is not reserved, because another master could use it
    /// again.
    pub fn last_event(&self) -> u64 {
        self.queue.last().min(self.numbers.reserved())
    }

    /// Statistics of the publishing socket.
    pub fn socket(&self) -> ZmtpPublisherStats {
        self.publisher.stats()
    }

    /// Bound addresses of the sockets: for subscribers, and for replays.
    pub fn local_addresses(&self) -> (SocketAddr, Option<SocketAddr>) {
        self.addresses
    }
}

/// Whether the event's key is a hash, or the event has no key.
fn has_hash(event: &StoreEvent<'_>) -> bool {
    match &event.change {
        StoreEventKind::Stored(object) | StoreEventKind::Removed(object) => object.hash().is_some(),
        _ => true,
    }
}
