//! Follows the events that the master publishes.
//!
//! An event says that an object came to a medium or left it, but not on which node, nor whether another medium still has the object. So
//! an event is taken as the news that something has changed: the master is asked how it is now. That costs it three microseconds, where
//! storing the object has cost it forty; and it makes the order of events, readings and answers harmless.
//!
//! Events do not tell everything. After a new connection, and when messages were missed, all keys are read once more; nothing is
//! forgotten until that reading has ended.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use mooncake_wire::admin::KeyReplicas;
use mooncake_wire::events::EventFrames;
use mooncake_wire::events::mooncake::{
    DEFAULT_TENANT, StoreEvent, StoreEventBatch, StoreEventKind as Told, StoreEventObject,
};
use mooncake_wire::key::ObjectKey;
use moongate_master_client::admin::AdminError;
use moongate_zmtp::{SubscriberEvent as Heard, ZmtpEndpoint, ZmtpMessage, ZmtpOptions, ZmtpSubscriber};
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;

use super::StoreView;
use super::changes::{PendingStoreChange, StoreChangeQueue};
use super::sequence::{EventSequence, SequenceCheck};
use crate::fleet::FleetReader;
use crate::predict::store_keys::{StoreKeyNaming, StoredBlockPart};

/// How often the master is asked how many messages it has published, and, before that, whether it publishes any.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Pause after the master did not answer.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Objects that are asked for at once: about a millisecond of the master's time.
const QUERY_BATCH: usize = 512;

/// How well the events are followed.
#[derive(Debug)]
pub(super) struct EventSyncTracker {
    state: Mutex<EventSyncState>,
    /// Told of each new connection, for who waits for the first.
    pub(super) connected: Notify,
    /// 1 while it [is current](Self::is_current).
    in_sync: Gauge,
}

#[derive(Debug, Default)]
struct EventSyncState {
    connected: bool,
    /// How often something may have been missed, new and lost connections included.
    gaps: u64,
    /// How often that was when the last complete reading began.
    gaps_at_last_scan: u64,
}

impl EventSyncTracker {
    pub(super) fn new(in_sync: Gauge) -> Self {
        Self { state: Mutex::default(), connected: Notify::new(), in_sync }
    }

    /// Whether events come, and what was missed before has been read since.
    pub(super) fn is_in_sync(&self) -> bool {
        self.state.lock().is_in_sync()
    }

    fn is_connected(&self) -> bool {
        self.state.lock().connected
    }

    /// Returns what [`scan_completed`](Self::reading_ended) takes.
    pub(super) fn scan_started(&self) -> u64 {
        self.state.lock().gaps
    }

    pub(super) fn scan_completed(&self, begun: u64) {
        self.change(|state| state.gaps_at_last_scan = begun);
    }

    fn change(&self, change: impl FnOnce(&mut EventSyncState)) {
        let mut state = self.state.lock();
        change(&mut state);
        self.in_sync.set(i64::from(state.is_in_sync()));
    }
}

impl EventSyncState {
    fn is_in_sync(&self) -> bool {
        self.connected && self.gaps == self.gaps_at_last_scan
    }
}

/// How pages are named in the store, for as long as the fleet stays the same.
#[derive(Debug, Default)]
struct StoreKeyLayouts {
    generation: u64,
    all: Vec<StoreKeyNaming>,
}

impl StoreKeyLayouts {
    fn refresh(&mut self, fleet: &FleetReader) {
        let fleet = fleet.current();
        if fleet.generation != self.generation {
            *self = Self { generation: fleet.generation, all: fleet.store_namings() };
        }
    }

    fn read(&self, key: &str) -> Option<StoredBlockPart> {
        let key = ObjectKey::parse(key)?;
        self.all.iter().find_map(|layout| layout.parse_key(&key))
    }
}

impl StoreView {
    /// Follows what the master publishes at `endpoint`, once it says that it does, until `stop`.
    pub(crate) async fn follow_events(
        self: Arc<Self>,
        endpoint: ZmtpEndpoint,
        fleet: FleetReader,
        stop: CancellationToken,
    ) {
        let following = async {
            self.wait_for_publisher(&endpoint).await;
            let changes = StoreChangeQueue::default();
            tokio::join!(self.listen(endpoint, &fleet, &changes), self.query_pending(&changes));
        };
        stop.run_until_cancelled(following).await;
    }

    /// Says that there are events, where nobody has said at what address.
    pub(super) async fn recommend_events(&self) {
        if self.admin.kv_events_status().await.is_ok_and(|status| status.enabled) {
            tracing::info!(
                "the store's master publishes KV events: with --mooncake-events, its --kv_events_bind_endpoint, they are followed"
            );
        }
    }

