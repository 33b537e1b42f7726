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
use mooncake_wire::events::Frames;
use mooncake_wire::events::mooncake::{Batch, Change as Told, DEFAULT_TENANT, Event, Object};
use mooncake_wire::key::ObjectKey;
use moongate_kvstore::admin::AdminError;
use moongate_zmtp::{Endpoint, Event as Heard, Message, Options, Subscriber};
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;

use super::StoreView;
use super::changes::{Change, Changes};
use super::sequence::{Before, Sequence};
use crate::fleet::FleetReader;
use crate::predict::stored::{Stored, StoredAs};

/// How often the master is asked how many messages it has published, and, before that, whether it publishes any.
const CHECK_EVERY: Duration = Duration::from_secs(10);
/// Pause after the master did not answer.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Objects that are asked for at once: about a millisecond of the master's time.
const ASKED_AT_ONCE: usize = 512;

/// How well the events are followed.
#[derive(Debug)]
pub(super) struct Following {
    state: Mutex<State>,
    /// Told of each new connection, for who waits for the first.
    pub(super) begun: Notify,
    /// 1 while it [is current](Self::is_current).
    current: Gauge,
}

#[derive(Debug, Default)]
struct State {
    connected: bool,
    /// How often something may have been missed, new and lost connections included.
    missed: u64,
    /// How often that was when the last complete reading began.
    made_good: u64,
}

impl Following {
    pub(super) fn new(current: Gauge) -> Self {
        Self { state: Mutex::default(), begun: Notify::new(), current }
    }

    /// Whether events come, and what was missed before has been read since.
    pub(super) fn is_current(&self) -> bool {
        self.state.lock().is_current()
    }

    fn is_connected(&self) -> bool {
        self.state.lock().connected
    }

    /// Returns what [`reading_ended`](Self::reading_ended) takes.
    pub(super) fn reading_begins(&self) -> u64 {
        self.state.lock().missed
    }

    pub(super) fn reading_ended(&self, begun: u64) {
        self.change(|state| state.made_good = begun);
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        change(&mut state);
        self.current.set(i64::from(state.is_current()));
    }
}

impl State {
    fn is_current(&self) -> bool {
        self.connected && self.missed == self.made_good
    }
}

/// How pages are named in the store, for as long as the fleet stays the same.
#[derive(Debug, Default)]
struct Layouts {
    generation: u64,
    all: Vec<StoredAs>,
}

impl Layouts {
    fn refresh(&mut self, fleet: &FleetReader) {
        let fleet = fleet.current();
        if fleet.generation != self.generation {
            *self = Self { generation: fleet.generation, all: fleet.stored_as() };
        }
    }

    fn read(&self, key: &str) -> Option<Stored> {
        let key = ObjectKey::parse(key)?;
        self.all.iter().find_map(|layout| layout.read(&key))
    }
}

impl StoreView {
    /// Follows what the master publishes at `endpoint`, once it says that it does, until `stop`.
    pub(crate) async fn follow_events(
        self: Arc<Self>,
        endpoint: Endpoint,
        fleet: FleetReader,
        stop: CancellationToken,
    ) {
        let following = async {
            self.wait_for_publisher(&endpoint).await;
            let changes = Changes::default();
            tokio::join!(self.listen(endpoint, &fleet, &changes), self.ask_for(&changes));
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

    async fn wait_for_publisher(&self, endpoint: &Endpoint) {
        let mut told = false;
        loop {
            match self.admin.kv_events_status().await {
                Ok(status) if status.enabled => return,
                Ok(_) | Err(AdminError::Missing { .. }) => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::warn!(%endpoint,
                            "the store's master publishes no KV events, so its keys are read again and again instead; builds for \
                             PyPI cannot publish any, others need --enable_kv_events");
                    }
                    sleep(CHECK_EVERY).await;
                }
                Err(error) => {
                    tracing::debug!(%error, "the store's master does not say whether it publishes events");
                    sleep(ASK_AGAIN).await;
                }
            }
        }
    }

