//! The parts of one master, shared by all of its services.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::ArcSwap;
use mooncake_wire::Dialect;
use mooncake_wire::caller_dialect::DialectRegistry;
use mooncake_wire::shards::ShardIdentity;
use mooncake_wire::types::{StorageConfig, Uuid};
use moongate_master_core::MasterCore;
use moongate_runtime::PeerTls;

use crate::capabilities::CapabilityIssuer;
use crate::clock::MonotonicUnixClock;
use crate::counters::RpcCounters;
use crate::journal::Journal;
use crate::object_feed::ObjectFeed;
use crate::presence::{NodeDeparture, NodePresence};
use crate::recorder::FactRecorder;
use crate::unknown_forms::UnknownFormReporter;
use crate::upserts::InFlightUpserts;

/// Whether this master is the leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MasterRole {
    /// The leader, or the only master.
    Leader,
    /// Another master is the leader, or none is elected.
    Standby,
}

impl MasterRole {
    /// Mooncake's name of the role.
    pub fn name(self) -> &'static str {
        match self {
            Self::Leader => "leader",
            Self::Standby => "standby",
        }
    }
}

/// Lifecycle state of a master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HaState {
    /// It does not serve calls yet.
    Starting,
    Standby,
    Serving,
    Stopping,
}

impl HaState {
    /// Mooncake's name of the state.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Standby => "standby",
            Self::Serving => "serving",
            Self::Stopping => "stopping",
        }
    }
}

/// Role of a master, and the current leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeadershipStatus {
    /// Whether it is the leader.
    pub role: MasterRole,
    pub state: HaState,
    /// RPC address of the leader, in HA mode.
    pub leader_address: Option<String>,
    /// The leader's term, in HA mode.
    pub view_version: Option<i64>,
}

impl LeadershipStatus {
    /// Status of a master that is not ready yet.
    pub fn starting() -> Self {
        Self { role: MasterRole::Standby, state: HaState::Starting, leader_address: None, view_version: None }
    }

    /// Status of a serving standalone master.
    pub fn standalone() -> Self {
        Self { role: MasterRole::Leader, state: HaState::Serving, leader_address: None, view_version: None }
    }

    /// Whether it serves calls as the leader.
    pub fn is_serving(&self) -> bool {
        self.role == MasterRole::Leader && self.state == HaState::Serving
    }
}

/// Limits of the RPC server.
#[derive(Clone, Copy, Debug)]
pub struct RpcLimits {
    pub connections: usize,
    /// Maximum size of a request in bytes.
    pub frame_bytes: usize,
    /// Maximum size of all connections' buffers in bytes, beyond a small allowance each.
    pub buffer_bytes: usize,
    /// Maximum time in which a request must arrive completely, and in which replies must be read.
    pub stall_timeout: Duration,
    /// An idle connection is closed after this time; `None` keeps it open.
    pub idle_timeout: Option<Duration>,
    /// Whether small replies are sent at once (TCP_NODELAY).
    pub no_delay: bool,
    /// Time for which a thread busy-polls after a reply; zero disables it.
    pub busy_poll: Duration,
    /// Whether a commit may wait for a disk or for followers, so that it must not run on the RPC threads.
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

/// Two heartbeats of Mooncake's clients, which send one per second and retry a failed one a second later, plus half a second to connect.
pub(crate) const RECONNECT_TIME: Duration = Duration::from_millis(2500);

#[derive(Clone, Debug)]
pub struct MasterServerOptions {
    /// Settings of the state machine.
    pub core: moongate_master_core::MasterCoreOptions,
    /// Number of threads that serve calls.
    pub threads: usize,
    /// Mooncake release assumed for clients whose requests do not identify it.
    pub default_dialect: Dialect,
    /// Which shard it is, if the store has several masters.
    pub shard: Option<ShardIdentity>,
    /// Settings of a shared file system, as reported to clients.
    pub storage: StorageConfig<String>,
    /// Whether a node is silent soon after its last connection has closed, instead of after the client TTL. A node whose memory is
    /// persistent always has the client TTL.
    pub lost_on_disconnect: bool,
    /// Time after which such a node is silent. Mooncake's clients send heartbeats on pooled connections, which they may all close while
    /// they are alive; Moongate's nodes use a dedicated connection, and are silent at once when it closes.
    pub reconnect_time: Duration,
    /// Limits of the RPC server.
    pub limits: RpcLimits,
    /// With it, all ports use TLS, and callers need a certificate signed by its CA.
    pub tls: Option<PeerTls>,
}

impl Default for MasterServerOptions {
    fn default() -> Self {
        Self {
            core: moongate_master_core::MasterCoreOptions::default(),
            threads: 1,
            default_dialect: Dialect::NEWEST,
            shard: None,
            storage: StorageConfig { fsdir: String::new(), enable_disk_eviction: true, quota_bytes: 0 },
            lost_on_disconnect: true,
            reconnect_time: RECONNECT_TIME,
            limits: RpcLimits::default(),
            tls: None,
        }
    }
}

/// A master: the state machine, its clock and journal, and what it tracks about its callers.
pub struct MasterServer {
    pub master: MasterCore,
    /// Source of the time for the state machine.
    pub clock: MonotonicUnixClock,
    pub journal: Arc<dyn Journal>,
    pub counters: RpcCounters,
    /// Role of this master and the current leader.
    pub leadership: ArcSwap<LeadershipStatus>,
    pub(crate) dialects: DialectRegistry,
    pub(crate) unknown_forms: UnknownFormReporter,
    pub(crate) presence: NodePresence,
    pub(crate) upserts: InFlightUpserts,
    pub(crate) shard: Option<ShardIdentity>,
    pub(crate) storage: StorageConfig<String>,
    pub(crate) limits: RpcLimits,
    pub(crate) tls: Option<PeerTls>,
    pub(crate) capabilities: CapabilityIssuer,
    lost_on_disconnect: bool,
    pub(crate) feed: Arc<ObjectFeed>,
    /// Higher than the epoch of every earlier master that nodes have reported.
    epoch: AtomicU64,
    is_rebuilding: AtomicBool,
}

/// Maximum epoch that is accepted: a node that reports a higher one is faulty or malicious.
const MAX_EPOCH: u64 = 1 << 60;

impl MasterServer {
    /// A server with an empty state, which does not serve yet.
    pub fn new(options: MasterServerOptions, journal: Arc<dyn Journal>) -> Self {
        let master = MasterCore::new(options.core.clone());
        Self::with_state(options, master, MonotonicUnixClock::start(), journal)
    }

