//! From the queue to the sockets.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use mooncake_wire::admin::KvEventsStatus;
use mooncake_wire::events::mooncake::{Change, DEFAULT_TENANT, Event, Object, encode_batch};
use moongate_runtime::Supervisor;
use moongate_zmtp::{Endpoint, Options, Publisher, PublisherServer, PublisherStats, Responder};

use super::kept::{Kept, message};
use super::numbers::Numbers;
use super::queue::{Name, News, Queue, Taken};

/// Events in one message at most, as in Mooncake's master.
const BATCH: usize = 64;
/// Messages that wait for a slow subscriber at most, as in Mooncake's master.
const HIGH_WATER_MARK: usize = 10_000;

/// How KV events are published.
#[derive(Clone, Debug)]
pub struct EventsOptions {
    /// Where subscribers connect: `--kv_events_bind_endpoint`.
    pub bind: Endpoint,
    /// Where missed messages can be had again, if anywhere.
    pub replay: Option<Endpoint>,
    /// The name of this store in its events: `--kv_events_backend_id`.
    pub backend: String,
    /// Bytes of messages that are kept for a replay.
    pub kept_bytes: usize,
}

/// A socket for events could not be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot publish KV events at {endpoint}: {source}")]
pub struct EventsError {
    /// The endpoint asked for.
    pub endpoint: Endpoint,
    /// Why not.
    pub source: moongate_zmtp::Error,
}

/// Publishes a queue's events.
#[derive(Debug)]
pub struct Events {
    queue: Arc<Queue>,
    backend: String,
    publisher: Publisher,
    kept: Kept,
    numbers: Numbers,
    /// The number of the last message.
    sequence: AtomicU64,
    events: AtomicU64,
    no_hashes: AtomicU64,
    addresses: (SocketAddr, Option<SocketAddr>),
}

impl Events {
    /// Opens the sockets and publishes until the supervisor stops.
    ///
    /// # Errors
    /// If an endpoint cannot be bound.
    pub async fn start(
        queue: Arc<Queue>,
        options: EventsOptions,
        numbers: Numbers,
        supervisor: &Supervisor,
    ) -> Result<Arc<Self>, EventsError> {
        let EventsOptions { bind, replay, backend, kept_bytes } = options;
        let cannot = |endpoint: &Endpoint| {
            let endpoint = endpoint.clone();
            move |source| EventsError { endpoint, source }
        };
        let socket = Options { publish_queue: HIGH_WATER_MARK, ..Options::default() };
        let (publisher, server) = Publisher::bind(&bind, socket).await.map_err(cannot(&bind))?;
        let responder = match &replay {
            Some(endpoint) => {
                Some(Responder::bind(endpoint, Options::default()).await.map_err(cannot(endpoint))?)
            }
            None => None,
        };
        let events = Arc::new(Self {
            queue,
            backend,
            publisher,
            kept: Kept::new(if replay.is_some() { kept_bytes } else { 0 }),
            sequence: AtomicU64::new(numbers.begun_after()),
            numbers,
            events: AtomicU64::new(0),
            no_hashes: AtomicU64::new(0),
            addresses: (server.local_addr(), responder.as_ref().map(Responder::local_addr)),
        });
        let (serving, stop) = (Arc::clone(&events), supervisor.token());
        supervisor.spawn_essential("KV events", async move {
            stop.run_until_cancelled(serving.serve(server, responder)).await;
        });
        Ok(events)
    }

    async fn serve(&self, server: PublisherServer, responder: Option<Responder>) {
        let replays = async {
            match responder {
                Some(responder) => responder.serve(|request| self.kept.replay(&request)).await,
                None => std::future::pending().await,
            }
        };
        tokio::join!(server.run(), replays, self.publish());
    }

    async fn publish(&self) {
        loop {
            let taken = self.queue.take(BATCH).await;
            self.numbers.reserve(taken.first + taken.news.len() as u64).await;
            self.publish_batch(&taken);
            // A burst must not keep the sockets waiting.
            tokio::task::yield_now().await;
        }
    }

    fn publish_batch(&self, taken: &Taken) {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_ms = u64::try_from(since_1970.as_millis()).unwrap_or(0);
        let events: Vec<Event<'_>> =
            (taken.first..).zip(&taken.news).map(|(id, news)| self.event(id, now_ms, news)).collect();
        let no_hashes = events.iter().filter(|event| !has_hash(event)).count();
        let mut payload = Vec::new();
        encode_batch(now_ms, &events, &mut payload);
        let payload = Bytes::from(payload);
        let number = self.sequence.load(Relaxed) + if taken.gap { 2 } else { 1 };
        // Kept before it counts as published, so that who reads the number can have the message.
        self.kept.keep(number, payload.clone());
        self.sequence.store(number, Relaxed);
        self.events.fetch_add(events.len() as u64, Relaxed);
        self.no_hashes.fetch_add(no_hashes as u64, Relaxed);
        self.publisher.publish(message(number, payload));
    }

    fn event<'a>(&'a self, id: u64, timestamp_ms: u64, news: &'a News) -> Event<'a> {
        fn object(name: &Name) -> Object<'_> {
            Object { key: &name.key, group: name.group.as_deref(), medium: name.medium }
        }
        let (tenant, change) = match news {
            News::Stored(name) => (name.tenant(), Change::Stored(object(name))),
            News::Removed(name) => (name.tenant(), Change::Removed(object(name))),
            News::Segment(name, change) => (DEFAULT_TENANT, Change::Segment { name, change: *change }),
        };
        Event { id, timestamp_ms, tenant, backend: &self.backend, change }
    }

    /// What has been published. The number of batches is the number of the last message, so that who counts messages knows what is
    /// due; numbers that were left out count as batches.
    pub fn status(&self) -> KvEventsStatus {
        KvEventsStatus {
            enabled: true,
            published_batches: self.sequence(),
            published_events: self.events.load(Relaxed),
            dropped_events: self.queue.dropped(),
            skipped_unparsed_keys: self.no_hashes.load(Relaxed),
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
    pub fn socket(&self) -> PublisherStats {
        self.publisher.stats()
    }

    /// The addresses that the sockets listen on: for subscribers, and for replays.
    pub fn local_addresses(&self) -> (SocketAddr, Option<SocketAddr>) {
        self.addresses
    }
}

/// Whether an event's key is a hash, or needs none.
fn has_hash(event: &Event<'_>) -> bool {
    match &event.change {
        Change::Stored(object) | Change::Removed(object) => object.hash().is_some(),
        _ => true,
    }
}
