//! One data-parallel rank: its own queue, cache and events.

use std::sync::Arc;

use moongate_runtime::Supervisor;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::SimConfig;
use super::cache::PrefixCache;
use super::events::{Prefix, Reporter};
use super::service::PrefillQueue;
use super::stats::Stats;

/// One data-parallel rank.
#[derive(Debug)]
pub(crate) struct Rank {
    pub(crate) cache: Mutex<PrefixCache>,
    /// Locked after the cache.
    reporter: Option<Mutex<Reporter>>,
    pub(crate) prefill: PrefillQueue,
    pub(crate) network_card: tokio::sync::Mutex<()>,
    pub(crate) batch: Arc<Semaphore>,
}

impl Rank {
    /// Starts a rank's prefill queue.
    pub(crate) fn start(
        config: &SimConfig,
        reporter: Option<Reporter>,
        stats: &Arc<Stats>,
        supervisor: &Supervisor,
    ) -> Self {
        let (prefill, worker) =
            PrefillQueue::new(config.service.chunk_tokens, Arc::clone(stats), supervisor.token());
        supervisor.spawn("sim-engine-prefill", worker);
        Self {
            cache: Mutex::new(PrefixCache::new(config.device_tokens, config.host_tokens, config.page_size)),
            reporter: reporter.map(Mutex::new),
            prefill,
            network_card: tokio::sync::Mutex::new(()),
            batch: Arc::new(Semaphore::new(config.max_running.min(Semaphore::MAX_PERMITS))),
        }
    }

    /// Keeps a computed prefix, and tells of it.
    pub(crate) fn insert(&self, prefix: &Prefix<'_>) {
        // Held while events are numbered, so that their order is that of the changes.
        let mut cache = self.cache.lock();
        match &self.reporter {
            Some(reporter) => reporter.lock().insert(&mut cache, prefix),
            None => cache.insert(prefix.chain.pages(), |_, _| {}),
        }
    }

    /// Empties the cache; `tell` says so.
    pub(crate) fn clear(&self, tell: impl FnOnce(&mut Reporter)) {
        let mut cache = self.cache.lock();
        cache.clear();
        self.report(tell);
    }

    /// Changes how it tells, if it does.
    pub(crate) fn report(&self, change: impl FnOnce(&mut Reporter)) {
        if let Some(reporter) = &self.reporter {
            change(&mut reporter.lock());
        }
    }
}
