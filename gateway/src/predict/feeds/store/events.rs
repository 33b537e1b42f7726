//! Follows the events that the master publishes.
//!
//! An event says that an object was added to a medium or removed from it, but not on which node, nor whether another medium still
//! has the object. So the gateway treats an event as a hint and queries the object's current locations. That costs the master three
//! microseconds, whereas storing the object cost it forty; and the order of events, scans and responses does not matter.
//!
//! Events are incomplete. After a new connection, and when messages were missed, all keys are scanned once more; nothing is removed
//! until that scan has ended.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use mooncake_wire::admin::KeyReplicas;
use mooncake_wire::events::EventFrames;
use mooncake_wire::events::mooncake::{
    DEFAULT_TENANT, StoreEvent, StoreEventBatch, StoreEventKind, StoreEventObject,
};
use mooncake_wire::key::ObjectKey;
use moongate_master_client::admin::{AdminClient, AdminError};
use moongate_store_shards::ShardIndex;
use moongate_zmtp::{SubscriberEvent, ZmtpEndpoint, ZmtpMessage, ZmtpOptions, ZmtpSubscriber};
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;

use super::StoreView;
use super::changes::{PendingStoreChange, StoreChangeQueue};
use super::sequence::{EventSequence, SequenceCheck};
use crate::fleet::FleetReader;
use crate::kv_index::{StoreKeyNaming, StoredBlockPart};

/// How often the gateway queries the number of published messages and, before that, whether events are enabled.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Pause after the master did not answer.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Objects per query: about a millisecond of the master's time.
const QUERY_BATCH: usize = 512;

/// Whether the event streams of all masters are complete.
#[derive(Debug)]
pub(super) struct EventSyncTracker {
    state: Mutex<EventSyncState>,
    /// Notified of each new connection, for the first scan, which waits for all.
    connected: Notify,
    /// 1 while [`is_in_sync`](Self::is_in_sync).
    in_sync: Gauge,
}

#[derive(Debug, Default)]
struct EventSyncState {
    /// By master.
    connected: Vec<bool>,
    /// Number of possible gaps, including new and lost connections.
    gaps: u64,
    /// `gaps` when the last complete scan started.
    gaps_at_last_scan: u64,
}

impl EventSyncTracker {
    /// A tracker of the streams of this number of masters.
    pub(super) fn new(masters: usize, in_sync: Gauge) -> Self {
        let state = EventSyncState { connected: vec![false; masters], ..EventSyncState::default() };
        Self { state: Mutex::new(state), connected: Notify::new(), in_sync }
    }

    /// Whether all event streams are connected, and a scan has completed since the last gap.
    pub(super) fn is_in_sync(&self) -> bool {
        self.state.lock().is_in_sync()
    }

    fn is_connected(&self, master: ShardIndex) -> bool {
        self.state.lock().connected.get(master) == Some(&true)
    }

    /// Waits until all streams are connected.
    pub(super) async fn all_connected(&self) {
        while self.state.lock().connected.contains(&false) {
            self.connected.notified().await;
        }
    }

    /// Returns the argument of [`scan_completed`](Self::scan_completed).
    pub(super) fn scan_started(&self) -> u64 {
        self.state.lock().gaps
    }

    pub(super) fn scan_completed(&self, gaps: u64) {
        self.change(|state| state.gaps_at_last_scan = gaps);
    }

    fn change(&self, change: impl FnOnce(&mut EventSyncState)) {
        let mut state = self.state.lock();
        change(&mut state);
        self.in_sync.set(i64::from(state.is_in_sync()));
    }
}

impl EventSyncState {
    fn is_in_sync(&self) -> bool {
        !self.connected.contains(&false) && self.gaps == self.gaps_at_last_scan
    }
}

/// Key namings of the fleet, cached per generation.
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
        self.all.iter().find_map(|naming| naming.parse_key(&key))
    }
}

