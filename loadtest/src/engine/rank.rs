//! One data-parallel rank: its own queue, cache and events.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use moongate_runtime::Supervisor;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::SimEngineOptions;
use super::cache::{LocalCacheLevel, PageOrigin, PrefixCache};
use super::events::{KvEventReporter, PromptPrefix};
use super::l3_store::WrittenPage;
use super::prefill_queue::{PassLimits, PrefillQueue};
use super::stats::SimStatsRecorder;
use crate::prefix_lru::LruChange;

/// Share of the host level beyond the device level that fetching prompts may occupy (SGLang's
/// `prefetch_capacity_limit`).
const PREFETCH_CAPACITY_SHARE: f64 = 0.8;

#[derive(Debug)]
pub(crate) struct SimRank {
    pub(crate) cache: Mutex<PrefixCache>,
    /// Lock order: after the cache.
    reporter: Option<Mutex<KvEventReporter>>,
    pub(crate) prefill: PrefillQueue,
    pub(crate) nic_lock: tokio::sync::Mutex<()>,
    /// Tokens of the prompts whose pages are being fetched, and their limit.
    fetching_tokens: Arc<AtomicU64>,
    fetch_capacity: u64,
    pub(crate) batch: Arc<Semaphore>,
}

impl SimRank {
    /// Starts a rank's prefill queue.
    pub(crate) fn start(
        config: &SimEngineOptions,
        reporter: Option<KvEventReporter>,
        stats: &Arc<SimStatsRecorder>,
        supervisor: &Supervisor,
    ) -> Self {
        let passes = PassLimits { chunk_tokens: config.service.chunk_tokens, packed: config.packed };
        let (prefill, worker) = PrefillQueue::new(passes, Arc::clone(stats), supervisor.token());
        supervisor.spawn("sim-engine-prefill", worker);
        Self {
            cache: Mutex::new(PrefixCache::new(config.device_tokens, config.host_tokens, config.page_size)),
            reporter: reporter.map(Mutex::new),
            prefill,
            nic_lock: tokio::sync::Mutex::new(()),
            fetching_tokens: Arc::default(),
            fetch_capacity: fetch_capacity(config),
            batch: Arc::new(Semaphore::new(config.max_running.min(Semaphore::MAX_PERMITS))),
        }
    }

    /// Caches a prefix and publishes the changes. Returns the pages to write to the shared store: those that were new
    /// to the host level, or all if there is none.
    pub(crate) fn insert(&self, prefix: &PromptPrefix<'_>, how: &PageOrigin) -> Vec<WrittenPage> {
        // Locked while events are numbered, so that their order is that of the changes.
        let mut cache = self.cache.lock();
        let mut to_host = HashSet::new();
        let names = match &self.reporter {
            Some(reporter) => reporter.lock().insert_and_publish(&mut cache, prefix, how, &mut to_host),
            None => {
                cache.insert(prefix.chain.pages(), how, |level, change| {
                    if let (LocalCacheLevel::Host, LruChange::Added(page)) = (level, change) {
                        to_host.insert(page);
                    }
                });
                Vec::new()
            }
        };
        let pages = prefix.chain.pages().iter().enumerate();
        let written = pages.filter(|(_, page)| !cache.has_host() || to_host.contains(*page));
        written.map(|(index, page)| (*page, names.get(index).map(|name| name.event_hash))).collect()
    }

    /// Reserves fetch capacity for a prompt with `tokens` to compute; `None` if the limit is exceeded.
    pub(crate) fn try_reserve_fetch(&self, tokens: usize) -> Option<PrefetchPermit> {
        if self.fetching_tokens.load(Ordering::Relaxed) >= self.fetch_capacity {
            return None;
        }
        let tokens = tokens as u64;
        self.fetching_tokens.fetch_add(tokens, Ordering::Relaxed);
        Some(PrefetchPermit { total: Arc::clone(&self.fetching_tokens), tokens })
    }

    /// Empties the cache and calls `publish` for the event.
    pub(crate) fn clear(&self, publish: impl FnOnce(&mut KvEventReporter)) {
        let mut cache = self.cache.lock();
        cache.clear();
        self.with_reporter(publish);
    }

    /// Changes the reporter's settings, if there is one.
    pub(crate) fn with_reporter(&self, change: impl FnOnce(&mut KvEventReporter)) {
        if let Some(reporter) = &self.reporter {
            change(&mut reporter.lock());
        }
    }
}

/// Fetch capacity reserved by a prompt; released on drop.
#[derive(Debug)]
pub(crate) struct PrefetchPermit {
    total: Arc<AtomicU64>,
    tokens: u64,
}

impl Drop for PrefetchPermit {
    fn drop(&mut self) {
        self.total.fetch_sub(self.tokens, Ordering::Relaxed);
    }
}

/// Without a host level (vLLM's store connector) there is no limit.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "token counts are far below 2^52"
)]
fn fetch_capacity(config: &SimEngineOptions) -> u64 {
    if config.host_tokens == 0 {
        return u64::MAX;
    }
    (config.host_tokens.saturating_sub(config.device_tokens) as f64 * PREFETCH_CAPACITY_SHARE) as u64
}
