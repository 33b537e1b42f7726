//! Exports ended spans to a collector with OTLP.
//!
//! No request waits for the collector: spans are encoded into batches of limited size, which one task sends. OpenTelemetry's own processor
//! and exporter are not used: the processor exports on a thread without a reactor, where async clients panic, and the exporter takes five
//! times as long to encode a span.

mod body;
mod client;
mod target;
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

pub use client::ExportError;
pub use target::OtlpProtocol;
pub(crate) use target::OtlpTarget;
pub use tls::CollectorTlsError;

use body::ExportBody;
use client::OtlpClient;

use crate::annotations::AttributeValue;
use crate::context::TraceContext;
use crate::otlp::{OtlpEnvelope, SpanEncoder};
use crate::span_record::SpanRecords;

/// Maximum number of queued spans; further ones are dropped.
pub(crate) const MAX_QUEUED_SPANS: usize = 16_384;
/// Number of spans that triggers an export.
const MAX_EXPORT_SPANS: usize = 1024;
/// Traces encoded together: for a single trace the encoder's code is not in the cache, and encoding takes twice as long.
const TRACES_PER_ENCODE: usize = 16;
/// Batch size in bytes that triggers an export. Collectors accept 4 MiB over gRPC by default.
const MAX_EXPORT_BYTES: usize = 1 << 20;
/// Initial buffer size for traces encoded together. Growing it is more expensive.
const ENCODE_BUFFER_BYTES: usize = 60 << 10;
/// Maximum number of unsampled traces exported per second. In an outage a few examples are enough.
const MAX_TAIL_SAMPLES_PER_SECOND: u32 = 50;

/// Spans that are sent in one export.
#[derive(Default)]
struct SpanBatch {
    /// Spans encoded by [`SpanEncoder`].
    body: ExportBody,
    spans: usize,
}

#[derive(Default)]
struct PendingSpans {
    full_batches: VecDeque<SpanBatch>,
    current: SpanBatch,
    unencoded: Vec<EndedSpans>,
    /// Number of spans in all three.
    spans: usize,
}

/// Ended spans of one trace.
struct EndedSpans {
    trace: TraceContext,
    spans: SpanRecords,
}

#[derive(Default)]
pub(crate) struct SpanQueue {
    pending: Mutex<PendingSpans>,
    /// Notified when a batch is full.
    batch_ready: Notify,
    stop: Notify,
    dropped: AtomicU64,
    tail_samples: Mutex<TailSampleWindow>,
}

/// Number of unsampled traces exported in the current second.
#[derive(Default)]
struct TailSampleWindow {
    started: Option<Instant>,
    count: u32,
}

impl SpanQueue {
    /// Queues spans for export; drops them if the queue is full.
    pub(crate) fn push(&self, trace: TraceContext, spans: SpanRecords) {
        let count = spans.len();
        let mut pending = self.pending.lock();
        if pending.spans + count > MAX_QUEUED_SPANS {
            self.dropped.fetch_add(count as u64, Ordering::Relaxed);
            return;
        }
        pending.spans += count;
        pending.unencoded.push(EndedSpans { trace, spans });
        if pending.unencoded.len() < TRACES_PER_ENCODE {
            return;
        }
        drop(pending);
        self.encode_pending();
        if self.seal_batch(MAX_EXPORT_SPANS) {
            self.batch_ready.notify_one();
        }
    }

    fn encode_pending(&self) {
        let ended = std::mem::take(&mut self.pending.lock().unencoded);
        if ended.is_empty() {
            return;
        }
        // Attributes run arbitrary code while they are written, so the queue is not locked here.
        let mut encoder = SpanEncoder::new(ENCODE_BUFFER_BYTES);
        let mut counted = 0;
        for EndedSpans { trace, spans } in ended {
            counted += spans.len();
            spans.iter().for_each(|span| span.encode(&trace, &mut encoder));
        }
        let mut pending = self.pending.lock();
        // Child spans are counted only when they are encoded.
        pending.spans += encoder.spans() - counted;
        pending.current.spans += encoder.spans();
        pending.current.body.push(encoder.into_bytes());
    }

