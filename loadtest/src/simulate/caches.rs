//! The caches of all engines and the shared store.

use std::sync::Arc;

use moongate_retention::{PromptLength, ReturnHint};
use moongate_scheduler::network_distance;

use super::cache_index::{CacheLocation, DelayedCacheIndex};
use super::indices::PrefillIndex;
use super::prefill::PromptBlocks;
use super::settings::SimulationOptions;
use super::store_cache::{BlockUse, StoreCache};
use super::workload::SimulatedWorkload;
use crate::prefix_lru::{LruChange, PrefixLru};

/// The two cache levels of one engine.
#[derive(Debug)]
struct LocalCaches {
    device: PrefixLru<u32>,
    host: PrefixLru<u32>,
}

/// Number of leading blocks of a prompt that an engine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LocalPrefix {
    pub(crate) device: usize,
    /// On the device or in host memory.
    pub(crate) all: usize,
}

/// All caches, and the gateways' view of them.
#[derive(Debug)]
pub(crate) struct SimulatedCaches {
    /// One per engine, or a single one that all share.
    engines: Vec<LocalCaches>,
    store: StoreCache,
    /// Zone in which each block was last put into the store.
    zones: Vec<u8>,
    of_engines: Vec<u8>,
    tokens: Arc<[u32]>,
    /// The gateways' delayed view of the caches.
    pub(crate) gateway_index: DelayedCacheIndex,
    /// Blocks that were new to a host cache and are written to the store; reused to avoid allocations.
    written: Vec<u32>,
}

impl SimulatedCaches {
    pub(crate) fn new(settings: &SimulationOptions, workload: &SimulatedWorkload) -> Self {
        let tokens = workload.block_token_counts();
        let blocks = tokens.len();
        let own = || LocalCaches {
            device: PrefixLru::new(settings.l1_tokens),
            host: PrefixLru::new(settings.l2_tokens),
        };
        let engines = if settings.shared_cache {
            vec![LocalCaches { device: PrefixLru::new(u64::MAX), host: PrefixLru::new(0) }]
        } else {
            let decode = || LocalCaches { device: PrefixLru::new(0), host: PrefixLru::new(0) };
            let decodes = settings.prompt_engines() - settings.prefill;
            let prefills = (0..settings.prefill).map(|_| own());
            prefills.chain((0..decodes).map(|_| decode())).collect()
        };
        // Engines access the store only through the host cache.
        let store_tokens = if settings.l2_tokens == 0 { 0 } else { settings.l3_tokens };
        let store = StoreCache::new(settings.retention, store_tokens, workload);
        let gateway_index = DelayedCacheIndex::new(settings, blocks);
        let of_engines =
            (0..settings.prompt_engines()).map(|engine| settings.zone(PrefillIndex::new(engine))).collect();
        Self {
            engines,
            store,
            zones: vec![0; blocks],
            of_engines,
            tokens,
            gateway_index,
            written: Vec::new(),
        }
    }

    fn slot(&self, engine: PrefillIndex) -> usize {
        engine.get().min(self.engines.len() - 1)
    }

    pub(crate) fn local_prefix(&self, engine: PrefillIndex, blocks: &[u32]) -> LocalPrefix {
        let engine = self.slot(engine);
        let own = &self.engines[engine];
        let device = own.device.leading(blocks);
        let rest = &blocks[device..];
        let more =
            rest.iter().take_while(|&&block| own.host.contains(block) || own.device.contains(block)).count();
        LocalPrefix { device, all: device + more }
    }

    /// Number of leading `blocks` that the store has.
    pub(crate) fn stored_prefix(&self, blocks: &[u32]) -> usize {
        self.store.leading(blocks)
    }

    /// Marks `blocks` as used by a lookup in an engine's own caches.
    pub(crate) fn touch_local(&mut self, engine: PrefillIndex, blocks: &[u32]) {
        let engine = self.slot(engine);
        let own = &mut self.engines[engine];
        own.device.touch(blocks);
        own.host.touch(blocks);
    }

    /// Records that a request was sent to an engine.
    pub(crate) fn pass_request(&mut self, prompt: &PromptBlocks<'_>) {
        self.store.pass_request(prompt.blocks, prompt.request);
    }

    /// Records that an engine looked up a prompt's blocks in the store, from this position on. Mooncake's master renews
    /// the lease of a key that is looked up, and evicts by lease.
    pub(crate) fn record_lookup(&mut self, now: f64, prompt: &PromptBlocks<'_>, first: usize) {
        let blocks = &prompt.blocks[first..];
        self.store.record_use(blocks, block_use(now, prompt, blocks));
    }

