//! What the gateway keeps of one engine from snapshot to snapshot.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moongate_discovery::InstanceId;
use tokio::time::Instant;

use super::book::InFlight;
use super::breaker::{Breaker, BreakerLimits};
use super::prompts::Prompts;
use super::silence::{SilenceLimits, SilenceMonitor};
use crate::predict::{EngineEntry, KvIndex, TokenizeWays};
use crate::upstream::{LegError, Pool, PoolLimits};

/// Settings of every endpoint.
#[derive(Debug, Clone)]
pub(crate) struct EndpointLimits {
    pub(crate) pool: PoolLimits,
    pub(crate) breaker: BreakerLimits,
    pub(crate) silence: SilenceLimits,
}

/// One engine's connections, breaker, health and ways to ask it for tokens. Lives as long as its id and address do.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) id: InstanceId,
    pub(crate) pool: Arc<Pool>,
    pub(crate) in_flight: InFlight,
    pub(crate) prompts: Prompts,
    pub(crate) breaker: Breaker,
    pub(crate) silence: SilenceMonitor,
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
            silence: SilenceMonitor::new(limits.silence.clone()),
            tokenize_ways: TokenizeWays::default(),
            entry: EngineEntry::new(index),
            healthy: AtomicBool::new(true),
        }
    }

    /// Whether active health checks pass.
    pub(crate) fn is_healthy(&self) -> bool {
        self.healthy.load(Ordering::Relaxed)
    }

    /// Healthy, its breaker closed, and not suspect.
    pub(crate) fn is_sound(&self) -> bool {
        self.is_healthy() && !self.breaker.is_open() && !self.silence.is_suspect()
    }

    /// Notes that the engine produced output for a request.
    pub(crate) fn progress(&self, at: Instant) {
        if self.silence.progress(at) {
            tracing::info!(instance = %self.id, "engine produces output again");
        }
    }

    /// Returns whether this is a change.
    pub(crate) fn set_healthy(&self, healthy: bool) -> bool {
        self.healthy.swap(healthy, Ordering::Relaxed) != healthy
    }

    /// Counts a failed leg.
    pub(crate) fn failed(&self, error: &LegError) {
        if matches!(error, LegError::Silent(_)) {
            // Counted by the silence monitor, whose way back is a trial request.
            return;
        }
        if error.blames_engine() {
            self.breaker.failure();
        } else if !matches!(error, LegError::NoConnectionLeft) {
            self.breaker.success();
        }
    }
}
