//! All that one master is made of, shared by everything that serves it.

use std::sync::Arc;

use arc_swap::ArcSwap;
use mooncake_wire::Dialect;
use mooncake_wire::types::{StorageConfig, Uuid};
use moongate_kvcore::Master;

use crate::clock::Clock;
use crate::count::Counters;
use crate::dialects::Dialects;
use crate::journal::{Journal, Recorder};
use crate::presence::{Gone, Presence};
use crate::releases::Releases;

/// Whether this master decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It does.
    Leader,
    /// Another does, or it is not settled.
    Standby,
}

impl Role {
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
pub struct Standing {
    /// Whether it decides.
    pub role: Role,
    /// How far it is.
    pub state: HaState,
    /// The RPC address of who decides, if there is more than one master.
    pub leader_address: Option<String>,
    /// Counts changes of the leader, if there is more than one master.
    pub view_version: Option<i64>,
}

impl Standing {
    /// That of a master which is not ready yet.
    pub fn starting() -> Self {
        Self { role: Role::Standby, state: HaState::Starting, leader_address: None, view_version: None }
    }

    /// That of the only master there is.
    pub fn alone() -> Self {
        Self { role: Role::Leader, state: HaState::Serving, leader_address: None, view_version: None }
    }

    /// Whether it answers calls.
    pub fn is_serving(&self) -> bool {
        self.role == Role::Leader && self.state == HaState::Serving
    }
}

/// Bounds of what callers may ask for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time.
    pub connections: usize,
    /// Bytes of one request.
    pub frame_bytes: usize,
    /// Bytes that all connections together may hold in requests and replies beyond a small allowance each.
    pub buffer_bytes: usize,
    /// How long a request may take to arrive as a whole, and replies to be taken.
    pub stall: std::time::Duration,
    /// After which silence a connection is closed; none for never.
    pub idle: Option<std::time::Duration>,
    /// Whether small replies are sent at once (TCP_NODELAY).
    pub no_delay: bool,
    /// How long a thread stays awake after an answer, in wait for the next request; zero for not at all.
    pub awake: std::time::Duration,
    /// Whether a commit may wait for a disk or for others, so that threads must not wait for it.
    pub commits_wait: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 16_384,
            frame_bytes: 256 << 20,
            buffer_bytes: 1 << 30,
            stall: std::time::Duration::from_secs(60),
            idle: None,
            no_delay: true,
            awake: std::time::Duration::from_micros(60),
            commits_wait: false,
        }
    }
}

/// What a server is made with.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The state machine's settings.
    pub core: moongate_kvcore::Settings,
    /// Threads that serve calls.
    pub threads: usize,
    /// The release that those speak who do not tell.
    pub default_dialect: Dialect,
    /// What clients are told about a shared file system.
    pub storage: StorageConfig<String>,
    /// Whether a node counts as silent as soon as its last connection is gone, instead of after the client TTL. One that has
    /// said that it returns always has that time.
    pub lost_on_disconnect: bool,
    /// Bounds.
    pub limits: Limits,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            core: moongate_kvcore::Settings::default(),
            threads: 1,
            default_dialect: Dialect::NEWEST,
            storage: StorageConfig { fsdir: String::new(), enable_disk_eviction: true, quota_bytes: 0 },
            lost_on_disconnect: true,
            limits: Limits::default(),
        }
    }
}

/// A master: its state, and what it knows of those who call it.
pub struct Server {
    /// The state machine.
    pub master: Master,
    /// Where its time comes from.
    pub clock: Clock,
    /// Where its facts go.
    pub journal: Arc<dyn Journal>,
    /// Calls, by RPC.
    pub counters: Counters,
    /// What it is among others.
    pub standing: ArcSwap<Standing>,
    pub(crate) dialects: Dialects,
    pub(crate) releases: Releases,
    pub(crate) presence: Presence,
    pub(crate) storage: StorageConfig<String>,
    pub(crate) limits: Limits,
    lost_on_disconnect: bool,
}

impl Server {
    /// A server with an empty state, which is not serving yet.
    pub fn new(options: ServerOptions, journal: Arc<dyn Journal>) -> Self {
        let master = Master::new(options.core.clone());
        Self::with_state(options, master, Clock::start(), journal)
    }

    /// A server with a state that was kept, which is not serving yet.
    pub fn with_state(
        options: ServerOptions,
        master: Master,
        clock: Clock,
        journal: Arc<dyn Journal>,
    ) -> Self {
        Self {
            master,
            clock,
            journal,
            counters: Counters::new(options.threads),
            standing: ArcSwap::from_pointee(Standing::starting()),
            dialects: Dialects::new(options.default_dialect),
            releases: Releases::default(),
            presence: Presence::default(),
            storage: options.storage,
            limits: options.limits,
            lost_on_disconnect: options.lost_on_disconnect,
        }
    }

    /// The state alone.
    pub fn into_master(self) -> Master {
        self.master
    }

    /// Somewhere to put the facts of calls into the state machine. They have to be committed before anybody is told.
    pub fn recorder(&self) -> Recorder {
        Recorder::new(Arc::clone(&self.journal))
    }

    /// Does what is due: evicts, expires, dispatches tasks.
    pub fn tick(&self, recorder: &mut Recorder) {
        self.master.tick(self.clock.now_ms(), recorder);
        // Who keeps the journal tells when it cannot be written; a hundred lines a second would not help.
        if let Err(error) = recorder.commit() {
            tracing::debug!(%error, "the journal cannot be written");
        }
    }

    /// The last connection of a node is gone.
    pub(crate) fn node_gone(&self, node: Uuid, how: Gone) {
        if !self.standing.load().is_serving() {
            return;
        }
        if how == Gone::Away {
            tracing::info!(%node, "a node is gone whose memory is kept: readers wait for it");
            self.master.client_away(node);
        } else if self.lost_on_disconnect {
            let mut recorder = self.recorder();
            self.master.client_lost(self.clock.now_ms(), node, &mut recorder);
            if let Err(error) = recorder.commit() {
                tracing::error!(%error, "the journal cannot be written");
            }
        }
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("standing", &self.standing).finish_non_exhaustive()
    }
}
