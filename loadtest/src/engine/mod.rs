//! Simulated inference engines.
//!
//! An engine here answers with the members, ids, errors and delays of SGLang 0.5.23 or vLLM 0.32 over real
//! sockets, but its model is a hash: text in tokens of four bytes, and an answer that is a function of the whole
//! prompt. Two engines given the same prompt say the same, one engine or a prefill/decode pair, and a pair that
//! was given two different prompts says something else, with status 200, as real ones do.
//!
//! | part | subject |
//! |---|---|
//! | `tokens`, `tools`, `adapters` | what it says, and under which names |
//! | `rank`, `cache`, `namespace` | what it remembers |
//! | `store`, `store_admin` | what a fleet shares, and its master's face |
//! | `object_store` | a real store in its place |
//! | `events` | what it tells about that |
//! | `service`, `prefill_queue` | how long it takes |
//! | `speech` | the life of one choice |
//! | `handover`, `rendezvous` | how prefill and decode meet |
//! | `ask`, `write`, `serve`, `stream` | requests and answers |
//! | `face_sglang`, `face_vllm`, `tokenize`, `bootstrap` | the two protocols |
//! | `server`, `faults`, `stats` | sockets, failures, counters |

mod adapters;
mod ask;
mod bootstrap;
mod cache;
mod config;
mod events;
mod face_sglang;
mod face_vllm;
mod faults;
mod handover;
mod metrics;
mod namespace;
mod object_store;
mod prefill_queue;
mod rank;
mod rendezvous;
mod reply;
mod serve;
mod server;
mod service;
mod speech;
mod stats;
mod store;
mod store_admin;
mod stream;
mod tokenize;
pub mod tokens;
mod tools;
mod write;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use moongate_runtime::Supervisor;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio_util::sync::CancellationToken;

pub use self::cache::CachedTokens;
pub use self::config::{Connector, Face, Role, ServiceModel, SimConfig, SimError, SimFleet};
pub use self::events::KvEvents;
pub use self::faults::{Fault, FaultPlan};
pub use self::stats::{AbortEvent, AbortKind, RecordedRequest, SimStats};
pub use self::store_admin::StoreAdmin;

use self::cache::Kept;
use self::events::{Ports, Prefix, Reporter};
use self::faults::FaultSwitch;
use self::object_store::Objects;
use self::rank::Rank;
use self::rendezvous::{KvOffer, Places};
use self::service::Timing;
use self::stats::{Gauge, Stats};
use self::store::Tier;

/// How long a stop waits for the engine's tasks.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// A request that can be aborted by its id.
#[derive(Debug)]
struct OpenRequest {
    rids: Vec<String>,
    cancel: CancellationToken,
}

/// What all connections of an engine share.
#[derive(Debug)]
pub(crate) struct Engine {
    config: SimConfig,
    fleet: SimFleet,
    /// A new one at every start, as real engines have.
    engine_id: String,
    stats: Arc<Stats>,
    faults: FaultSwitch,
    timing: Timing,
    ranks: Vec<Rank>,
    places: Arc<Places>,
    client: reqwest::Client,
    supervisor: Supervisor,
    open: Mutex<HashMap<u64, OpenRequest>>,
    next_request: AtomicU64,
    next_rank: AtomicU32,
    main: SocketAddr,
    bootstrap: Option<SocketAddr>,
    event_ports: Option<Ports>,
    /// Data-parallel ranks that were registered for rooms.
    room_ranks: Mutex<HashMap<u64, u32>>,
    refusing: watch::Sender<bool>,
    ready: AtomicBool,
    adapters: adapters::Adapters,
}

impl Engine {
    fn rank(&self, rank: u32) -> &Rank {
        // There is at least one, and the caller has checked the number.
        &self.ranks[(rank as usize) % self.ranks.len()]
    }

