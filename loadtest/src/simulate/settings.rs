//! Parameters of the simulated system: engines, caches, gateways and disturbances.

use clap::ValueEnum;
use moongate_scheduler::{InstanceIndex, LocationIds, PrefillTimeModel, StoreMedium, StoreSite};

use super::indices::{DecodeIndex, PrefillIndex};
use super::store_cache::StoreRetention;
use crate::engine::EngineTimeModel;

/// Maximum number of prefill engines: the cache index has two bits per block and engine.
pub const MAX_PREFILL: usize = 1_024;

/// When an engine stops waiting for pages that it fetches from the shared store (SGLang's
/// `--hicache-storage-prefetch-policy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum SimPrefetchPolicy {
    /// When the request's turn comes; the pages that have arrived are used.
    BestEffort,
    /// Only when all pages have arrived; other requests overtake in the meantime.
    WaitComplete,
    /// After a time that grows with the prompt.
    Timeout,
}

/// Order in which an engine computes waiting prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum EngineQueueOrder {
    /// First come, first served, by arrival at the engine.
    Fcfs,
    /// The smallest priority value set by the gateway, then first come.
    Priority,
}

/// An engine failure with its recovery.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineOutage {
    /// Index of the engine: prefill engines first, then decode engines.
    pub engine: usize,
    /// Time of the failure in seconds. Its caches and requests are lost.
    pub at_s: f64,
    /// Duration of the outage in seconds.
    pub for_s: f64,
}

/// A fleet and its conditions.
#[derive(Debug, Clone)]
pub struct SimulationOptions {
    /// Prefill engines; plain workers if there are no decode engines.
    pub prefill: usize,
    /// Number of decode engines.
    pub decode: usize,
    /// Time model; the live simulated engine uses the same constants.
    pub service: EngineTimeModel,
    /// Device cache per engine in tokens.
    pub l1_tokens: u64,
    /// Host cache per engine in tokens; includes everything in the device cache. 0 disables it.
    pub l2_tokens: u64,
    /// Shared store in tokens; 0 disables it. Only engines with a host cache use it.
    pub l3_tokens: u64,
    /// Which blocks a full store evicts.
    pub retention: StoreRetention,
    /// Share of the requests whose clients send a hint whether most of the prompt will be used again.
    pub return_hints: f64,
    /// Zones over which the prefill engines and the shared store are spread. An engine writes to its own zone's part,
    /// and reads from other zones take longer.
    pub zones: u8,
    /// Whether the gateways know the zones.
    pub zones_known: bool,
    /// When an engine stops waiting for the shared store.
    pub prefetch: SimPrefetchPolicy,
    /// Minimum number of tokens for a fetch (SGLang's `prefetch_threshold`).
    pub prefetch_threshold: u32,
    /// Share of the host cache beyond the device cache that fetching prompts may occupy (SGLang's
    /// `prefetch_capacity_limit`).
    pub prefetch_capacity_share: f64,
    /// Timeout rule: seconds for any fetch (SGLang's `prefetch_timeout_base`).
    pub prefetch_timeout_base_s: f64,
    /// Timeout rule: seconds for each 1,024 tokens (SGLang's `prefetch_timeout_per_ki_token`).
    pub prefetch_timeout_per_ki_s: f64,
    /// Whether a prefill pass takes tokens of several prompts, up to the chunk size. If not, prompts are computed one
    /// after the other, as the calibration assumes.
    pub packed: bool,
    /// Order in which waiting prompts are computed.
    pub order: EngineQueueOrder,
    /// Weight of a request's arrival time in its priority: a request that arrives one second later overtakes only if it
    /// is shorter by this many seconds.
    pub priority_ageing: f64,
    /// Maximum number of sequences that one engine generates concurrently.
    pub max_running: usize,
    /// KV cache capacity of a decode engine in tokens.
    pub decode_tokens: u64,
    /// Whether decode engines can also compute prompts, with what their KV cache still has (vLLM).
    pub local_prefill: bool,
    /// Standard deviation of the logarithm of service times. The mean is unchanged.
    pub noise_sigma: f64,
    /// Slowdown of the first `slow_engines` prefill engines.
    pub slow_engine: f64,
    pub slow_engines: usize,
    /// Outages of engines.
    pub failures: Vec<EngineOutage>,
    /// Number of gateways, each with a scheduler of its own. Requests select one at random.
    pub gateways: usize,
    /// Whether one gateway decides for all.
    pub shared_queue: bool,
    /// Seconds between two polls of the engines' load; 0 disables polling.
    pub poll_s: f64,
    /// Delay in seconds of the gateways' view of the caches.
    pub index_lag_s: f64,
    /// How long the cache prediction of a queued request is used before it is renewed.
    pub refresh_s: f64,
    /// Share of the requests, from the first on, that warm the caches and are excluded from the results.
    pub warmup_share: f64,
    /// Whether all engines share one unbounded cache, as in the ideal; gateways see its blocks on every engine.
    pub shared_cache: bool,
    /// Whether the gateways start with the exact time model of the engines and the exact read rate of the store.
    pub exact_information: bool,
    /// Whether a rejected client retries once, after the time in `Retry-After`.
    pub retry: bool,
    /// Whether requests carry their TTFT target, so that a policy can reject those that cannot meet it.
    pub ttft_targets: bool,
    /// Target of the time per output token in seconds.
    pub tpot_target_s: f64,
    /// Whether the gateways know this target.
    pub tpot_target_known: bool,
    /// Relative loads of the tenants; without any, requests have no tenant.
    pub tenants: Vec<f64>,
    /// Share of the conversations with priority 1 instead of 0.
    pub urgent: f64,
    /// Most background requests that run at the same time.
    pub background_concurrency: usize,
}

