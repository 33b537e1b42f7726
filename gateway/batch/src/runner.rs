//! Runs the batches: sends their lines while the fleet is idle, and stores the results.

mod gate;
mod line;

use std::collections::HashSet;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use moongate_backoff::{Backoff, BackoffPolicy};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::batch::{BatchEndpoint, BatchEvent, BatchRecord, BatchStatus};
use crate::catalog::{Catalog, TransitionError};
use crate::file::unix_now;
use crate::input::LineSpan;
use crate::line_reader::LineReader;
use crate::output::{RunError, scan_input, write_output};
use crate::progress::{BatchOptions, LineOutcome, RunProgress};
use crate::results::{LineResult, RESULTS, StoredResults, delete_segments, segment_of_name, unfinished};
use crate::storage::StorageError;
use gate::AdmissionGate;
use line::run_line;

/// Most batches that run at the same time; others wait in `validating`.
const MAX_ACTIVE_BATCHES: usize = 16;
/// Results are stored at least this often. After a crash, the lines since then run again.
const FLUSH_INTERVAL: Duration = Duration::from_millis(250);
/// Results are stored at once beyond this number of bytes.
const FLUSH_BYTES: usize = 4 << 20;
/// How often ended batches are searched for old ones.
const SWEEP_INTERVAL: Duration = Duration::from_secs(3600);
/// Pauses while the storage does not work.
const STORAGE_BACKOFF: BackoffPolicy =
    BackoffPolicy { initial: Duration::from_millis(200), max: Duration::from_secs(30) };

/// A line, to be sent as a request of its tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineRequest {
    pub tenant: String,
    pub endpoint: BatchEndpoint,
    pub request_id: String,
    pub body: Bytes,
}

/// The response to a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendResponse {
    pub status: u16,
    /// Delay before another attempt, if the response has one.
    pub retry_after: Option<Duration>,
    pub body: Bytes,
}

/// There is no response to a line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BackendFailure(pub String);

/// What runs the lines.
pub trait InferenceBackend: Sync {
    /// Load of the fleet as a fraction of its capacity; infinite while no line may start.
    fn load(&self) -> f64;

    /// Sends one line. Dropping the future aborts it.
    fn send(
        &self,
        request: LineRequest,
    ) -> impl Future<Output = Result<BackendResponse, BackendFailure>> + Send;
}

/// Runs batches until stopped.
#[derive(Debug)]
pub(crate) struct BatchRunner<'a, B> {
    catalog: &'a Catalog,
    progress: &'a RunProgress,
    options: &'a BatchOptions,
    gate: AdmissionGate<'a, B>,
    stop: CancellationToken,
}

/// Why lines are no longer run.
enum LinesEnd {
    AllEnded,
    Expired,
    /// The batch is cancelled, or the runner stops.
    Interrupted,
}

impl<'a, B: InferenceBackend> BatchRunner<'a, B> {
    pub(crate) fn new(
        catalog: &'a Catalog,
        progress: &'a RunProgress,
        options: &'a BatchOptions,
        backend: &'a B,
        stop: CancellationToken,
    ) -> Self {
        let gate = AdmissionGate::new(backend, options.concurrency, options.max_load);
        Self { catalog, progress, options, gate, stop }
    }

    /// Runs batches, old and new ones; `created` is notified of the latter.
    pub(crate) async fn run(&self, created: &Notify) {
        let mut running = FuturesUnordered::new();
        let mut active = HashSet::new();
        let mut next_sweep = Instant::now();
        while !self.stop.is_cancelled() {
            for id in self.catalog.unfinished_batches() {
                if active.len() < MAX_ACTIVE_BATCHES && active.insert(id.clone()) {
                    running.push(self.run_batch(id));
                }
            }
            tokio::select! {
                () = self.stop.cancelled() => {}
                () = created.notified() => {}
                Some(id) = running.next(), if !running.is_empty() => drop(active.remove(&id)),
                () = sleep_until(next_sweep) => {
                    if let Err(error) = self.sweep().await {
                        tracing::warn!(%error, "old batches cannot be removed now");
                    }
                    next_sweep = Instant::now() + SWEEP_INTERVAL;
                }
            }
        }
        while running.next().await.is_some() {}
    }

    /// Removes batches that ended long ago, and results that no batch needs.
    async fn sweep(&self) -> Result<(), crate::error::BatchError> {
        let limit = unix_now().saturating_sub(self.options.retention.as_secs());
        for id in self.catalog.batches_ended_before(limit) {
            self.catalog.remove_batch(&id).await?;
        }
        let names = self.catalog.store().list(RESULTS).await?;
        for name in names {
            if segment_of_name(&name).is_some_and(|(batch, _)| !self.catalog.needs_results(batch)) {
                self.catalog.store().delete(&format!("{RESULTS}/{name}")).await?;
            }
        }
        Ok(())
    }

    /// Runs a batch to its end, or until the runner stops. Returns its id.
    async fn run_batch(&self, id: String) -> String {
        let mut backoff = Backoff::new(STORAGE_BACKOFF);
        let mut spans = None;
        while let Ok(batch) = self.catalog.any_batch(&id) {
            if batch.status.is_final() {
                if let Err(error) = delete_segments(self.catalog.store(), &id).await {
                    tracing::warn!(batch = %id, %error, "results cannot be deleted now; the next sweep will do it");
                }
                break;
            }
            match self.advance(&batch, &mut spans).await {
                Ok(()) => backoff.reset(),
                Err(RunError::Storage(error)) => {
                    tracing::warn!(batch = %id, %error, "the storage of batches does not work; retrying");
                    backoff.record_failure();
                }
                Err(RunError::Fatal(problems)) => {
                    let failed = self.enter(&id, BatchEvent::Failed(problems)).await;
                    if let Err(error) = failed {
                        tracing::warn!(batch = %id, %error, "a failed batch cannot be stored; retrying");
                        backoff.record_failure();
                    }
                }
            }
            if self.stop.run_until_cancelled(sleep(backoff.jittered_pause())).await.is_none() {
                break;
            }
        }
        id
    }

