//! Simulated inference engines.
//!
//! An engine here responds with the members, ids, errors and delays of SGLang 0.5.23 or vLLM 0.32 over real sockets,
//! but its model is a hash: text is split into tokens of four bytes, and the output is a function of the whole prompt.
//! Two engines with the same prompt generate the same output, as does a prefill/decode pair. A pair with two different
//! prompts generates wrong output with status 200, as real pairs do.
//!
//! | part | subject |
//! |---|---|
//! | `tokens`, `tools`, `adapters` | generated output, and served model names |
//! | `rank`, `cache`, `namespace` | cached prefixes |
//! | `l3_store`, `master_admin` | the fleet's shared store, and its master's HTTP API |
//! | `object_store` | a real store instead |
//! | `events` | published KV events |
//! | `timing`, `prefill_queue` | time model and prefill queue |
//! | `generation` | lifecycle of one choice |
//! | `kv_transfer`, `rendezvous` | KV cache transfer between prefill and decode |
//! | `request`, `render`, `serve`, `stream` | requests and responses |
//! | `api_sglang`, `api_vllm`, `tokenize`, `bootstrap` | the two protocols |
//! | `server`, `faults`, `stats` | sockets, faults, counters |

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

/// State shared by all connections of an engine.
#[derive(Debug)]
pub(crate) struct SimEngineState {
    options: SimEngineOptions,
    l3_store: SharedL3Store,
    /// Changes at every start, as with real engines.
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
    /// Data-parallel ranks registered for bootstrap rooms.
    room_ranks: Mutex<HashMap<u64, u32>>,
    refuse_connections: watch::Sender<bool>,
    ready: AtomicBool,
    adapters: adapters::LoraAdapters,
}

impl SimEngineState {
    fn rank(&self, rank: u32) -> &SimRank {
        // There is at least one rank, and the caller has checked the number.
        &self.ranks[(rank as usize) % self.ranks.len()]
    }

    fn l3_backend(&self) -> Option<L3Backend<'_>> {
        if self.options.uses_l3_store() { self.l3_store.backend() } else { None }
    }

    /// Whether page hashes are published or stored, which requires the prompt's tokens.
    fn needs_page_hashes(&self) -> bool {
        self.options.kv_events.is_some() || matches!(self.l3_backend(), Some(L3Backend::Objects(_)))
    }

    /// Separates prefixes of different models, page sizes and tenants.
    fn cache_salt(&self, tenant: u64) -> u64 {
        let model = tokens::hash_bytes(self.options.model.as_bytes());
        tokens::mix(tokens::mix(model, self.options.page_size as u64), tenant)
    }

    /// Inserts a computed prefix into the rank's cache and into the shared store.
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

    /// Retains a vLLM prefill's cache until it is pulled or its lease expires.
    fn retain_offer(self: &Arc<Self>, key: &str, rank: u32, offer: KvOffer) {
        let Ok(entry) = self.rendezvous.register_prefill(key, rank) else { return };
        entry.publish(offer);
        let (engine, lease, stop) = (Arc::clone(self), self.options.pair_timeout(), self.supervisor.token());
        self.supervisor.spawn("sim-engine-lease", async move {
            tokio::select! {
                pulled = entry.pulled(lease) => {
                    if pulled.is_ok() {
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
        if let Some(milliseconds) = plan.duration_ms {
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

    /// Aborts requests with this id prefix, as `/abort_request` does.
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

    /// Empties the caches as a process restart does: without events, and event numbers restart at 0.
    fn restart_caches(&self) {
        self.ranks.iter().for_each(|rank| rank.clear(KvEventReporter::restart));
    }

    /// Drops every `every`-th event message of each rank from now on; 0 drops none.
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
    /// Starts an engine with a shared store of its own.
    ///
    /// # Errors
    /// A setting is out of range, or an address cannot be bound.
    pub async fn start(config: SimEngineOptions) -> Result<Self, SimEngineError> {
        Self::start_with_store(config, &SharedL3Store::default()).await
    }

    /// Starts an engine that uses the fleet's store.
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

    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.engine.main_addr
    }

    /// `http://host:port` of [`SimEngine::addr`].
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.engine.main_addr)
    }

    /// Address of its bootstrap server or side channel; only prefill engines have one.
    #[must_use]
    pub fn bootstrap_addr(&self) -> Option<SocketAddr> {
        self.engine.bootstrap_addr
    }

    /// The id of this start of the engine (vLLM's `engine_id`).
    #[must_use]
    pub fn engine_id(&self) -> &str {
        &self.engine.engine_id
    }

    /// Addresses on which a data-parallel rank publishes and replays KV events, if it does.
    #[must_use]
    pub fn kv_event_addrs(&self, rank: u32) -> Option<(SocketAddr, SocketAddr)> {
        self.engine.event_ports.map(|ports| (ports.live(rank), ports.replay(rank)))
    }

    #[must_use]
    pub fn options(&self) -> &SimEngineOptions {
        &self.engine.options
    }

    /// Current counters of the engine.
    #[must_use]
    pub fn stats(&self) -> SimStats {
        self.engine.stats.snapshot()
    }

    /// Waits until the counters meet a condition. Returns false after `timeout`.
    pub async fn wait_for(&self, timeout: Duration, condition: impl FnMut(&SimStats) -> bool) -> bool {
        self.engine.stats.wait_for(timeout, condition).await
    }

    /// The latest generation and abort requests, oldest first, as received.
    #[must_use]
    pub fn recent_requests(&self, count: usize) -> Vec<RecordedRequest> {
        self.engine.stats.recent_requests(count)
    }

    /// Sets a fault, or ends it with [`EngineFault::None`]. Takes an [`EngineFault`] or an [`EngineFaultPlan`]. It
    /// affects requests that arrive after the call; [`EngineFault::Refuse`] also aborts open ones.
    pub fn set_fault(&self, plan: impl Into<EngineFaultPlan>) {
        self.engine.set_fault(plan.into());
    }

    /// Drops every `every`-th KV event message of each rank from now on, so that subscribers detect gaps: a dropped
    /// message has a number and can be replayed. 0 drops none.
    pub fn drop_kv_events(&self, every: u64) {
        self.engine.drop_kv_events(every);
    }

    /// Empties the caches as a process restart does: without events, with event connections closed and event numbers
    /// restarted at 0.
    pub fn restart_caches(&self) {
        self.engine.restart_caches();
    }

    /// Ends the engine like a killed process: sockets closed, requests dropped.
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
