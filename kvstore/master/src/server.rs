//! All that one master is made of, shared by everything that serves it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::ArcSwap;
use mooncake_wire::Dialect;
use mooncake_wire::types::{StorageConfig, Uuid};
use moongate_master_core::MasterCore;
use moongate_runtime::PeerTls;

use crate::capabilities::CapabilityIssuer;
use crate::clock::MonotonicUnixClock;
use crate::counters::RpcCounters;
use crate::dialects::DialectRegistry;
use crate::journal::{FactRecorder, Journal};
use crate::object_feed::ObjectFeed;
use crate::presence::{NodeDeparture, NodePresence};
use crate::unknown_forms::UnknownFormReporter;
use crate::upserts::InFlightUpserts;

/// Whether this master decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MasterRole {
    /// It does.
    Leader,
    /// Another does, or it is not settled.
    Standby,
}

impl MasterRole {
    /// Mooncake's word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Leader => "leader",
            Self::Standby => "standby",
        }
    }
}

/// How far a master is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HaState {
    /// It does not answer calls yet.
    Starting,
    /// It follows another.
    Standby,
    /// It answers calls.
    Serving,
    /// It ends.
    Stopping,
}

impl HaState {
    /// Mooncake's word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Standby => "standby",
            Self::Serving => "serving",
            Self::Stopping => "stopping",
        }
    }
}

/// What a master is among others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeadershipStatus {
    /// Whether it decides.
    pub role: MasterRole,
    /// How far it is.
    pub state: HaState,
    /// The RPC address of who decides, if there is more than one master.
    pub leader_address: Option<String>,
    /// Counts changes of the leader, if there is more than one master.
    pub view_version: Option<i64>,
}

impl LeadershipStatus {
    /// That of a master which is not ready yet.
    pub fn starting() -> Self {
        Self { role: MasterRole::Standby, state: HaState::Starting, leader_address: None, view_version: None }
    }

    /// That of the only master there is.
    pub fn standalone() -> Self {
        Self { role: MasterRole::Leader, state: HaState::Serving, leader_address: None, view_version: None }
    }

    /// Whether it answers calls.
    pub fn is_serving(&self) -> bool {
        self.role == MasterRole::Leader && self.state == HaState::Serving
    }
}

/// Bounds of what callers may ask for.
#[derive(Clone, Copy, Debug)]
pub struct RpcLimits {
    /// Connections at a time.
    pub connections: usize,
    /// Bytes of one request.
    pub frame_bytes: usize,
    /// Bytes that all connections together may hold in requests and replies beyond a small allowance each.
    pub buffer_bytes: usize,
    /// How long a request may take to arrive as a whole, and replies to be taken.
    pub stall_timeout: Duration,
    /// After which silence a connection is closed; none for never.
    pub idle_timeout: Option<Duration>,
    /// Whether small replies are sent at once (TCP_NODELAY).
    pub no_delay: bool,
    /// How long a thread stays awake after an answer, in wait for the next request; zero for not at all.
    pub busy_poll: Duration,
    /// Whether a commit may wait for a disk or for others, so that threads must not wait for it.
    pub commits_wait: bool,
}

impl Default for RpcLimits {
    fn default() -> Self {
        Self {
            connections: 16_384,
            frame_bytes: 256 << 20,
            buffer_bytes: 1 << 30,
            stall_timeout: Duration::from_secs(60),
            idle_timeout: None,
            no_delay: true,
            busy_poll: Duration::from_micros(60),
            commits_wait: false,
        }
    }
}

/// Two heartbeats of Mooncake's clients, which send one a second and repeat a failed one a second later, and half a second to connect.
pub(crate) const RECONNECT_TIME: Duration = Duration::from_millis(2500);

/// What a server is made with.
#[derive(Clone, Debug)]
pub struct MasterServerOptions {
    /// The state machine's settings.
    pub core: moongate_master_core::MasterCoreOptions,
    /// Threads that serve calls.
    pub threads: usize,
    /// The release that those speak who do not tell.
    pub default_dialect: Dialect,
    /// What clients are told about a shared file system.
    pub storage: StorageConfig<String>,
    /// Whether a node counts as silent soon after its last connection is gone, instead of after the client TTL. One that has
    /// said that it returns always has that time.
    pub lost_on_disconnect: bool,
    /// How soon that is. Clients of Mooncake send heartbeats on pooled connections, which they may all close although
    /// they live; ours send them on a connection of their own, and are silent at once when it breaks.
    pub reconnect_time: Duration,
    /// Bounds.
    pub limits: RpcLimits,
    /// With it, all ports are TLS, and callers need a certificate of its authority.
    pub tls: Option<PeerTls>,
}

impl Default for MasterServerOptions {
    fn default() -> Self {
        Self {
            core: moongate_master_core::MasterCoreOptions::default(),
            threads: 1,
            default_dialect: Dialect::NEWEST,
            storage: StorageConfig { fsdir: String::new(), enable_disk_eviction: true, quota_bytes: 0 },
            lost_on_disconnect: true,
            reconnect_time: RECONNECT_TIME,
            limits: RpcLimits::default(),
            tls: None,
        }
    }
}

