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
mod api_sglang;
mod api_vllm;
mod bootstrap;
mod cache;
mod config;
mod events;
mod faults;
mod generation;
mod kv_transfer;
mod l3_store;
mod master_admin;
mod metrics;
mod namespace;
mod object_store;
mod prefill_queue;
mod rank;
mod render;
mod rendezvous;
mod request;
mod response;
mod serve;
mod server;
mod stats;
mod stream;
mod timing;
mod tokenize;
pub mod tokens;
mod tools;

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
pub use self::config::{
    EngineTimeModel, SharedL3Store, SimEngineError, SimEngineOptions, SimProtocol, SimRole, VllmConnector,
};
pub use self::events::KvEventOptions;
pub use self::faults::{EngineFault, EngineFaultPlan};
pub use self::master_admin::SimMasterAdmin;
pub use self::stats::{AbortEvent, AbortKind, RecordedRequest, SimStats};

use self::cache::PageOrigin;
use self::events::{KvEventPorts, KvEventReporter, PromptPrefix};
use self::faults::EngineFaultInjector;
use self::l3_store::L3Backend;
use self::object_store::PageObjects;
use self::rank::SimRank;
use self::rendezvous::{KvOffer, RendezvousTable};
use self::stats::{SimGaugeGuard, SimStatsRecorder};
use self::timing::ScaledTiming;

/// How long a stop waits for the engine's tasks.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// A request that can be aborted by its id.
#[derive(Debug)]
struct AbortableRequest {
    rids: Vec<String>,
    cancel: CancellationToken,
}

/// What all connections of an engine share.
#[derive(Debug)]
pub(crate) struct SimEngineState {
    options: SimEngineOptions,
    l3_store: SharedL3Store,
    /// A new one at every start, as real engines have.
    engine_id: String,
    stats: Arc<SimStatsRecorder>,
    faults: EngineFaultInjector,
    timing: ScaledTiming,
    ranks: Vec<SimRank>,
    rendezvous: Arc<RendezvousTable>,
    client: reqwest::Client,
    supervisor: Supervisor,
    abortable_requests: Mutex<HashMap<u64, AbortableRequest>>,
    next_request: AtomicU64,
    next_rank: AtomicU32,
    main_addr: SocketAddr,
    bootstrap_addr: Option<SocketAddr>,
    event_ports: Option<KvEventPorts>,
    /// Data-parallel ranks that were registered for rooms.
    room_ranks: Mutex<HashMap<u64, u32>>,
    refuse_connections: watch::Sender<bool>,
    ready: AtomicBool,
    adapters: adapters::LoraAdapters,
}

impl SimEngineState {
    fn rank(&self, rank: u32) -> &SimRank {
        // There is at least one, and the caller has checked the number.
        &self.ranks[(rank as usize) % self.ranks.len()]
    }

