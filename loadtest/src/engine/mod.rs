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
//! | `canned` | prepared responses instead |
//! | `kv_transfer`, `rendezvous` | KV cache transfer between prefill and decode |
//! | `request`, `chat_prompt`, `render`, `serve`, `stream` | requests and responses |
//! | `api_messages`, `api_responses` | the APIs of agents, converted to and from chat completions |
//! | `api_sglang`, `api_vllm`, `tokenize`, `bootstrap` | the two protocols |
//! | `scoring`, `media` | canned rerank, score, classification, pooling and embeddings; audio and images |
//! | `sim_engine` | a running engine |
//! | `server`, `faults`, `stats` | sockets, faults, counters |

mod adapters;
mod api_messages;
mod api_responses;
mod api_sglang;
mod api_vllm;
mod bootstrap;
mod cache;
mod canned;
mod chat_prompt;
mod config;
mod events;
mod faults;
mod generation;
mod kv_transfer;
mod l3_store;
mod master_admin;
mod media;
mod metrics;
mod namespace;
mod object_store;
mod prefill_queue;
mod rank;
mod render;
mod rendezvous;
mod request;
mod response;
mod scoring;
mod serve;
mod server;
mod sim_engine;
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
pub use self::canned::{canned_event_ns, monotonic_ns};
pub use self::config::{
    CannedCompletions, EngineTimeModel, SharedL3Store, SimEngineError, SimEngineOptions, SimProtocol,
    SimRole, VllmConnector,
};
pub use self::events::KvEventOptions;
pub use self::faults::{EngineFault, EngineFaultPlan};
pub use self::master_admin::SimMasterAdmin;
pub(crate) use self::object_store::{OBJECT_BYTES, OBJECTS_PER_PAGE};
pub use self::sim_engine::SimEngine;
pub use self::stats::{AbortEvent, AbortKind, RecordedRequest, SimStats};

use self::cache::PageOrigin;
use self::canned::CannedResponses;
use self::events::{KvEventPorts, KvEventReporter, PromptPrefix};
use self::faults::EngineFaultInjector;
use self::l3_store::L3Backend;
use self::object_store::PageObjects;
use self::rank::SimRank;
use self::rendezvous::{KvOffer, RendezvousTable};
use self::stats::{SimGaugeGuard, SimStatsRecorder};
use self::timing::ScaledTiming;

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
    /// Whether loads of LoRA adapters are rejected.
    rejects_adapter_loads: AtomicBool,
    canned: Option<Arc<CannedResponses>>,
    response_store: Arc<api_responses::ResponseStore>,
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
