//! State of one engine that outlives fleet snapshots.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moongate_discovery::InstanceId;
use tokio::time::Instant;

use super::adapter_loads::AdapterLoadStates;
use super::availability::AvailabilityEvents;
use super::breaker::{BreakerLimits, CircuitBreaker};
use super::in_flight::InFlightCount;
use super::prompts::PromptCounters;
use super::silence::{SilenceLimits, SilenceMonitor};
use super::tokenize_methods::TokenizeMethods;
use crate::kv_index::{EngineSlots, KvIndex};
use crate::upstream::{ConnectionPool, ConnectionPoolLimits, LegError};

#[derive(Debug, Clone)]
pub(crate) struct EndpointLimits {
    pub(crate) pool: ConnectionPoolLimits,
    pub(crate) breaker: BreakerLimits,
    pub(crate) silence: SilenceLimits,
}

/// One engine's connections, breaker, health and tokenize methods. Exists as long as the engine's id and address are listed.
#[derive(Debug)]
pub(crate) struct UpstreamEndpoint {
    pub(crate) id: InstanceId,
    pub(crate) pool: Arc<ConnectionPool>,
    pub(crate) in_flight: InFlightCount,
    pub(crate) prompt_counters: PromptCounters,
    pub(crate) breaker: CircuitBreaker,
    pub(crate) silence: SilenceMonitor,
    /// Methods by which the engine can tokenize prompts.
    pub(crate) tokenize_methods: TokenizeMethods,
    /// LoRA adapters that the engine loads, or could not load.
    pub(crate) adapter_loads: AdapterLoadStates,
    /// Slots of the engine's ranks in the index.
    pub(crate) index_slots: EngineSlots,
    healthy: AtomicBool,
    availability: Arc<AvailabilityEvents>,
}

impl UpstreamEndpoint {
    pub(crate) fn new(
        id: InstanceId,
        url: &str,
        limits: &EndpointLimits,
        index: Arc<KvIndex>,
        availability: Arc<AvailabilityEvents>,
    ) -> Self {
        Self {
            id,
            pool: Arc::new(ConnectionPool::new(url, limits.pool.clone())),
            in_flight: InFlightCount::default(),
            prompt_counters: PromptCounters::default(),
            breaker: CircuitBreaker::new(limits.breaker),
            silence: SilenceMonitor::new(limits.silence.clone(), availability.clone()),
            tokenize_methods: TokenizeMethods::default(),
            adapter_loads: AdapterLoadStates::default(),
            index_slots: EngineSlots::new(index),
            healthy: AtomicBool::new(true),
            availability,
        }
    }

    /// Whether active health checks pass.
    pub(crate) fn is_healthy(&self) -> bool {
        self.healthy.load(Ordering::Relaxed)
    }

    /// Healthy, with a closed breaker, and not suspect.
    pub(crate) fn is_available(&self) -> bool {
        self.is_healthy() && !self.breaker.is_open() && !self.silence.is_suspect()
    }

    /// Records that the engine produced output for a request.
    pub(crate) fn record_progress(&self, at: Instant) {
        if self.silence.record_progress(at) {
            tracing::info!(engine = %self.id, "engine produces output again");
        }
    }

    /// Returns whether the state changed.
    pub(crate) fn set_healthy(&self, healthy: bool) -> bool {
        let has_changed = self.healthy.swap(healthy, Ordering::Relaxed) != healthy;
        self.availability.record();
        has_changed
    }

    pub(crate) fn record_failure(&self, error: &LegError) {
        if matches!(error, LegError::AdapterLoad(_)) {
            // Says nothing about requests of other models.
            return;
        }
        if matches!(error, LegError::Silent(_)) {
            // Counted by the silence monitor, from which a trial request recovers.
            return;
        }
        if error.blames_engine() {
            self.breaker.record_failure();
            self.availability.record();
        } else if !matches!(error, LegError::NoConnectionLeft) {
            self.breaker.record_success();
        }
    }
}