    fn l3_backend(&self) -> Option<L3Backend<'_>> {
        if self.options.uses_l3_store() { self.l3_store.backend() } else { None }
    }

    /// Whether somebody is told its pages by their real names, for which tokens are needed.
    fn needs_page_hashes(&self) -> bool {
        self.options.kv_events.is_some() || matches!(self.l3_backend(), Some(L3Backend::Objects(_)))
    }

    /// Keeps prefixes of different models, page sizes and tenants apart.
    fn cache_salt(&self, tenant: u64) -> u64 {
        let model = tokens::hash_bytes(self.options.model.as_bytes());
        tokens::mix(tokens::mix(model, self.options.page_size as u64), tenant)
    }

    /// Puts a computed prefix into the rank's cache, and into the shared store.
    fn insert_prefix(self: &Arc<Self>, rank: u32, prefix: &PromptPrefix<'_>) {
        let written = self.rank(rank).insert(prefix, &PageOrigin::Computed);
        match self.l3_backend() {
            Some(L3Backend::Simulated(store)) => store.lock().put(&written, self.options.page_size),
            Some(L3Backend::Objects(store)) => {
                store.put_in_background(
                    self,
                    PageObjects::of(&self.options, prefix).restrict_to(prefix, &written),
                );
            }
            None => {}
        }
    }

    async fn acquire_batch_slot(&self, rank: u32) -> Option<OwnedSemaphorePermit> {
        let batch = Arc::clone(&self.rank(rank).batch);
        if let Ok(permit) = Arc::clone(&batch).try_acquire_owned() {
            return Some(permit);
        }
        let _waiting = SimGaugeGuard::new(&self.stats, 1, |stats, by| {
            stats.waiting = stats.waiting.saturating_add_signed(by);
        });
        batch.acquire_owned().await.ok()
    }

    /// Keeps a vLLM prefill's cache until it is taken or its lease ends.
    fn retain_offer(self: &Arc<Self>, key: &str, rank: u32, offer: KvOffer) {
        let Ok(place) = self.rendezvous.register_prefill(key, rank) else { return };
        place.publish(offer);
        let (engine, lease, stop) = (Arc::clone(self), self.options.pair_timeout(), self.supervisor.token());
        self.supervisor.spawn("sim-engine-lease", async move {
            tokio::select! {
                taken = place.pulled(lease) => {
                    if taken.is_ok() {
                        engine.stats.update(|stats| stats.kv_sent += 1);
                    }
                }
                () = stop.cancelled() => {}
            }
        });
    }

    fn next_rank(&self) -> u32 {
        self.next_rank.fetch_add(1, Ordering::Relaxed) % self.options.dp_size
    }

    fn set_fault(self: &Arc<Self>, plan: EngineFaultPlan) {
        self.faults.set(plan);
        self.refuse_connections.send_replace(plan.fault == EngineFault::Refuse);
        if let Some(milliseconds) = plan.for_ms {
            let engine = Arc::clone(self);
            let stop = self.supervisor.token();
            self.supervisor.spawn("sim-engine-fault-timer", async move {
                tokio::select! {
                    () = tokio::time::sleep(Duration::from_millis(milliseconds)) => {
                        if engine.faults.clear_if_current(plan) {
                            engine.refuse_connections.send_replace(false);
                        }
                    }
                    () = stop.cancelled() => {}
                }
            });
        }
    }

    /// Aborts requests by `/abort_request`'s rule: the id is a prefix.
    fn abort_by_rid(&self, rid: &str, all: bool) {
        for request in self.abortable_requests.lock().values() {
            if all || (!rid.is_empty() && request.rids.iter().any(|own| own.starts_with(rid))) {
                request.cancel.cancel();
            }
        }
    }

    fn flush_caches(&self) {
        self.ranks.iter().for_each(|rank| rank.clear(KvEventReporter::clear));
    }

    /// Empties the caches as a restart of the process does: nobody is told, and events count from 0 again.
    fn restart_caches(&self) {
        self.ranks.iter().for_each(|rank| rank.clear(KvEventReporter::restart));
    }

    /// Loses every `every`-th event message of each rank from now on; 0 loses none.
    fn drop_kv_events(&self, every: u64) {
        self.ranks.iter().for_each(|rank| rank.with_reporter(|reporter| reporter.set_drop_every(every)));
    }

    fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed)
    }
}

/// A running simulated engine. It stops when dropped.
#[derive(Debug)]
pub struct SimEngine {
    engine: Arc<SimEngineState>,
}

impl SimEngine {
    /// Starts an engine with a fleet of its own.
    ///
    /// # Errors
    /// A setting is out of range, or an address cannot be bound.
    pub async fn start(config: SimEngineOptions) -> Result<Self, SimEngineError> {
        Self::start_with_store(config, &SharedL3Store::default()).await
    }

