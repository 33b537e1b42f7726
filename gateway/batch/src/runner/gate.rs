//! Admission of lines: only while the fleet is idle, and so that each one is visible in the load before the next.

use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard, Semaphore, SemaphorePermit};
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

/// Permission to send one line.
pub(super) struct AdmittedLine<'a> {
    _running: SemaphorePermit<'a>,
    next: MutexGuard<'a, ()>,
}

impl<'a, B: InferenceBackend> AdmissionGate<'a, B> {
    pub(super) fn new(backend: &'a B, concurrency: usize, max_load: f64) -> Self {
        Self { backend, running: Semaphore::new(concurrency.max(1)), next: Mutex::new(()), max_load }
    }

    /// Waits for this line's turn, and until the fleet is idle.
    pub(super) async fn admit(&self) -> AdmittedLine<'_> {
        let next = self.next.lock().await;
        let Ok(running) = self.running.acquire().await else {
            // It is never closed.
            return std::future::pending().await;
        };
        while self.backend.load() >= self.max_load {
            sleep(LOAD_POLL_INTERVAL).await;
        }
        AdmittedLine { _running: running, next }
    }

    /// Sends an admitted line.
    pub(super) async fn send(
        &self,
        admitted: AdmittedLine<'_>,
        request: LineRequest,
    ) -> Result<BackendResponse, BackendFailure> {
        let AdmittedLine { _running, next } = admitted;
        let mut response = std::pin::pin!(self.backend.send(request));
        let early = timeout(ADMISSION_INTERVAL, response.as_mut()).await;
        drop(next);
        match early {
            Ok(response) => response,
            Err(_) => response.await,
        }
    }
}