    /// Completes the current batch if it has at least `min_spans` spans or too many bytes. Returns whether it did.
    fn seal_batch(&self, min_spans: usize) -> bool {
        let mut pending = self.pending.lock();
        let current = &mut pending.current;
        let is_full = current.spans >= min_spans || current.body.len() >= MAX_EXPORT_BYTES;
        if is_full {
            let full = std::mem::take(current);
            pending.full_batches.push_back(full);
        }
        is_full
    }

    /// Encodes all spans and completes the batch.
    fn seal_all(&self) {
        self.encode_pending();
        self.seal_batch(1);
    }

    fn pop(&self) -> Option<SpanBatch> {
        let mut pending = self.pending.lock();
        let batch = pending.full_batches.pop_front()?;
        pending.spans -= batch.spans;
        Some(batch)
    }

    /// Whether another unsampled trace may be exported now.
    pub(crate) fn try_tail_sample(&self) -> bool {
        let mut window = self.tail_samples.lock();
        if window.started.is_none_or(|since| since.elapsed() >= Duration::from_secs(1)) {
            *window = TailSampleWindow { started: Some(Instant::now()), count: 0 };
        }
        window.count += 1;
        window.count <= MAX_TAIL_SAMPLES_PER_SECOND
    }

    /// Makes the exporter send the remaining spans and stop.
    pub(crate) fn stop(&self) {
        self.stop.notify_one();
    }
}

impl fmt::Debug for SpanQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpanQueue").field("pending", &self.pending.lock().spans).finish_non_exhaustive()
    }
}

/// Task that sends the queued spans.
pub(crate) struct OtlpExporter {
    queue: Arc<SpanQueue>,
    client: OtlpClient,
    envelope: OtlpEnvelope,
    /// Maximum time a span waits for its batch.
    delay: Duration,
    failure: Option<ExportError>,
}

impl OtlpExporter {
    pub(crate) fn new(
        target: OtlpTarget,
        service: &str,
        delay: Duration,
    ) -> Result<(Arc<SpanQueue>, Self), CollectorTlsError> {
        let client = OtlpClient::new(target)?;
        let version = env!("CARGO_PKG_VERSION");
        // Includes the attributes of the standard variables.
        let resource = Resource::builder()
            .with_service_name(service.to_owned())
            .with_attribute(KeyValue::new("service.version", version))
            .build();
        let attributes =
            resource.iter().map(|(key, value)| (key.as_str(), AttributeValue::from(value.to_string())));
        let envelope = OtlpEnvelope::new(attributes, ("moongate", version));
        let queue = Arc::<SpanQueue>::default();
        Ok((queue.clone(), Self { queue, client, envelope, delay, failure: None }))
    }

    /// Exports until stopped, then exports the remaining spans.
    ///
    /// # Errors
    /// Why the last export failed, if it did.
    pub(crate) async fn run(mut self) -> Result<(), ExportError> {
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

    /// Sends all full batches. Logs the first failure and the recovery, not every attempt in between.
    async fn export(&mut self) {
        while let Some(batch) = self.queue.pop() {
            let SpanBatch { body: mut message, .. } = batch;
            message.push_front(self.envelope.prefix(message.len()).into());
            let outcome = self.client.send(message).await;
            match (&outcome, &self.failure) {
                (Err(problem), None) => {
                    tracing::warn!(%problem, "trace export failed; spans are dropped until it recovers");
                }
                (Ok(()), Some(_)) => tracing::info!("trace export recovered"),
                _ => {}
            }
            self.failure = outcome.err();
            let dropped = self.queue.dropped.swap(0, Ordering::Relaxed);
            if dropped > 0 {
                tracing::warn!(dropped, "span queue overflowed; lower --trace-sample-ratio");
            }
        }
    }
}
