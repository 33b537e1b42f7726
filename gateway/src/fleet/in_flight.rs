//! Requests that this gateway has in flight on an engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::UpstreamEndpoint;

/// Number of requests in flight. The scheduler tracks their load.
#[derive(Debug, Default)]
pub(crate) struct InFlightCount(AtomicU32);

impl InFlightCount {
    pub(crate) fn count(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A request in flight on an engine, until dropped.
#[derive(Debug)]
pub(crate) struct EngineInFlightGuard(Arc<UpstreamEndpoint>);

impl EngineInFlightGuard {
    pub(crate) fn new(endpoint: Arc<UpstreamEndpoint>) -> Self {
        endpoint.in_flight.0.fetch_add(1, Ordering::Relaxed);
        Self(endpoint)
    }

    pub(crate) fn endpoint(&self) -> &Arc<UpstreamEndpoint> {
        &self.0
    }
}

impl Drop for EngineInFlightGuard {
    fn drop(&mut self) {
        self.0.in_flight.0.fetch_sub(1, Ordering::Relaxed);
    }
}