    fn store(&self) -> Option<Tier<'_>> {
        if self.config.storage() { self.fleet.store() } else { None }
    }

    /// Whether somebody is told its pages by their real names, for which tokens are needed.
    fn names_pages(&self) -> bool {
        self.config.kv_events.is_some() || matches!(self.store(), Some(Tier::Objects(_)))
    }

    /// Keeps prefixes of different models, page sizes and tenants apart.
    fn cache_salt(&self, tenant: u64) -> u64 {
        let model = tokens::hash_bytes(self.config.model.as_bytes());
        tokens::mix(tokens::mix(model, self.config.page_size as u64), tenant)
    }

    /// Puts a computed prefix into the rank's cache, and into the shared store.
    fn remember(self: &Arc<Self>, rank: u32, prefix: &Prefix<'_>) {
        let written = self.rank(rank).keep(prefix, &Kept::Computed);
        match self.store() {
            Some(Tier::Simulated(store)) => store.lock().put(&written, self.config.page_size),
            Some(Tier::Objects(store)) => {
                store.put_later(self, Objects::of(&self.config, prefix).only(prefix, &written));
            }
            None => {}
        }
    }

    async fn place_in_batch(&self, rank: u32) -> Option<OwnedSemaphorePermit> {
        let batch = Arc::clone(&self.rank(rank).batch);
        if let Ok(permit) = Arc::clone(&batch).try_acquire_owned() {
            return Some(permit);
        }
        let _waiting = Gauge::new(&self.stats, 1, |stats, by| {
            stats.waiting = stats.waiting.saturating_add_signed(by);
        });
        batch.acquire_owned().await.ok()
    }

    /// Keeps a vLLM prefill's cache until it is taken or its lease ends.
    fn keep_offer(self: &Arc<Self>, key: &str, rank: u32, offer: KvOffer) {
        let Ok(place) = self.places.keep(key, rank) else { return };
        place.offer(offer);
        let (engine, lease, stop) = (Arc::clone(self), self.config.pair_timeout(), self.supervisor.token());
        self.supervisor.spawn("sim-engine-lease", async move {
            tokio::select! {
                taken = place.taken(lease) => {
                    if taken.is_ok() {
                        engine.stats.change(|stats| stats.kv_sent += 1);
                    }
                }
                () = stop.cancelled() => {}
            }
        });
    }

    fn next_rank(&self) -> u32 {
        self.next_rank.fetch_add(1, Ordering::Relaxed) % self.config.dp_size
    }

    fn set_fault(self: &Arc<Self>, plan: FaultPlan) {
        self.faults.set(plan);
        self.refusing.send_replace(plan.fault == Fault::Refuse);
        if let Some(milliseconds) = plan.for_ms {
            let engine = Arc::clone(self);
            let stop = self.supervisor.token();
            self.supervisor.spawn("sim-engine-fault-timer", async move {
                tokio::select! {
                    () = tokio::time::sleep(Duration::from_millis(milliseconds)) => {
                        if engine.faults.clear_if(plan) {
                            engine.refusing.send_replace(false);
                        }
                    }
                    () = stop.cancelled() => {}
                }
            });
        }
    }

    /// Aborts requests by `/abort_request`'s rule: the id is a prefix.
    fn abort_by_rid(&self, rid: &str, all: bool) {
        for request in self.open.lock().values() {
            if all || (!rid.is_empty() && request.rids.iter().any(|own| own.starts_with(rid))) {
                request.cancel.cancel();
            }
        }
    }

    fn flush_caches(&self) {
        self.ranks.iter().for_each(|rank| rank.clear(Reporter::clear));
    }

    /// Empties the caches as a restart of the process does: nobody is told, and events count from 0 again.
    fn restart_caches(&self) {
        self.ranks.iter().for_each(|rank| rank.clear(Reporter::restart));
    }

    /// Loses every `every`-th event message of each rank from now on; 0 loses none.
    fn lose_kv_events(&self, every: u64) {
        self.ranks.iter().for_each(|rank| rank.report(|reporter| reporter.lose(every)));
    }

    fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed)
    }
}

/// A running simulated engine. It stops when dropped.
#[derive(Debug)]
pub struct SimEngine {
    engine: Arc<Engine>,
}

impl SimEngine {
    /// Starts an engine with a fleet of its own.
    ///
    /// # Errors
    /// A setting is out of range, or an address cannot be bound.
    pub async fn start(config: SimConfig) -> Result<Self, SimError> {
        Self::start_in(config, &SimFleet::default()).await
    }