impl SimulationOptions {
    /// Eight prefill and four decode engines of the calibrated kind with a fast shared store.
    #[must_use]
    pub fn eight_plus_four() -> Self {
        let service = EngineTimeModel { storage_bytes_per_s: 20e9, ..EngineTimeModel::default() };
        Self {
            prefill: 8,
            decode: 4,
            service,
            l1_tokens: 360_000,
            l2_tokens: 1_662_000,
            l3_tokens: 8_700_000,
            retention: StoreRetention::default(),
            return_hints: 0.0,
            zones: 1,
            zones_known: true,
            prefetch: SimPrefetchPolicy::WaitComplete,
            prefetch_threshold: 256,
            prefetch_capacity_share: 0.8,
            prefetch_timeout_base_s: 1.0,
            prefetch_timeout_per_ki_s: 0.25,
            packed: false,
            order: EngineQueueOrder::Fcfs,
            priority_ageing: 0.1,
            max_running: 256,
            decode_tokens: 360_000,
            local_prefill: false,
            noise_sigma: 0.0,
            slow_engine: 1.0,
            slow_engines: 1,
            failures: Vec::new(),
            gateways: 1,
            shared_queue: false,
            poll_s: 0.1,
            index_lag_s: 0.0,
            refresh_s: 0.1,
            warmup_share: 0.1,
            shared_cache: false,
            exact_information: false,
            retry: false,
            ttft_targets: false,
            tpot_target_s: 0.05,
            tpot_target_known: false,
            tenants: Vec::new(),
            urgent: 0.0,
            background_concurrency: 16,
        }
    }

    /// One plain engine, as in the published HiCache benchmark to which the constants were fitted.
    #[must_use]
    pub fn one_engine() -> Self {
        Self {
            prefill: 1,
            decode: 0,
            service: EngineTimeModel::default(),
            l2_tokens: 0,
            l3_tokens: 0,
            // The benchmark ran with Mooncake's master.
            retention: StoreRetention::Lru,
            prefetch: SimPrefetchPolicy::BestEffort,
            warmup_share: 0.0,
            ..Self::eight_plus_four()
        }
    }

    /// The engines' time model as schedulers express it.
    pub(crate) fn prefill_time_model(&self) -> PrefillTimeModel {
        let service = &self.service;
        PrefillTimeModel {
            c0: service.prefill_base_s,
            a: service.prefill_linear_s,
            b: service.prefill_quadratic_s,
            speed: 1.0,
        }
    }

    /// Location of a prefill engine.
    pub(crate) fn topology_place(&self, engine: PrefillIndex) -> LocationIds {
        self.zone_location(self.zone(engine))
    }

    fn zone_location(&self, zone: u8) -> LocationIds {
        LocationIds { zone: (self.zones > 1).then(|| zone.into()), ..LocationIds::default() }
    }

    /// Index of an engine's zone.
    pub(crate) fn zone(&self, engine: PrefillIndex) -> u8 {
        u8::try_from(engine.get() % usize::from(self.zones.max(1))).unwrap_or(0)
    }

    /// Number of engines that can compute prompts, the first instances of the fleet.
    pub(crate) fn prompt_engines(&self) -> usize {
        self.prefill + if self.local_prefill { self.decode } else { 0 }
    }

    /// An instance of the fleet as an engine that computes prompts. Plain workers are prefill and decode engines, and
    /// decode engines may compute prompts.
    pub(crate) fn prefill_engine(&self, engine: InstanceIndex) -> Option<PrefillIndex> {
        (engine.as_usize() < self.prompt_engines()).then(|| PrefillIndex::new(engine.as_usize()))
    }

    /// The decode engine that computes prompts under this index.
    pub(crate) fn computing_decode(&self, engine: PrefillIndex) -> Option<DecodeIndex> {
        (self.decode > 0).then(|| engine.get().checked_sub(self.prefill).map(DecodeIndex::new))?
    }

    /// The decode engine of an instance of the fleet.
    pub(crate) fn decode_engine(&self, engine: InstanceIndex) -> Option<DecodeIndex> {
        engine.as_usize().checked_sub(self.first_decode()).map(DecodeIndex::new)
    }

    /// The instance of a decode engine in the fleet.
    pub(crate) fn decode_instance(&self, engine: DecodeIndex) -> InstanceIndex {
        InstanceIndex(u32::try_from(self.first_decode() + engine.get()).unwrap_or(u32::MAX))
    }

    fn first_decode(&self) -> usize {
        if self.decode == 0 { 0 } else { self.prefill }
    }

    /// The parts of the shared store, one per zone.
    pub(crate) fn store_sites(&self) -> Vec<StoreSite> {
        let site = |zone| StoreSite { location: self.zone_location(zone), medium: StoreMedium::Dram };
        (0..self.zones.max(1)).map(site).collect()
    }

    /// Tokens for which one engine may wait at a time.
    pub(crate) fn prefetch_capacity(&self) -> u64 {
        let beyond = self.l2_tokens.saturating_sub(self.l1_tokens);
        (beyond as f64 * self.prefetch_capacity_share.clamp(0.0, 1.0)) as u64
    }

    /// TTFT target of a prompt of this length: two seconds, or twice its computation on an idle engine without any
    /// cache.
    #[must_use]
    pub fn ttft_target_s(&self, input_tokens: u32) -> f64 {
        let cold = self.service.prefill_base_s + self.service.prefill_compute_s(input_tokens as usize, 0);
        f64::max(2.0, 2.0 * cold)
    }
}
