//! What is simulated: engines, caches, gateways, and what goes wrong.

use clap::ValueEnum;
use moongate_scheduler::{LocationIds, StoreMedium, StoreSite};

use crate::engine::EngineTimeModel;

/// Most prefill engines: caches are looked up for all of them at once in one machine word.
pub const MAX_PREFILL: usize = 64;

/// When an engine stops waiting for pages that it fetches from the shared store (SGLang's
/// `--hicache-storage-prefetch-policy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum SimPrefetchPolicy {
    /// When the request's turn has come; what has arrived is used.
    BestEffort,
    /// Never; others overtake the request meanwhile.
    WaitComplete,
    /// After a time that grows with the prompt.
    Timeout,
}

/// Which waiting prompt an engine computes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum EngineQueueOrder {
    /// First come, first served.
    Fcfs,
    /// The smallest priority value that the gateway gave, then first come.
    Priority,
}

/// An engine that is away for some time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineOutage {
    /// Prefill engines are counted first, then decode engines.
    pub engine: usize,
    /// When it dies, in seconds. Its caches and requests are lost.
    pub at_s: f64,
    /// For how long it is away.
    pub for_s: f64,
}

/// A fleet and its circumstances.
#[derive(Debug, Clone)]
pub struct SimulationOptions {
    /// Prefill engines; plain workers if there are no decode engines.
    pub prefill: usize,
    /// Decode engines.
    pub decode: usize,
    /// How long things take; the live simulated engine uses the same constants.
    pub service: EngineTimeModel,
    /// Device cache of one engine in tokens.
    pub l1_tokens: u64,
    /// Host cache of one engine in tokens; it holds a copy of what the device cache holds. 0 is none.
    pub l2_tokens: u64,
    /// Shared store in tokens; 0 is none. Only engines with a host cache use it.
    pub l3_tokens: u64,
    /// Zones over which the prefill engines and the shared store are spread. An engine writes to its own zone's part, and reads from the
    /// others' more slowly.
    pub zones: u8,
    /// Whether the gateways know who is in which zone.
    pub zones_known: bool,
    /// When an engine stops waiting for the shared store.
    pub prefetch: SimPrefetchPolicy,
    /// Fewer tokens than this are not fetched (SGLang's `prefetch_threshold`).
    pub prefetch_threshold: u32,
    /// Share of the host cache beyond the device cache that may be waited for at a time (SGLang's
    /// `prefetch_capacity_limit`).
    pub prefetch_capacity_share: f64,
    /// Timeout rule: seconds for any fetch (SGLang's `prefetch_timeout_base`).
    pub prefetch_timeout_base_s: f64,
    /// Timeout rule: seconds for each 1,024 tokens (SGLang's `prefetch_timeout_per_ki_token`).
    pub prefetch_timeout_per_ki_s: f64,
    /// Whether a prefill pass takes tokens of several prompts, up to the chunk size. If not, prompts are computed
    /// one after the other, as the calibration assumes.
    pub packed: bool,
    /// Which waiting prompt is next.
    pub order: EngineQueueOrder,
    /// How much of a request's time of arrival goes into its priority: a request that comes so many seconds later must be so
    /// many times this shorter to overtake.
    pub priority_ageing: f64,
    /// Most sequences that generate at once on one engine.
    pub max_running: usize,
    /// KV tokens that a decode engine can hold.
    pub decode_tokens: u64,
    /// Spread of service times: the logarithm's standard deviation. The mean stays.
    pub noise_sigma: f64,
    /// How many times slower the first prefill engine is.
    pub slow_engine: f64,
    /// Engines that go away.
    pub failures: Vec<EngineOutage>,
    /// Gateways, each with a scheduler of its own. Requests choose one at random.
    pub gateways: usize,
    /// Seconds between two readings of the engines' load; 0 is never.
    pub poll_s: f64,
    /// How late the gateways learn what caches hold.
    pub index_lag_s: f64,
    /// How long the cache prediction of a held request is believed.
    pub refresh_s: f64,
    /// Share of the requests, from the first on, that find cold caches and are left out of the figures.
    pub warmup_share: f64,
    /// Whether all engines share one cache without bounds, as in the ideal.
    pub shared_cache: bool,
    /// Whether a refused client comes back once, after the time it was told.
    pub retry: bool,
    /// Whether requests carry their TTFT target, so that a policy can shed those that cannot meet it.
    pub deadlines: bool,
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
            noise_sigma: 0.0,
            slow_engine: 1.0,
            failures: Vec::new(),
            gateways: 1,
            poll_s: 0.1,
            index_lag_s: 0.0,
            refresh_s: 0.1,
            warmup_share: 0.1,
            shared_cache: false,
            retry: false,
            deadlines: false,
        }
    }

    /// One plain engine, as in the published HiCache benchmark that the constants were fitted to.
    #[must_use]
    pub fn one_engine() -> Self {
        Self {
            prefill: 1,
            decode: 0,
            service: EngineTimeModel::default(),
            l2_tokens: 0,
            l3_tokens: 0,
            prefetch: SimPrefetchPolicy::BestEffort,
            warmup_share: 0.0,
            ..Self::eight_plus_four()
        }
    }

    /// Where a prefill engine is.
    pub(crate) fn topology_place(&self, engine: usize) -> LocationIds {
        LocationIds { zone: (self.zones > 1).then(|| self.zone(engine).into()), ..LocationIds::default() }
    }

    /// The number of its zone.
    pub(crate) fn zone(&self, engine: usize) -> u8 {
        u8::try_from(engine % usize::from(self.zones.max(1))).unwrap_or(0)
    }

    /// The parts of the shared store, one for each zone.
    pub(crate) fn store_sites(&self) -> Vec<StoreSite> {
        let zones = 0..usize::from(self.zones.max(1));
        zones.map(|zone| StoreSite { place: self.topology_place(zone), medium: StoreMedium::Dram }).collect()
    }

    /// Tokens that one engine may wait for at a time.
    pub(crate) fn prefetch_capacity(&self) -> u64 {
        let beyond = self.l2_tokens.saturating_sub(self.l1_tokens);
        (beyond as f64 * self.prefetch_capacity_share.clamp(0.0, 1.0)) as u64
    }

    /// Time to first token that a prompt of this length may take: two seconds, or twice its computation on an idle
    /// engine without any cache.
    #[must_use]
    pub fn ttft_target_s(&self, input_tokens: u32) -> f64 {
        let cold = self.service.prefill_base_s + self.service.prefill_compute_s(input_tokens as usize, 0);
        f64::max(2.0, 2.0 * cold)
    }
}