    /// A server with a restored state, which does not serve yet.
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
            shard: options.shard,
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

    pub fn into_master(self) -> MasterCore {
        self.master
    }

    /// A recorder for the changes of calls. They have to be committed before the replies.
    pub fn recorder(&self) -> FactRecorder {
        FactRecorder::with_feed(Arc::clone(&self.journal), Arc::clone(&self.feed))
    }

    /// Opens the rebuild from node inventories, because this state lacks confirmed changes. Call it before any service starts.
    pub(crate) fn open_rebuild(&self) {
        let settings = self.master.settings();
        let window_ms = settings.client_ttl_ms.saturating_add(settings.client_grace_ms);
        let now_ms = self.clock.now_ms();
        self.master.open_rebuild(now_ms, now_ms.saturating_add(window_ms));
        self.is_rebuilding.store(true, Relaxed);
        tracing::info!(window_ms, "rebuilding from node inventories: the log is missing or incomplete");
    }

    /// Raises this master's epoch above one that a node has records of, and returns it.
    pub(crate) fn raise_epoch(&self, reported: u64) -> u64 {
        // Nodes report this master's own epoch too, which needs no change.
        let own = self.epoch.load(Relaxed);
        if reported > own && reported < MAX_EPOCH {
            tracing::warn!(
                node_epoch = reported,
                own_epoch = own,
                "a node has records of a later epoch: the clock of an earlier master was fast"
            );
            self.epoch.fetch_max(reported + 1, Relaxed);
        }
        self.epoch.load(Relaxed)
    }

    fn watch_rebuild(&self) {
        if self.is_rebuilding.load(Relaxed) && !self.master.rebuild_is_open() {
            self.is_rebuilding.store(false, Relaxed);
            let counts = self.master.restore_counts();
            let offered: u64 = counts.iter().map(|(_, count)| count).sum();
            let refused: u64 =
                counts.iter().filter(|(outcome, _)| !outcome.is_accepted()).map(|(_, count)| count).sum();
            if offered > 0 {
                let counts = counts.map(|(outcome, count)| format!("{}={count}", outcome.label())).join(" ");
                tracing::info!(offered, refused, counts, "the rebuild from node inventories has ended");
            }
        }
    }

    /// Runs periodic work: evictions, expirations and task dispatch.
    pub fn tick(&self, recorder: &mut FactRecorder) {
        let now_ms = self.clock.now_ms();
        for node in self.presence.take_expired(now_ms) {
            self.handle_node_departure(node, NodeDeparture::Lost);
        }
        self.master.tick(now_ms, recorder);
        self.feed.tick(now_ms);
        self.watch_rebuild();
        // The persister logs a failing journal; a hundred lines per second would not help.
        if let Err(error) = recorder.commit() {
            tracing::debug!(%error, "cannot write the journal");
        }
    }

    /// Handles the loss of a node's last connection.
    pub(crate) fn handle_node_departure(&self, node: Uuid, departure: NodeDeparture) {
        if !self.leadership.load().is_serving() {
            return;
        }
        if departure == NodeDeparture::Restarting {
            tracing::info!(%node, "node disconnected; its memory is held, readers wait for its restart");
            self.master.client_restarting(node);
        } else if self.lost_on_disconnect {
            let mut recorder = self.recorder();
            self.master.client_disconnected(self.clock.now_ms(), node, &mut recorder);
            if let Err(error) = recorder.commit() {
                tracing::error!(%error, "cannot write the journal");
            }
        }
    }
}

impl std::fmt::Debug for MasterServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MasterServer").field("leadership", &self.leadership).finish_non_exhaustive()
    }
}
