//! Ended spans to a collector, by OTLP.
//!
//! Nobody waits for the collector: spans are written, as they will be sent, into a batch of limited size, and one task sends what is in it.
//! OpenTelemetry's own processor and exporter are not used: the one exports on a thread without a reactor, where async clients panic, and the
//! other takes five times as long to write a span.

mod body;
mod client;
pub(crate) mod otlp;
mod protobuf;
mod tls;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry_sdk::Resource;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

pub(crate) use client::grpc_path;
pub use tls::CollectorTlsError;

use body::ExportBody;
use client::OtlpClient;
use otlp::{OtlpEnvelope, SpanEncoder};

use crate::annotations::AttributeValue;
use crate::buffered_trace::{BufferedTrace, SpanRecords};
use crate::options::{OtlpTarget, TelemetryError};

/// Spans that wait for export; when there are more, they are lost and requests go on.
pub(crate) const MAX_QUEUED_SPANS: usize = 16_384;
/// Spans in one export.
const MAX_EXPORT_SPANS: usize = 1024;
/// Traces that are written together: the code that writes is not at hand for a single one, which then takes twice as long.
const TRACES_PER_ENCODE: usize = 16;
/// Size of an export from which nothing is added. Collectors take 4 MiB by gRPC unless told otherwise.
const MAX_EXPORT_BYTES: usize = 1 << 20;
/// Room for what is written together. What is larger grows, which costs more.
const ENCODE_BUFFER_BYTES: usize = 60 << 10;
/// Traces in a second that are exported although they were not sampled. When all goes wrong at once, some examples are enough.
const MAX_TAIL_SAMPLES_PER_SECOND: u32 = 50;

/// Spans that are sent together.
#[derive(Default)]
struct SpanBatch {
    /// As [`SpanEncoder`]s.
    body: ExportBody,
    spans: usize,
}

#[derive(Default)]
struct PendingSpans {
    full_batches: VecDeque<SpanBatch>,
    current: SpanBatch,
    unencoded: Vec<EndedSpans>,
    /// Spans in all of them.
    spans: usize,
}

/// Spans of a trace.
struct EndedSpans {
    trace: Arc<BufferedTrace>,
    spans: SpanRecords,
}

/// Where ended spans are left.
#[derive(Default)]
pub(crate) struct SpanQueue {
    pending: Mutex<PendingSpans>,
    /// There is a full batch.
    batch_ready: Notify,
    stop: Notify,
    dropped: AtomicU64,
    tail_samples: Mutex<TailSampleWindow>,
}

/// How many traces were kept within a second.
#[derive(Default)]
struct TailSampleWindow {
    started: Option<Instant>,
    count: u32,
}

impl SpanQueue {
    /// Leaves spans to be exported; they are lost if too many wait already.
    pub(crate) fn push(&self, trace: Arc<BufferedTrace>, spans: SpanRecords) {
        let count = spans.len();
        let mut waiting = self.pending.lock();
        if waiting.spans + count > MAX_QUEUED_SPANS {
            self.dropped.fetch_add(count as u64, Ordering::Relaxed);
            return;
        }
        waiting.spans += count;
        waiting.unencoded.push(EndedSpans { trace, spans });
        if waiting.unencoded.len() < TRACES_PER_ENCODE {
            return;
        }
        drop(waiting);
        self.encode_pending();
        if self.seal_batch(MAX_EXPORT_SPANS) {
            self.batch_ready.notify_one();
        }
    }

    /// Writes what is to be sent.
    fn encode_pending(&self) {
        let ended = std::mem::take(&mut self.pending.lock().unencoded);
        if ended.is_empty() {
            return;
        }
        // What the spans tell may be anything, and must not find the queue in use.
        let mut page = SpanEncoder::new(ENCODE_BUFFER_BYTES);
        let mut counted = 0;
        for EndedSpans { trace, spans } in ended {
            counted += spans.len();
            spans.iter().for_each(|span| page.encode_record(&trace, span));
        }
        let mut waiting = self.pending.lock();
        // Steps are only known once they are written.
        waiting.spans += page.spans() - counted;
        waiting.current.spans += page.spans();
        waiting.current.body.push(page.into_bytes());
    }

