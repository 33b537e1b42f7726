//! Ended spans to a collector, by OTLP.
//!
//! Nobody waits for the collector: spans go into a queue of limited length, and one task sends what is in it. The SDK's own processor is
//! not used: it exports on a thread without a reactor, where async clients panic.

mod client;
mod span_data;
mod tls;

use std::fmt;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

pub use tls::TlsError;

use client::EXPORT_TIMEOUT;
use span_data::span_data;

use crate::options::{Target, TelemetryError};
use crate::span::Spans;
use crate::trace::Trace;

/// Spans that wait for export; when there are more, they are lost and requests go on.
pub(crate) const MAX_WAITING_SPANS: usize = 16_384;
/// Spans in one export.
const MAX_EXPORT_SPANS: usize = 1024;
/// Traces in a second that are exported although they were not sampled. When all goes wrong at once, some examples are enough.
const MAX_KEPT_PER_SECOND: u32 = 50;

/// Spans of one trace.
struct Ended {
    trace: Arc<Trace>,
    spans: Spans,
}

/// Where ended spans are left.
pub(crate) struct Queue {
    sender: mpsc::UnboundedSender<Ended>,
    /// Spans in the channel: its length is limited by their number.
    waiting: AtomicUsize,
    lost: AtomicU64,
    kept: Mutex<Kept>,
    stop: Notify,
}

/// How many traces were kept within a second.
struct Kept {
    since: Instant,
    count: u32,
}

impl Queue {
    /// Leaves spans to be exported; they are lost if too many wait already.
    pub(crate) fn push(&self, trace: Arc<Trace>, spans: Spans) {
        let count = spans.len();
        if self.waiting.fetch_add(count, Ordering::Relaxed) + count <= MAX_WAITING_SPANS
            && self.sender.send(Ended { trace, spans }).is_ok()
        {
            return;
        }
        self.waiting.fetch_sub(count, Ordering::Relaxed);
        self.lost.fetch_add(u64::try_from(count).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Whether one more trace may be exported that was not sampled.
    pub(crate) fn may_keep(&self) -> bool {
        let mut kept = self.kept.lock();
        if kept.since.elapsed() >= Duration::from_secs(1) {
            *kept = Kept { since: Instant::now(), count: 0 };
        }
        kept.count += 1;
        kept.count <= MAX_KEPT_PER_SECOND
    }

    /// Has the exporter send what is there and end.
    pub(crate) fn stop(&self) {
        self.stop.notify_one();
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("waiting", &self.waiting).finish_non_exhaustive()
    }
}

/// Sends what is in the queue.
pub(crate) struct Exporter {
    queue: Arc<Queue>,
    ended: mpsc::UnboundedReceiver<Ended>,
    exporter: SpanExporter,
    scope: InstrumentationScope,
    batch: Vec<SpanData>,
    /// How long a span waits for others to be exported with.
    delay: Duration,
    failure: Option<String>,
}

impl Exporter {
    pub(crate) fn new(
        target: Target,
        service: &str,
        delay: Duration,
    ) -> Result<(Arc<Queue>, Self), TelemetryError> {
        let mut exporter = client::exporter(target)?;
        let version = env!("CARGO_PKG_VERSION");
        let resource = Resource::builder()
            .with_service_name(service.to_owned())
            .with_attribute(KeyValue::new("service.version", version))
            .build();
        exporter.set_resource(&resource);
        let scope = InstrumentationScope::builder("moongate").with_version(version).build();
        let (sender, ended) = mpsc::unbounded_channel();
        let queue = Arc::new(Queue {
            sender,
            waiting: AtomicUsize::new(0),
            lost: AtomicU64::new(0),
            kept: Mutex::new(Kept { since: Instant::now(), count: 0 }),
            stop: Notify::new(),
        });
        let batch = Vec::new();
        Ok((queue.clone(), Self { queue, ended, exporter, scope, batch, delay, failure: None }))
    }

    /// Exports until it is told to stop, and then what is left.
    ///
    /// # Errors
    /// Why the last export failed, if it did: its spans are lost.
    pub(crate) async fn run(mut self) -> Result<(), String> {
        let queue = self.queue.clone();
        let mut due = None;
        loop {
            let delay_is_over = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                biased;
                () = queue.stop.notified() => break,
                () = delay_is_over => {
                    self.export().await;
                    due = None;
                }
                Some(ended) = self.ended.recv() => {
                    due.get_or_insert_with(|| Instant::now() + self.delay);
                    self.take(ended).await;
                }
            }
        }
        self.ended.close();
        while let Some(ended) = self.ended.recv().await {
            self.take(ended).await;
        }
        self.export().await;
        self.failure.map_or(Ok(()), Err)
    }

    async fn take(&mut self, Ended { trace, spans }: Ended) {
        self.queue.waiting.fetch_sub(spans.len(), Ordering::Relaxed);
        for span in spans {
            self.batch.push(span_data(&self.scope, &trace, *span));
        }
        if self.batch.len() >= MAX_EXPORT_SPANS {
            self.export().await;
        }
    }

    /// Logs the first failure and the recovery, not every attempt in between.
    async fn export(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        let export = self.exporter.export(std::mem::take(&mut self.batch));
        let outcome = match tokio::time::timeout(EXPORT_TIMEOUT, export).await {
            Ok(outcome) => outcome.map_err(|error| error.to_string()),
            Err(_) => Err(format!("it did not answer within {EXPORT_TIMEOUT:?}")),
        };
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
        let lost = self.queue.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            tracing::warn!(
                lost,
                "spans came faster than the trace collector takes them; lower --trace-sample-ratio"
            );
        }
        self.failure = outcome.err();
    }
}