    /// Starts an engine that shares the fleet's store.
    ///
    /// # Errors
    /// As [`SimEngine::start`].
    pub async fn start_with_store(
        config: SimEngineOptions,
        fleet: &SharedL3Store,
    ) -> Result<Self, SimEngineError> {
        config.validate()?;
        let supervisor = Supervisor::new();
        let listener = server::bind(config.listen).await?;
        let addr = server::local_addr(&listener, config.listen)?;
        let bootstrap_listener = match (config.role, config.bootstrap_listen) {
            (SimRole::Prefill, Some(address)) => Some(server::bind(address).await?),
            (SimRole::Prefill, None) => Some(server::bind(SocketAddr::new(addr.ip(), 0)).await?),
            (SimRole::Decode | SimRole::Plain, _) => None,
        };
        let bootstrap = match &bootstrap_listener {
            Some(listener) => Some(server::local_addr(listener, config.listen)?),
            None => None,
        };
        let stats = Arc::new(SimStatsRecorder::new(config.dp_size));
        let refusing = watch::Sender::new(false);
        let (event_ports, reporters) = events::start(&config, &refusing, &supervisor).await?;
        let mut reporters = reporters.into_iter();
        let ranks = (0..config.dp_size)
            .map(|_| SimRank::start(&config, reporters.next(), &stats, &supervisor))
            .collect();
        let engine = Arc::new(SimEngineState {
            timing: ScaledTiming::new(config.service.clone(), config.time_scale),
            l3_store: fleet.clone(),
            engine_id: response::uuid(),
            stats,
            faults: EngineFaultInjector::default(),
            ranks,
            rendezvous: Arc::new(RendezvousTable::default()),
            client: moongate_runtime::plain_http_client().connect_timeout(Duration::from_secs(2)).build()?,
            supervisor,
            abortable_requests: Mutex::default(),
            next_request: AtomicU64::new(0),
            next_rank: AtomicU32::new(0),
            main_addr: addr,
            bootstrap_addr: bootstrap,
            event_ports,
            room_ranks: Mutex::default(),
            refuse_connections: refusing,
            adapters: adapters::LoraAdapters::default(),
            ready: AtomicBool::new(config.ready_after.is_zero()),
            options: config,
        });
        engine.spawn_readiness_timer();
        server::serve(&engine, listener, addr, server::SimEnginePort::Main);
        if let (Some(listener), Some(address)) = (bootstrap_listener, bootstrap) {
            server::serve(&engine, listener, address, server::SimEnginePort::Bootstrap);
        }
        Ok(Self { engine })
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.engine.main_addr
    }

    /// `http://host:port` of [`SimEngine::addr`].
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.engine.main_addr)
    }

    /// Where its bootstrap server or side channel listens; prefill engines have one.
    #[must_use]
    pub fn bootstrap_addr(&self) -> Option<SocketAddr> {
        self.engine.bootstrap_addr
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
    pub fn options(&self) -> &SimEngineOptions {
        &self.engine.options
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
    pub fn recent_requests(&self, count: usize) -> Vec<RecordedRequest> {
        self.engine.stats.recent_requests(count)
    }

    /// Makes the engine fail, or work again with [`EngineFault::None`]. Takes a [`EngineFault`] or a [`EngineFaultPlan`]. It meets
    /// requests that come after the call; [`EngineFault::Refuse`] also ends those that are open.
    pub fn set_fault(&self, plan: impl Into<EngineFaultPlan>) {
        self.engine.set_fault(plan.into());
    }

    /// Loses every `every`-th KV-event message of each rank from now on, so that subscribers see gaps: it has a number and can
    /// be replayed, but nobody gets it. 0 loses none.
    pub fn drop_kv_events(&self, every: u64) {
        self.engine.drop_kv_events(every);
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

impl SimEngineState {
    fn spawn_readiness_timer(self: &Arc<Self>) {
        if self.is_ready() {
            return;
        }
        let (engine, stop) = (Arc::clone(self), self.supervisor.token());
        self.supervisor.spawn("sim-engine-startup", async move {
            tokio::select! {
                () = tokio::time::sleep(engine.options.ready_after) => engine.ready.store(true, Ordering::Relaxed),
                () = stop.cancelled() => {}
            }
        });
    }
}