    /// Has what is written sent if there are so many spans, or too many bytes. Returns whether it will be.
    fn seal_batch(&self, enough: usize) -> bool {
        let mut waiting = self.pending.lock();
        let filling = &mut waiting.current;
        let is_full = filling.spans >= enough || filling.body.len() >= MAX_EXPORT_BYTES;
        if is_full {
            let full = std::mem::take(filling);
            waiting.full_batches.push_back(full);
        }
        is_full
    }

    /// Has all sent that there is.
    fn seal_all(&self) {
        self.encode_pending();
        self.seal_batch(1);
    }

    fn pop(&self) -> Option<SpanBatch> {
        let mut waiting = self.pending.lock();
        let batch = waiting.full_batches.pop_front()?;
        waiting.spans -= batch.spans;
        Some(batch)
    }

    /// Whether one more trace may be exported that was not sampled.
    pub(crate) fn try_tail_sample(&self) -> bool {
        let mut kept = self.tail_samples.lock();
        if kept.started.is_none_or(|since| since.elapsed() >= Duration::from_secs(1)) {
            *kept = TailSampleWindow { started: Some(Instant::now()), count: 0 };
        }
        kept.count += 1;
        kept.count <= MAX_TAIL_SAMPLES_PER_SECOND
    }

    /// Has the exporter send what is there and end.
    pub(crate) fn stop(&self) {
        self.stop.notify_one();
    }
}

impl fmt::Debug for SpanQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("waiting", &self.pending.lock().spans).finish_non_exhaustive()
    }
}

/// Sends what is in the queue.
pub(crate) struct OtlpExporter {
    queue: Arc<SpanQueue>,
    client: OtlpClient,
    envelope: OtlpEnvelope,
    /// How long a span waits for others to be exported with.
    delay: Duration,
    failure: Option<String>,
}

impl OtlpExporter {
    pub(crate) fn new(
        target: OtlpTarget,
        service: &str,
        delay: Duration,
    ) -> Result<(Arc<SpanQueue>, Self), TelemetryError> {
        let sender = OtlpClient::new(target)?;
        let version = env!("CARGO_PKG_VERSION");
        // With what the standard variables say of this process.
        let resource = Resource::builder()
            .with_service_name(service.to_owned())
            .with_attribute(KeyValue::new("service.version", version))
            .build();
        let attributes =
            resource.iter().map(|(key, value)| (key.as_str(), AttributeValue::from(value.to_string())));
        let exported = OtlpEnvelope::new(attributes, ("moongate", version));
        let queue = Arc::<SpanQueue>::default();
        Ok((queue.clone(), Self { queue, client: sender, envelope: exported, delay, failure: None }))
    }

    /// Exports until it is told to stop, and then what is left.
    ///
    /// # Errors
    /// Why the last export failed, if it did: its spans are lost.
    pub(crate) async fn run(mut self) -> Result<(), String> {
        let queue = self.queue.clone();
        let mut due = interval_at(Instant::now() + self.delay, self.delay);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = queue.stop.notified() => break,
                _ = due.tick() => queue.seal_all(),
                () = queue.batch_ready.notified() => {}
            }
            self.export().await;
        }
        queue.seal_all();
        self.export().await;
        self.failure.map_or(Ok(()), Err)
    }

    /// Sends all batches that are full. Logs the first failure and the recovery, not every attempt in between.
    async fn export(&mut self) {
        while let Some(batch) = self.queue.pop() {
            let SpanBatch { body: mut pages, .. } = batch;
            pages.push_front(self.envelope.prefix(pages.len()).into());
            let outcome = self.client.send(pages).await.map_err(|error| error.to_string());
            match (&outcome, &self.failure) {
                (Err(problem), None) => {
                    tracing::warn!(
                        problem,
                        "the trace collector does not take spans; they are lost until it does"
                    );
                }
                (Ok(()), Some(_)) => tracing::info!("the trace collector takes spans again"),
                _ => {}
            }
            self.failure = outcome.err();
            let lost = self.queue.dropped.swap(0, Ordering::Relaxed);
            if lost > 0 {
                tracing::warn!(
                    lost,
                    "spans came faster than the trace collector takes them; lower --trace-sample-ratio"
                );
            }
        }
    }
}