    async fn listen(&self, endpoint: Endpoint, fleet: &FleetReader, changes: &Changes) {
        let mut subscriber = Subscriber::connect(endpoint, vec![Bytes::new()], Options::default());
        let (mut sequence, mut layouts) = (Sequence::default(), Layouts::default());
        let mut unreachable_told = false;
        let mut checks = interval(CHECK_EVERY);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                heard = subscriber.recv() => match heard {
                    Heard::Message(_, message) => {
                        layouts.refresh(fleet);
                        self.message(&message, &mut sequence, &layouts, changes);
                    }
                    Heard::Connected(_) => {
                        sequence = Sequence::connected(self.published().await);
                        tracing::info!("the store's events: connected");
                        self.connected(true);
                        self.following.begun.notify_one();
                        unreachable_told = false;
                    }
                    Heard::Disconnected(_, error) => {
                        tracing::info!(%error, "the store's events: connection lost");
                        self.connected(false);
                    }
                    Heard::Failed(_, error) => {
                        if !std::mem::replace(&mut unreachable_told, true) {
                            tracing::warn!(%error,
                                "the store's events: no connection, so its keys are read again and again instead; is \
                                 --mooncake-events the master's --kv_events_bind_endpoint?");
                        }
                    }
                },
                _ = checks.tick(), if self.following.is_connected() => {
                    if let Some(published) = self.published().await
                        && sequence.check(published)
                    {
                        self.missed("messages that were published have not come");
                    }
                }
            }
        }
    }

    /// How many messages the master has published.
    async fn published(&self) -> Option<u64> {
        Some(self.admin.kv_events_status().await.ok()?.published_batches)
    }

    /// A connection begins or ends. What is stored in between is not heard of.
    fn connected(&self, connected: bool) {
        self.following.change(|state| {
            state.connected = connected;
            state.missed += 1;
        });
        self.read_now.notify_one();
    }

    /// Something was missed: what is known of the store stays, and is read again.
    fn missed(&self, why: &str) {
        tracing::warn!(why, "events of the store were missed; its keys are read again");
        self.following.change(|state| state.missed += 1);
        self.metrics.event_gaps.inc();
        self.read_now.notify_one();
    }

    fn message(&self, message: &Message, sequence: &mut Sequence, layouts: &Layouts, changes: &Changes) {
        let Ok(frames) = Frames::parse(message.parts()) else {
            self.metrics.events_unread.inc();
            return;
        };
        match sequence.message(frames.sequence) {
            Before::Heard => {}
            Before::Missed(_) => self.missed("their numbers have a gap"),
            Before::Restarted => self.missed("their numbers begin anew"),
        }
        let Ok(batch) = Batch::decode(frames.payload) else {
            self.metrics.events_unread.inc();
            return;
        };
        for event in batch.events() {
            match event {
                // Requests of other tenants are not predicted.
                Ok(event) if event.tenant == DEFAULT_TENANT => self.event(&event, layouts, changes),
                Ok(_) => {}
                Err(_) => {
                    self.metrics.events_unread.inc();
                }
            }
        }
    }

    fn event(&self, event: &Event<'_>, layouts: &Layouts, changes: &Changes) {
        let known = |object: &Object<'_>| layouts.read(object.key);
        let (object, stored) = match &event.change {
            Told::Cleared => {
                changes.clear();
                self.forget();
                self.metrics.events.inc();
                return;
            }
            // Nodes are watched, whether the master tells of them or not.
            Told::Segment { .. } => return,
            Told::Stored(object) => (object, known(object)),
            Told::Removed(object) => (object, known(object).inspect(|stored| self.gone(*stored))),
        };
        let Some(stored) = stored else { return };
        self.metrics.events.inc();
        if !changes.add(object.key, Change { stored, told_ms: event.timestamp_ms }) {
            self.missed("the master answers more slowly than objects change");
        }
    }

    /// Asks the master for the objects that have changed, again and again.
    async fn ask_for(&self, changes: &Changes) {
        loop {
            let taken = changes.take().await;
            // A master that lists its keys answers nobody for seconds. Meanwhile changes wait.
            while let Err(error) = self.ask_changed(&taken).await {
                tracing::debug!(%error, "objects that have changed cannot be asked for");
                if !error.may_pass() {
                    self.missed("the master does not say where objects are");
                    break;
                }
                sleep(ASK_AGAIN).await;
            }
        }
    }

    async fn ask_changed(&self, changes: &HashMap<String, Change>) -> Result<(), AdminError> {
        let keys: Vec<&str> = changes.keys().map(String::as_str).collect();
        for keys in keys.chunks(ASKED_AT_ONCE) {
            let mut first_told = u64::MAX;
            let answer = |key: &str, replicas: &KeyReplicas<'_>| {
                let Some(change) = changes.get(key) else { return };
                first_told = first_told.min(change.told_ms);
                if !(replicas.ok && self.put(change.stored, replicas)) {
                    self.gone(change.stored);
                }
            };
            let _turn = self.turn.lock().await;
            self.admin.locate(keys, answer).await?;
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let told = Duration::from_millis(first_told.min(u64::try_from(now.as_millis()).unwrap_or(0)));
            self.metrics.event_lag.observe(now.saturating_sub(told).as_secs_f64());
        }
        Ok(())
    }
}
