//! Requests that this gateway has on an engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::Endpoint;

/// How many there are. What they weigh is in the scheduler's books.
#[derive(Debug, Default)]
pub(crate) struct InFlight(AtomicU32);

impl InFlight {
    pub(crate) fn count(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A request on an engine; no longer there when dropped.
#[derive(Debug)]
pub(crate) struct OnEngine(Arc<Endpoint>);

impl OnEngine {
    pub(crate) fn new(endpoint: Arc<Endpoint>) -> Self {
        endpoint.in_flight.0.fetch_add(1, Ordering::Relaxed);
        Self(endpoint)
    }

    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.0
    }
}

impl Drop for OnEngine {
    fn drop(&mut self) {
        self.0.in_flight.0.fetch_sub(1, Ordering::Relaxed);
    }
}