/// A master: its state, and what it knows of those who call it.
pub struct MasterServer {
    /// The state machine.
    pub master: MasterCore,
    /// Where its time comes from.
    pub clock: MonotonicUnixClock,
    /// Where its facts go.
    pub journal: Arc<dyn Journal>,
    /// Calls, by RPC.
    pub counters: RpcCounters,
    /// What it is among others.
    pub leadership: ArcSwap<LeadershipStatus>,
    pub(crate) dialects: DialectRegistry,
    pub(crate) unknown_forms: UnknownFormReporter,
    pub(crate) presence: NodePresence,
    pub(crate) upserts: InFlightUpserts,
    pub(crate) storage: StorageConfig<String>,
    pub(crate) limits: RpcLimits,
    pub(crate) tls: Option<PeerTls>,
    pub(crate) capabilities: CapabilityIssuer,
    lost_on_disconnect: bool,
    pub(crate) feed: Arc<ObjectFeed>,
    /// Later than that of every earlier master that nodes have reported.
    epoch: AtomicU64,
    is_rebuilding: AtomicBool,
}

/// The highest epoch that is accepted: a higher one of a node is damaged, or malicious.
const MAX_EPOCH: u64 = 1 << 60;

impl MasterServer {
    /// A server with an empty state, which is not serving yet.
    pub fn new(options: MasterServerOptions, journal: Arc<dyn Journal>) -> Self {
        let master = MasterCore::new(options.core.clone());
        Self::with_state(options, master, MonotonicUnixClock::start(), journal)
    }

    /// A server with a state that was kept, which is not serving yet.
    pub fn with_state(
        options: MasterServerOptions,
        master: MasterCore,
        clock: MonotonicUnixClock,
        journal: Arc<dyn Journal>,
    ) -> Self {
        Self {
            master,
            clock,
            journal,
            counters: RpcCounters::new(options.threads),
            leadership: ArcSwap::from_pointee(LeadershipStatus::starting()),
            dialects: DialectRegistry::new(options.default_dialect),
            unknown_forms: UnknownFormReporter::default(),
            presence: NodePresence::new(
                u64::try_from(options.reconnect_time.as_millis()).unwrap_or(u64::MAX),
            ),
            upserts: InFlightUpserts::default(),
            storage: options.storage,
            limits: options.limits,
            tls: options.tls,
            capabilities: CapabilityIssuer::default(),
            lost_on_disconnect: options.lost_on_disconnect,
            feed: Arc::new(ObjectFeed::new(clock.now_ms().saturating_mul(1 << 20))),
            epoch: AtomicU64::new(clock.now_ms()),
            is_rebuilding: AtomicBool::new(false),
        }
    }

    /// The state alone.
    pub fn into_master(self) -> MasterCore {
        self.master
    }

    /// Somewhere to put the facts of calls into the state machine. They have to be committed before anybody is told.
    pub fn recorder(&self) -> FactRecorder {
        FactRecorder::with_feed(Arc::clone(&self.journal), Arc::clone(&self.feed))
    }

    /// Opens the rebuild from nodes, since this state lacks acknowledged changes. To be called before anything
    /// is served.
    pub(crate) fn open_rebuild(&self) {
        let settings = self.master.settings();
        let window_ms = settings.client_ttl_ms.saturating_add(settings.client_grace_ms);
        let now_ms = self.clock.now_ms();
        self.master.open_rebuild(now_ms, now_ms.saturating_add(window_ms));
        self.is_rebuilding.store(true, Relaxed);
        tracing::info!(
            window_ms,
            "the state lacks what a log would have: nodes may restore the objects that they can prove"
        );
    }

    /// This master's epoch, which is later than one that a node has records of.
    pub(crate) fn raise_epoch(&self, known: u64) -> u64 {
        // What this master has reported itself is no reason.
        let own = self.epoch.load(Relaxed);
        if known > own && known < MAX_EPOCH {
            tracing::warn!(
                known,
                own,
                "a node has records of a later epoch: the clock of an earlier master was ahead"
            );
            self.epoch.fetch_max(known + 1, Relaxed);
        }
        self.epoch.load(Relaxed)
    }

    fn watch_rebuild(&self) {
        if self.is_rebuilding.load(Relaxed) && !self.master.rebuild_is_open() {
            self.is_rebuilding.store(false, Relaxed);
            let counts = self.master.restore_counts();
            let offered: u64 = counts.iter().map(|(_, count)| count).sum();
            let refused: u64 =
                counts.iter().filter(|(it, _)| !it.is_accepted()).map(|(_, count)| count).sum();
            if offered > 0 {
                let counts = counts.map(|(it, count)| format!("{}={count}", it.label())).join(" ");
                tracing::info!(offered, refused, counts, "the rebuild from nodes' inventories is over");
            }
        }
    }

    /// Does what is due: evicts, expires, dispatches tasks.
    pub fn tick(&self, recorder: &mut FactRecorder) {
        let now_ms = self.clock.now_ms();
        for node in self.presence.take_expired(now_ms) {
            self.handle_node_departure(node, NodeDeparture::Lost);
        }
        self.master.tick(now_ms, recorder);
        self.feed.tick(now_ms);
        self.watch_rebuild();
        // Who keeps the journal tells when it cannot be written; a hundred lines a second would not help.
        if let Err(error) = recorder.commit() {
            tracing::debug!(%error, "the journal cannot be written");
        }
    }

    /// The last connection of a node has closed, and the node counts as lost.
    pub(crate) fn handle_node_departure(&self, node: Uuid, how: NodeDeparture) {
        if !self.leadership.load().is_serving() {
            return;
        }
        if how == NodeDeparture::Restarting {
            tracing::info!(%node, "a node is gone whose memory is kept: readers wait for it");
            self.master.client_restarting(node);
        } else if self.lost_on_disconnect {
            let mut recorder = self.recorder();
            self.master.client_disconnected(self.clock.now_ms(), node, &mut recorder);
            if let Err(error) = recorder.commit() {
                tracing::error!(%error, "the journal cannot be written");
            }
        }
    }
}

impl std::fmt::Debug for MasterServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("standing", &self.leadership).finish_non_exhaustive()
    }
}