    async fn wait_for_publisher(&self, endpoint: &ZmtpEndpoint) {
        let mut told = false;
        loop {
            match self.admin.kv_events_status().await {
                Ok(status) if status.enabled => return,
                Ok(_) | Err(AdminError::NotFound { .. }) => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::warn!(%endpoint,
                            "the store's master publishes no KV events, so its keys are read again and again instead; builds for \
                             PyPI cannot publish any, others need --enable_kv_events");
                    }
                    sleep(CHECK_INTERVAL).await;
                }
                Err(error) => {
                    tracing::debug!(%error, "the store's master does not say whether it publishes events");
                    sleep(RETRY_DELAY).await;
                }
            }
        }
    }

    async fn listen(&self, endpoint: ZmtpEndpoint, fleet: &FleetReader, changes: &StoreChangeQueue) {
        let mut subscriber = ZmtpSubscriber::connect(endpoint, vec![Bytes::new()], ZmtpOptions::default());
        let (mut sequence, mut layouts) = (EventSequence::default(), StoreKeyLayouts::default());
        let mut unreachable_told = false;
        let mut checks = interval(CHECK_INTERVAL);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                heard = subscriber.recv() => match heard {
                    Heard::Message(_, message) => {
                        layouts.refresh(fleet);
                        self.apply_message(&message, &mut sequence, &layouts, changes);
                    }
                    Heard::Connected(_) => {
                        sequence = EventSequence::connected(self.published_count().await);
                        tracing::info!("the store's events: connected");
                        self.record_connected(true);
                        self.event_sync.connected.notify_one();
                        unreachable_told = false;
                    }
                    Heard::Disconnected(_, error) => {
                        tracing::info!(%error, "the store's events: connection lost");
                        self.record_connected(false);
                    }
                    Heard::Failed(_, error) => {
                        if !std::mem::replace(&mut unreachable_told, true) {
                            tracing::warn!(%error,
                                "the store's events: no connection, so its keys are read again and again instead; is \
                                 --mooncake-events the master's --kv_events_bind_endpoint?");
                        }
                    }
                },
                _ = checks.tick(), if self.event_sync.is_connected() => {
                    if let Some(published) = self.published_count().await
                        && sequence.check(published)
                    {
                        self.record_gap("messages that were published have not come");
                    }
                }
            }
        }
    }

    /// How many messages the master has published.
    async fn published_count(&self) -> Option<u64> {
        Some(self.admin.kv_events_status().await.ok()?.published_batches)
    }

    /// A connection begins or ends. What is stored in between is not heard of.
    fn record_connected(&self, connected: bool) {
        self.event_sync.change(|state| {
            state.connected = connected;
            state.gaps += 1;
        });
        self.scan_requested.notify_one();
    }

    /// Something was missed: what is known of the store stays, and is read again.
    fn record_gap(&self, why: &str) {
        tracing::warn!(why, "events of the store were missed; its keys are read again");
        self.event_sync.change(|state| state.gaps += 1);
        self.metrics.event_gaps.inc();
        self.scan_requested.notify_one();
    }

    fn apply_message(
        &self,
        message: &ZmtpMessage,
        sequence: &mut EventSequence,
        layouts: &StoreKeyLayouts,
        changes: &StoreChangeQueue,
    ) {
        let Ok(frames) = EventFrames::parse(message.parts()) else {
            self.metrics.undecodable_events.inc();
            return;
        };
        match sequence.message(frames.sequence) {
            SequenceCheck::Complete => {}
            SequenceCheck::Missed(_) => self.record_gap("their numbers have a gap"),
            SequenceCheck::Restarted => self.record_gap("their numbers begin anew"),
        }
        let Ok(batch) = StoreEventBatch::decode(frames.payload) else {
            self.metrics.undecodable_events.inc();
            return;
        };
        for event in batch.events() {
            match event {
                // Requests of other tenants are not predicted.
                Ok(event) if event.tenant == DEFAULT_TENANT => self.apply_event(&event, layouts, changes),
                Ok(_) => {}
                Err(_) => {
                    self.metrics.undecodable_events.inc();
                }
            }
        }
    }

    fn apply_event(&self, event: &StoreEvent<'_>, layouts: &StoreKeyLayouts, changes: &StoreChangeQueue) {
        let known = |object: &StoreEventObject<'_>| layouts.read(object.key);
        let (object, stored) = match &event.change {
            Told::Cleared => {
                changes.clear();
                self.clear();
                self.metrics.events.inc();
                return;
            }
            // Nodes are watched, whether the master tells of them or not.
            Told::Segment { .. } => return,
            Told::Stored(object) => (object, known(object)),
            Told::Removed(object) => (object, known(object).inspect(|stored| self.remove(*stored))),
        };
        let Some(stored) = stored else { return };
        self.metrics.events.inc();
        if !changes.add(object.key, PendingStoreChange { stored, event_time_ms: event.timestamp_ms }) {
            self.record_gap("the master answers more slowly than objects change");
        }
    }

    /// Asks the master for the objects that have changed, again and again.
    async fn query_pending(&self, changes: &StoreChangeQueue) {
        loop {
            let taken = changes.drain().await;
            // A master that lists its keys answers nobody for seconds. Meanwhile changes wait.
            while let Err(error) = self.query_changed(&taken).await {
                tracing::debug!(%error, "objects that have changed cannot be asked for");
                if !error.is_transient() {
                    self.record_gap("the master does not say where objects are");
                    break;
                }
                sleep(RETRY_DELAY).await;
            }
        }
    }

    async fn query_changed(&self, changes: &HashMap<String, PendingStoreChange>) -> Result<(), AdminError> {
        let keys: Vec<&str> = changes.keys().map(String::as_str).collect();
        for keys in keys.chunks(QUERY_BATCH) {
            let mut first_told = u64::MAX;
            let answer = |key: &str, replicas: &KeyReplicas<'_>| {
                let Some(change) = changes.get(key) else { return };
                first_told = first_told.min(change.event_time_ms);
                if !(replicas.ok && self.insert(change.stored, replicas)) {
                    self.remove(change.stored);
                }
            };
            let _turn = self.update_lock.lock().await;
            self.admin.locate(keys, answer).await?;
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let told = Duration::from_millis(first_told.min(u64::try_from(now.as_millis()).unwrap_or(0)));
            self.metrics.event_lag.observe(now.saturating_sub(told).as_secs_f64());
        }
        Ok(())
    }
}