    /// Does what leads a batch out of its state.
    async fn advance(&self, batch: &BatchRecord, spans: &mut Option<Vec<LineSpan>>) -> Result<(), RunError> {
        let was_validated = batch.entered_at.contains_key(&BatchStatus::InProgress);
        let is_needed = batch.status == BatchStatus::Validating || was_validated;
        if is_needed && spans.is_none() {
            *spans = Some(scan_input(self.catalog, batch, self.options.max_line_bytes).await?);
        }
        let spans = spans.as_deref().unwrap_or_default();
        let finished = match batch.status {
            BatchStatus::Validating => {
                return self.enter(&batch.id, BatchEvent::Validated { lines: spans.len() as u32 }).await;
            }
            BatchStatus::InProgress => match self.run_lines(batch, spans).await? {
                LinesEnd::AllEnded => return self.enter(&batch.id, BatchEvent::AllLinesEnded).await,
                LinesEnd::Interrupted => return Ok(()),
                LinesEnd::Expired => BatchStatus::Expired,
            },
            BatchStatus::Finalizing => BatchStatus::Completed,
            _ => BatchStatus::Cancelled,
        };
        let output = write_output(self.catalog, batch, spans, finished).await?;
        self.progress.count(LineOutcome::Expired, output.expired.into());
        self.enter(&batch.id, BatchEvent::Finished(output)).await
    }

    /// Stores a transition. One that a request has overtaken is without effect: the batch goes on from its new state.
    async fn enter(&self, id: &str, event: BatchEvent) -> Result<(), RunError> {
        match self.catalog.transition(id, event, unix_now()).await {
            Ok(_) | Err(TransitionError::Invalid(_)) => Ok(()),
            Err(TransitionError::Batch(error)) => Err(error.into()),
        }
    }

    /// Runs the lines without a result, and stores their results.
    async fn run_lines(&self, batch: &BatchRecord, spans: &[LineSpan]) -> Result<LinesEnd, RunError> {
        let mut results = StoredResults::load(self.catalog.store(), &batch.id, spans.len()).await?;
        let interrupted = self.progress.start(&batch.id, results.counts());
        // A request may have cancelled the batch before it could interrupt it.
        let status = self.catalog.any_batch(&batch.id)?.status;
        let ended = if status == BatchStatus::InProgress {
            self.run_lines_until(batch, spans, &mut results, &interrupted).await
        } else {
            Ok(LinesEnd::Interrupted)
        };
        self.progress.end(&batch.id);
        Ok(ended?)
    }

    async fn run_lines_until(
        &self,
        batch: &BatchRecord,
        spans: &[LineSpan],
        results: &mut StoredResults,
        interrupted: &CancellationToken,
    ) -> Result<LinesEnd, StorageError> {
        let window = Duration::from_secs(batch.expires_at.saturating_sub(unix_now()));
        let expiry = Instant::now() + window;
        let todo: Vec<usize> = unfinished(results, 0..spans.len()).collect();
        let mut todo = todo.into_iter();
        let input = LineReader::new(self.catalog.store(), &batch.input_file);
        let mut running = FuturesUnordered::new();
        let mut pending: Vec<LineResult> = Vec::new();
        let (mut pending_bytes, mut flush_at) = (0, Instant::now());
        let ended = loop {
            while running.len() < self.options.concurrency
                && let Some(line) = todo.next()
            {
                let place = (line as u32, spans[line]);
                running.push(run_line(&input, self.progress, &self.gate, batch, place));
            }
            if running.is_empty() {
                break LinesEnd::AllEnded;
            }
            tokio::select! {
                biased;
                () = self.stop.cancelled() => break LinesEnd::Interrupted,
                () = interrupted.cancelled() => break LinesEnd::Interrupted,
                () = sleep_until(expiry) => break LinesEnd::Expired,
                Some(result) = running.next() => {
                    if pending.is_empty() {
                        flush_at = Instant::now() + FLUSH_INTERVAL;
                    }
                    pending_bytes += result.text.len();
                    pending.push(result);
                }
                () = sleep_until(flush_at), if !pending.is_empty() => pending_bytes = usize::MAX,
            }
            if pending_bytes >= FLUSH_BYTES {
                self.flush(batch, results, &mut pending).await?;
                pending_bytes = 0;
            }
        };
        drop(running);
        self.flush(batch, results, &mut pending).await?;
        Ok(ended)
    }

    /// Stores results. If that fails, the batch goes on from what is stored, and the lines run again.
    async fn flush(
        &self,
        batch: &BatchRecord,
        results: &mut StoredResults,
        pending: &mut Vec<LineResult>,
    ) -> Result<(), StorageError> {
        if pending.is_empty() {
            return Ok(());
        }
        results.append(self.catalog.store(), pending).await?;
        pending.clear();
        self.progress.record(&batch.id, results.counts());
        Ok(())
    }
}