    /// Time factor of an engine's read of these blocks from the store.
    pub(crate) fn network_distance(
        &self,
        blocks: &[u32],
        settings: &SimulationOptions,
        engine: PrefillIndex,
    ) -> f32 {
        let sites = settings.store_sites();
        let mut tokens = vec![0; sites.len()];
        for &block in blocks {
            tokens[usize::from(self.zones[block as usize])] += self.tokens[block as usize];
        }
        network_distance(&tokens, &sites, &settings.topology_place(engine))
    }

    /// Inserts blocks fetched from the store into an engine's host cache, after those that it already had.
    pub(crate) fn insert_fetched(&mut self, now: f64, engine: PrefillIndex, blocks: &[u32]) {
        let engine = self.slot(engine);
        let view = &mut self.gateway_index;
        let on_change = |change| view.record_change(now, CacheLocation::Host(engine), change);
        self.engines[engine].host.put(blocks, tokens_in(&self.tokens), on_change);
    }

    /// Inserts a computed prompt: on the device, copied to the host and written through to the store.
    pub(crate) fn insert_computed(&mut self, now: f64, engine: PrefillIndex, prompt: &PromptBlocks<'_>) {
        let blocks = prompt.blocks;
        let zone = self.of_engines[engine.get()];
        let engine = self.slot(engine);
        let own = &mut self.engines[engine];
        let view = &mut self.gateway_index;
        own.device.put(blocks, tokens_in(&self.tokens), |change| {
            view.record_change(now, CacheLocation::Device(engine), change);
        });
        self.written.clear();
        let written = &mut self.written;
        own.host.put(blocks, tokens_in(&self.tokens), |change| {
            if let LruChange::Added(block) = change {
                written.push(block);
            }
            view.record_change(now, CacheLocation::Host(engine), change);
        });
        // Insertion goes from the end of the prompt to its start.
        written.reverse();
        let block_use = block_use(now, prompt, &self.written);
        let zones = &mut self.zones;
        let view = &mut self.gateway_index;
        self.store.put(&self.written, tokens_in(&self.tokens), block_use, |change| {
            if let LruChange::Added(block) = change {
                zones[block as usize] = zone;
            }
            view.record_change(now, CacheLocation::Store(zone), change);
        });
    }

    /// Keeps a prompt whose response is complete in the part of a decode's KV cache that its sequences leave free.
    pub(crate) fn insert_decoded(
        &mut self,
        now: f64,
        engine: PrefillIndex,
        prompt: &PromptBlocks<'_>,
        free_tokens: u64,
    ) {
        let engine = self.slot(engine);
        let view = &mut self.gateway_index;
        let on_change = |change| view.record_change(now, CacheLocation::Device(engine), change);
        let device = &mut self.engines[engine].device;
        device.set_capacity(free_tokens);
        device.put(prompt.blocks, tokens_in(&self.tokens), on_change);
    }

    /// Reports a hinted prompt to the store, as a gateway does when the response is complete.
    pub(crate) fn report_prompt(&mut self, now: f64, arrived: f64, prompt: &PromptBlocks<'_>) {
        let block_use = BlockUse {
            now_ms: milliseconds(now),
            length: PromptLength::of_tokens(prompt.input_tokens.into()),
            hint: prompt.hint,
        };
        self.store.describe(prompt.blocks, milliseconds(arrived), block_use);
    }

    /// Clears the caches of an engine that has failed. A cache that all engines share stays.
    pub(crate) fn clear_engine(&mut self, now: f64, engine: PrefillIndex) {
        let engine = engine.get();
        if self.engines.len() < self.of_engines.len() {
            return;
        }
        let view = &mut self.gateway_index;
        let own = &mut self.engines[engine];
        let mut evicted = |location, block| view.record_change(now, location, LruChange::Evicted(block));
        own.device.clear(|block| evicted(CacheLocation::Device(engine), block));
        own.host.clear(|block| evicted(CacheLocation::Host(engine), block));
    }
}

/// The store estimates a prompt's length from the blocks of one call.
fn block_use(now: f64, prompt: &PromptBlocks<'_>, blocks: &[u32]) -> BlockUse {
    let tokens = blocks.len() as u64 * u64::from(prompt.block_tokens);
    BlockUse { now_ms: milliseconds(now), length: PromptLength::of_tokens(tokens), hint: ReturnHint::Unknown }
}

fn milliseconds(seconds: f64) -> u64 {
    (seconds * 1_000.0) as u64
}

/// Size of a block, by its number.
fn tokens_in(tokens: &[u32]) -> impl Fn(u32) -> u64 {
    move |block| u64::from(tokens[block as usize])
}
