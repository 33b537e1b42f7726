//! What the gateway keeps of one engine from snapshot to snapshot.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moongate_discovery::InstanceId;

use super::book::InFlight;
use super::breaker::{Breaker, BreakerLimits};
use super::prompts::Prompts;
use crate::predict::{EngineEntry, KvIndex, TokenizeWays};
use crate::upstream::{LegError, Pool, PoolLimits};

/// Settings of every endpoint.
#[derive(Debug, Clone)]
pub(crate) struct EndpointLimits {
    pub(crate) pool: PoolLimits,
    pub(crate) breaker: BreakerLimits,
}

/// One engine's connections, breaker, health and ways to ask it for tokens. Lives as long as its id and address do.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) id: InstanceId,
    pub(crate) pool: Arc<Pool>,
    pub(crate) in_flight: InFlight,
    pub(crate) prompts: Prompts,
    pub(crate) breaker: Breaker,
    /// How it can be asked for tokens.
    pub(crate) tokenize_ways: TokenizeWays,
    /// Its pages in the index.
    pub(crate) entry: EngineEntry,
    healthy: AtomicBool,
}

impl Endpoint {
    pub(crate) fn new(id: InstanceId, url: &str, limits: &EndpointLimits, index: Arc<KvIndex>) -> Self {
        Self {
            id,
            pool: Arc::new(Pool::new(url, limits.pool.clone())),
            in_flight: InFlight::default(),
            prompts: Prompts::default(),
            breaker: Breaker::new(limits.breaker),
            tokenize_ways: TokenizeWays::default(),
            entry: EngineEntry::new(index),
            healthy: AtomicBool::new(true),
        }
    }

    /// Whether active health checks pass.
    pub(crate) fn is_healthy(&self) -> bool {
        self.healthy.load(Ordering::Relaxed)
    }

    /// Healthy, and its breaker closed.
    pub(crate) fn is_sound(&self) -> bool {
        self.is_healthy() && !self.breaker.is_open()
    }

    /// Returns whether this is a change.
    pub(crate) fn set_healthy(&self, healthy: bool) -> bool {
        self.healthy.swap(healthy, Ordering::Relaxed) != healthy
    }

    /// Counts a failed leg.
    pub(crate) fn failed(&self, error: &LegError) {
        if error.blames_engine() {
            self.breaker.failure();
        } else {
            self.breaker.success();
        }
    }
}
