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
pub use tls::TlsError;

use body::Pieces;
use client::Sender;
use otlp::{Exported, Page};

use crate::notes::Value;
use crate::options::{Target, TelemetryError};
use crate::trace::{Spans, Trace};

/// Spans that wait for export; when there are more, they are lost and requests go on.
pub(crate) const MAX_WAITING_SPANS: usize = 16_384;
/// Spans in one export.
const MAX_EXPORT_SPANS: usize = 1024;
/// Traces that are written together: the code that writes is not at hand for a single one, which then takes twice as long.
const TRACES_AT_ONCE: usize = 16;
/// Size of an export from which nothing is added. Collectors take 4 MiB by gRPC unless told otherwise.
const MAX_EXPORT_BYTES: usize = 1 << 20;
/// Room for what is written together. What is larger grows, which costs more.
const ROOM: usize = 60 << 10;
/// Traces in a second that are exported although they were not sampled. When all goes wrong at once, some examples are enough.
const MAX_KEPT_PER_SECOND: u32 = 50;

/// Spans that are sent together.
#[derive(Default)]
struct Batch {
    /// As [`Page`]s.
    pages: Pieces,
    spans: usize,
}

#[derive(Default)]
struct Waiting {
    full: VecDeque<Batch>,
    filling: Batch,
    unwritten: Vec<Ended>,
    /// Spans in all of them.
    spans: usize,
}

/// Spans of a trace.
struct Ended {
    trace: Arc<Trace>,
    spans: Spans,
}

/// Where ended spans are left.
#[derive(Default)]
pub(crate) struct Queue {
    waiting: Mutex<Waiting>,
    /// There is a full batch.
    full: Notify,
    stop: Notify,
    lost: AtomicU64,
    kept: Mutex<Kept>,
}

/// How many traces were kept within a second.
#[derive(Default)]
struct Kept {
    since: Option<Instant>,
    count: u32,
}

impl Queue {
    /// Leaves spans to be exported; they are lost if too many wait already.
    pub(crate) fn push(&self, trace: Arc<Trace>, spans: Spans) {
        let count = spans.len();
        let mut waiting = self.waiting.lock();
        if waiting.spans + count > MAX_WAITING_SPANS {
            self.lost.fetch_add(count as u64, Ordering::Relaxed);
            return;
        }
        waiting.spans += count;
        waiting.unwritten.push(Ended { trace, spans });
        if waiting.unwritten.len() < TRACES_AT_ONCE {
            return;
        }
        drop(waiting);
        self.write();
        if self.close(MAX_EXPORT_SPANS) {
            self.full.notify_one();
        }
    }

    /// Writes what is to be sent.
    fn write(&self) {
        let ended = std::mem::take(&mut self.waiting.lock().unwritten);
        if ended.is_empty() {
            return;
        }
        // What the spans tell may be anything, and must not find the queue in use.
        let mut page = Page::new(ROOM);
        let mut counted = 0;
        for Ended { trace, spans } in ended {
            counted += spans.len();
            spans.iter().for_each(|span| page.record(&trace, span));
        }
        let mut waiting = self.waiting.lock();
        // Steps are only known once they are written.
        waiting.spans += page.spans() - counted;
        waiting.filling.spans += page.spans();
        waiting.filling.pages.push(page.into_bytes());
    }

    /// Has what is written sent if there are so many spans, or too many bytes. Returns whether it will be.
    fn close(&self, enough: usize) -> bool {
        let mut waiting = self.waiting.lock();
        let filling = &mut waiting.filling;
        let is_full = filling.spans >= enough || filling.pages.len() >= MAX_EXPORT_BYTES;
        if is_full {
            let full = std::mem::take(filling);
            waiting.full.push_back(full);
        }
        is_full
    }

    /// Has all sent that there is.
    fn close_all(&self) {
        self.write();
        self.close(1);
    }

    fn pop(&self) -> Option<Batch> {
        let mut waiting = self.waiting.lock();
        let batch = waiting.full.pop_front()?;
        waiting.spans -= batch.spans;
        Some(batch)
    }

    /// Whether one more trace may be exported that was not sampled.
    pub(crate) fn may_keep(&self) -> bool {
        let mut kept = self.kept.lock();
        if kept.since.is_none_or(|since| since.elapsed() >= Duration::from_secs(1)) {
            *kept = Kept { since: Some(Instant::now()), count: 0 };
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
        f.debug_struct("Queue").field("waiting", &self.waiting.lock().spans).finish_non_exhaustive()
    }
}

/// Sends what is in the queue.
pub(crate) struct Exporter {
    queue: Arc<Queue>,
    sender: Sender,
    exported: Exported,
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
        let sender = Sender::new(target)?;
        let version = env!("CARGO_PKG_VERSION");
        // With what the standard variables say of this process.
        let resource = Resource::builder()
            .with_service_name(service.to_owned())
            .with_attribute(KeyValue::new("service.version", version))
            .build();
        let attributes = resource.iter().map(|(key, value)| (key.as_str(), Value::from(value.to_string())));
        let exported = Exported::by(attributes, ("moongate", version));
        let queue = Arc::<Queue>::default();
        Ok((queue.clone(), Self { queue, sender, exported, delay, failure: None }))
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
                _ = due.tick() => queue.close_all(),
                () = queue.full.notified() => {}
            }
            self.export().await;
        }
        queue.close_all();
        self.export().await;
        self.failure.map_or(Ok(()), Err)
    }

    /// Sends all batches that are full. Logs the first failure and the recovery, not every attempt in between.
    async fn export(&mut self) {
        while let Some(batch) = self.queue.pop() {
            let Batch { mut pages, .. } = batch;
            pages.push_front(self.exported.head(pages.len()).into());
            let outcome = self.sender.send(pages).await.map_err(|error| error.to_string());
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
            let lost = self.queue.lost.swap(0, Ordering::Relaxed);
            if lost > 0 {
                tracing::warn!(
                    lost,
                    "spans came faster than the trace collector takes them; lower --trace-sample-ratio"
                );
            }
        }
    }
}