impl StoreView {
    /// Follows a master's events at `endpoint`, once events are enabled, until `stop`.
    pub(crate) async fn follow_events(
        self: Arc<Self>,
        master: ShardIndex,
        endpoint: ZmtpEndpoint,
        fleet: FleetReader,
        stop: CancellationToken,
    ) {
        let following = async {
            let Some(admin) = self.admins.get(master) else { return };
            wait_for_publisher(admin, &endpoint).await;
            let changes = StoreChangeQueue::default();
            tokio::join!(
                self.listen(master, admin, endpoint, &fleet, &changes),
                self.query_pending(&changes)
            );
        };
        stop.run_until_cancelled(following).await;
    }

    /// Logs a hint if the master publishes events but `--mooncake-events` is not set.
    pub(super) async fn recommend_events(&self) {
        let Some(admin) = self.admins.get(0) else { return };
        if admin.kv_events_status().await.is_ok_and(|status| status.enabled) {
            tracing::info!(
                "the store's master publishes KV events; set --mooncake-events to its --kv_events_bind_endpoint to use them"
            );
        }
    }

    async fn listen(
        &self,
        master: ShardIndex,
        admin: &AdminClient,
        endpoint: ZmtpEndpoint,
        fleet: &FleetReader,
        changes: &StoreChangeQueue,
    ) {
        let mut subscriber = ZmtpSubscriber::connect(endpoint, vec![Bytes::new()], ZmtpOptions::default());
        let (mut sequence, mut namings) = (EventSequence::default(), StoreKeyLayouts::default());
        let mut unreachable_logged = false;
        let mut checks = interval(CHECK_INTERVAL);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                event = subscriber.recv() => match event {
                    SubscriberEvent::Message(_, message) => {
                        namings.refresh(fleet);
                        self.apply_message(&message, &mut sequence, &namings, changes);
                    }
                    SubscriberEvent::Connected(_) => {
                        sequence = EventSequence::connected(published_count(admin).await);
                        tracing::info!("store events: connected");
                        self.record_connected(master, true);
                        self.event_sync.connected.notify_one();
                        unreachable_logged = false;
                    }
                    SubscriberEvent::Disconnected(_, error) => {
                        tracing::info!(%error, "store events: connection lost");
                        self.record_connected(master, false);
                    }
                    SubscriberEvent::Failed(_, error) => {
                        if !std::mem::replace(&mut unreachable_logged, true) {
                            tracing::warn!(%error,
                                "store events: connection failed; keys are scanned periodically instead; is \
                                 --mooncake-events the master's --kv_events_bind_endpoint?");
                        }
                    }
                },
                _ = checks.tick(), if self.event_sync.is_connected(master) => {
                    if let Some(published) = published_count(admin).await
                        && sequence.check(published)
                    {
                        self.record_gap("published messages were not received");
                    }
                }
            }
        }
    }

    /// A connection starts or ends. Changes in between are missed.
    fn record_connected(&self, master: ShardIndex, connected: bool) {
        self.event_sync.change(|state| {
            if let Some(is_connected) = state.connected.get_mut(master) {
                *is_connected = connected;
            }
            state.gaps += 1;
        });
        self.scan_requested.notify_one();
    }

    /// Events were missed: known blocks stay in the index, and all keys are scanned again.
    fn record_gap(&self, reason: &str) {
        tracing::warn!(reason, "store events were missed; scanning its keys again");
        self.event_sync.change(|state| state.gaps += 1);
        self.metrics.event_gaps.inc();
        self.scan_requested.notify_one();
    }

    fn apply_message(
        &self,
        message: &ZmtpMessage,
        sequence: &mut EventSequence,
        namings: &StoreKeyLayouts,
        changes: &StoreChangeQueue,
    ) {
        let Ok(frames) = EventFrames::parse(message.parts()) else {
            self.metrics.undecodable_events.inc();
            return;
        };
        match sequence.message(frames.sequence) {
            SequenceCheck::Complete => {}
            SequenceCheck::Missed(_) => self.record_gap("gap in the sequence numbers"),
            SequenceCheck::Restarted => self.record_gap("sequence numbers restarted"),
        }
        let Ok(batch) = StoreEventBatch::decode(frames.payload) else {
            self.metrics.undecodable_events.inc();
            return;
        };
        for event in batch.events() {
            match event {
                // Requests of other tenants are not predicted.
                Ok(event) if event.tenant == DEFAULT_TENANT => self.apply_event(&event, namings, changes),
                Ok(_) => {}
                Err(_) => {
                    self.metrics.undecodable_events.inc();
                }
            }
        }
    }

    fn apply_event(&self, event: &StoreEvent<'_>, namings: &StoreKeyLayouts, changes: &StoreChangeQueue) {
        let known = |object: &StoreEventObject<'_>| namings.read(object.key);
        let (object, stored) = match &event.change {
            StoreEventKind::Cleared => {
                changes.clear();
                self.clear();
                if self.admins.count() > 1 {
                    // The other masters still have their objects.
                    self.scan_requested.notify_one();
                }
                self.metrics.events.inc();
                return;
            }
            // Nodes are watched separately, whether or not the master publishes segment events.
            StoreEventKind::Segment { .. } => return,
            StoreEventKind::Stored(object) => (object, known(object)),
            StoreEventKind::Removed(object) => (object, known(object).inspect(|stored| self.remove(*stored))),
        };
        let Some(stored) = stored else { return };
        self.metrics.events.inc();
        if !changes.add(object.key, PendingStoreChange { stored, event_time_ms: event.timestamp_ms }) {
            self.record_gap("the queue of changed objects is full");
        }
    }

    /// Queries the locations of changed objects, in a loop.
    pub(super) async fn query_pending(&self, changes: &StoreChangeQueue) {
        loop {
            let pending = changes.drain().await;
            // While a master lists its keys, it answers no query for seconds. Changes stay pending.
            while let Err(error) = self.query_changed(&pending).await {
                tracing::debug!(%error, "cannot query changed objects");
                if !error.is_transient() {
                    self.record_gap("the master returned no object locations");
                    break;
                }
                sleep(RETRY_DELAY).await;
            }
        }
    }

    async fn query_changed(&self, changes: &HashMap<String, PendingStoreChange>) -> Result<(), AdminError> {
        let keys: Vec<&str> = changes.keys().map(String::as_str).collect();
        for keys in keys.chunks(QUERY_BATCH) {
            let mut first_event_ms = u64::MAX;
            let record = |key: &str, replicas: &KeyReplicas<'_>| {
                let Some(change) = changes.get(key) else { return };
                first_event_ms = first_event_ms.min(change.event_time_ms);
                if !(replicas.ok && self.insert(change.stored, replicas)) {
                    self.remove(change.stored);
                }
            };
            let _guard = self.update_lock.lock().await;
            self.admins.locate(keys, record).await?;
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let event_time =
                Duration::from_millis(first_event_ms.min(u64::try_from(now.as_millis()).unwrap_or(0)));
            self.metrics.event_lag.observe(now.saturating_sub(event_time).as_secs_f64());
        }
        Ok(())
    }
}

/// Waits until the master publishes events.
async fn wait_for_publisher(admin: &AdminClient, endpoint: &ZmtpEndpoint) {
    let mut warned = false;
    loop {
        match admin.kv_events_status().await {
            Ok(status) if status.enabled => return,
            Ok(_) | Err(AdminError::NotFound { .. }) => {
                if !std::mem::replace(&mut warned, true) {
                    tracing::warn!(%endpoint,
                        "the store's master publishes no KV events; its keys are scanned periodically instead; builds from \
                         PyPI do not support them, others require --enable_kv_events");
                }
                sleep(CHECK_INTERVAL).await;
            }
            Err(error) => {
                tracing::debug!(%error, "cannot query the event status of the store's master");
                sleep(RETRY_DELAY).await;
            }
        }
    }
}

/// Number of messages that the master has published.
async fn published_count(admin: &AdminClient) -> Option<u64> {
    Some(admin.kv_events_status().await.ok()?.published_batches)
}