    /// Starts an engine that shares the fleet's store.
    ///
    /// # Errors
    /// As [`SimEngine::start`].
    pub async fn start_in(config: SimConfig, fleet: &SimFleet) -> Result<Self, SimError> {
        config.check()?;
        let supervisor = Supervisor::new();
        let listener = server::bind(config.listen).await?;
        let addr = server::local_addr(&listener, config.listen)?;
        let bootstrap_listener = match (config.role, config.bootstrap_listen) {
            (Role::Prefill, Some(address)) => Some(server::bind(address).await?),
            (Role::Prefill, None) => Some(server::bind(SocketAddr::new(addr.ip(), 0)).await?),
            (Role::Decode | Role::Plain, _) => None,
        };
        let bootstrap = match &bootstrap_listener {
            Some(listener) => Some(server::local_addr(listener, config.listen)?),
            None => None,
        };
        let stats = Arc::new(Stats::new(config.dp_size));
        let refusing = watch::Sender::new(false);
        let (event_ports, reporters) = events::start(&config, &refusing, &supervisor).await?;
        let mut reporters = reporters.into_iter();
        let ranks = (0..config.dp_size)
            .map(|_| Rank::start(&config, reporters.next(), &stats, &supervisor))
            .collect();
        let engine = Arc::new(Engine {
            timing: Timing::new(config.service.clone(), config.time_scale),
            fleet: fleet.clone(),
            engine_id: reply::uuid(),
            stats,
            faults: FaultSwitch::default(),
            ranks,
            places: Arc::new(Places::default()),
            client: moongate_runtime::plain_http().connect_timeout(Duration::from_secs(2)).build()?,
            supervisor,
            open: Mutex::default(),
            next_request: AtomicU64::new(0),
            next_rank: AtomicU32::new(0),
            main: addr,
            bootstrap,
            event_ports,
            room_ranks: Mutex::default(),
            refusing,
            adapters: adapters::Adapters::default(),
            ready: AtomicBool::new(config.ready_after.is_zero()),
            config,
        });
        engine.get_ready_later();
        server::serve(&engine, listener, addr, server::Port::Main);
        if let (Some(listener), Some(address)) = (bootstrap_listener, bootstrap) {
            server::serve(&engine, listener, address, server::Port::Bootstrap);
        }
        Ok(Self { engine })
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.engine.main
    }

    /// `http://host:port` of [`SimEngine::addr`].
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.engine.main)
    }

    /// Where its bootstrap server or side channel listens; prefill engines have one.
    #[must_use]
    pub fn bootstrap_addr(&self) -> Option<SocketAddr> {
        self.engine.bootstrap
    }

    /// The id that this start of the engine goes by (vLLM's `engine_id`).
    #[must_use]
    pub fn engine_id(&self) -> &str {
        &self.engine.engine_id
    }

    /// Where a data-parallel rank publishes KV events, and where it replays them, if it does.
    #[must_use]
    pub fn kv_event_addrs(&self, rank: u32) -> Option<(SocketAddr, SocketAddr)> {
        self.engine.event_ports.map(|ports| (ports.live(rank), ports.replay(rank)))
    }

    /// Its settings.
    #[must_use]
    pub fn config(&self) -> &SimConfig {
        &self.engine.config
    }

    /// Its counters now.
    #[must_use]
    pub fn stats(&self) -> SimStats {
        self.engine.stats.snapshot()
    }

    /// Waits until the counters meet a condition. False if they have not within `timeout`.
    pub async fn wait_for(&self, timeout: Duration, condition: impl FnMut(&SimStats) -> bool) -> bool {
        self.engine.stats.wait_for(timeout, condition).await
    }

    /// The latest generation and abort requests, oldest first, as they came over the wire.
    #[must_use]
    pub fn last_requests(&self, count: usize) -> Vec<RecordedRequest> {
        self.engine.stats.last(count)
    }

    /// Makes the engine fail, or work again with [`Fault::None`]. Takes a [`Fault`] or a [`FaultPlan`]. It meets
    /// requests that come after the call; [`Fault::Refuse`] also ends those that are open.
    pub fn set_fault(&self, plan: impl Into<FaultPlan>) {
        self.engine.set_fault(plan.into());
    }

    /// Loses every `every`-th KV-event message of each rank from now on, so that subscribers see gaps: it has a number and can
    /// be replayed, but nobody gets it. 0 loses none.
    pub fn lose_kv_events(&self, every: u64) {
        self.engine.lose_kv_events(every);
    }

    /// Empties the caches as a restart of the process does: nobody is told, event connections end, and messages count from 0
    /// again.
    pub fn restart_caches(&self) {
        self.engine.restart_caches();
    }

    /// Ends the engine as a killed process ends: sockets closed, requests dropped.
    pub async fn stop(self) {
        if let Err(left) = self.engine.supervisor.shutdown(STOP_DEADLINE).await {
            tracing::warn!(%left, "a simulated engine did not stop in time");
        }
    }
}

impl Drop for SimEngine {
    fn drop(&mut self) {
        self.engine.supervisor.token().cancel();
    }
}

impl Engine {
    fn get_ready_later(self: &Arc<Self>) {
        if self.is_ready() {
            return;
        }
        let (engine, stop) = (Arc::clone(self), self.supervisor.token());
        self.supervisor.spawn("sim-engine-startup", async move {
            tokio::select! {
                () = tokio::time::sleep(engine.config.ready_after) => engine.ready.store(true, Ordering::Relaxed),
                () = stop.cancelled() => {}
            }
        });
    }
}
