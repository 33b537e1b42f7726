//! Admission of lines: only while the fleet is idle, and so that each one is visible in the load before the next.

use std::time::Duration;

use tokio::sync::{Mutex, Semaphore, SemaphorePermit};
use tokio::time::{sleep, timeout};

use super::{BackendFailure, BackendResponse, InferenceBackend, LineRequest};

/// How often the load is read while it is too high.
const LOAD_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Time in which a line reaches an engine, and counts in its load.
const ADMISSION_INTERVAL: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(super) struct AdmissionGate<'a, B> {
    backend: &'a B,
    running: Semaphore,
    /// Held by the line that is next.
    next: Mutex<()>,
    max_load: f64,
}

/// Place among the lines that run, or wait for their turn.
pub(super) struct RunSlot<'a> {
    _running: SemaphorePermit<'a>,
}

impl<'a, B: InferenceBackend> AdmissionGate<'a, B> {
    pub(super) fn new(backend: &'a B, concurrency: usize, max_load: f64) -> Self {
        Self { backend, running: Semaphore::new(concurrency.max(1)), next: Mutex::new(()), max_load }
    }

    /// Waits for a slot, which bounds the lines in memory.
    pub(super) async fn slot(&self) -> RunSlot<'_> {
        match self.running.acquire().await {
            Ok(running) => RunSlot { _running: running },
            // It is never closed.
            Err(_) => std::future::pending().await,
        }
    }

    /// Sends a line once it is its turn and the fleet is idle.
    pub(super) async fn send(
        &self,
        slot: RunSlot<'_>,
        request: LineRequest,
    ) -> Result<BackendResponse, BackendFailure> {
        let next = self.next.lock().await;
        while self.backend.load() >= self.max_load {
            sleep(LOAD_POLL_INTERVAL).await;
        }
        let mut response = std::pin::pin!(self.backend.send(request));
        let early = timeout(ADMISSION_INTERVAL, response.as_mut()).await;
        drop(next);
        let response = match early {
            Ok(response) => response,
            Err(_) => response.await,
        };
        drop(slot);
        response
    }
}
