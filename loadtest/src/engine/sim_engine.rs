//! A running engine: start, addresses, counters, faults, stop.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::Duration;

use moongate_runtime::Supervisor;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::canned::CannedResponses;
use super::config::{SharedL3Store, SimEngineError, SimEngineOptions, SimRole};
use super::faults::{EngineFaultInjector, EngineFaultPlan};
use super::rank::SimRank;
use super::rendezvous::RendezvousTable;
use super::stats::{RecordedRequest, SimStats, SimStatsRecorder};
use super::timing::ScaledTiming;
use super::{SimEngineState, adapters, events, response, server};

/// How long a stop waits for the engine's tasks.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// A running simulated engine. It stops when dropped.
#[derive(Debug)]
pub struct SimEngine {
    pub(super) engine: Arc<SimEngineState>,
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
            rejects_adapter_loads: AtomicBool::new(false),
            canned: config.canned.map(|canned| Arc::new(CannedResponses::new(&config, &canned))),
            response_store: Arc::default(),
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

    /// Sets a fault (an [`EngineFault`](super::EngineFault) or a plan), or ends it with `EngineFault::None`. It affects
    /// requests that arrive after the call; `EngineFault::Refuse` also aborts open ones.
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
