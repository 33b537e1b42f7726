//! One trace of this process: its spans, buffered until the export decision.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use opentelemetry::trace::{SpanId, SpanKind, TraceId, TraceState};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::annotations::SpanAnnotation;
use crate::export::SpanQueue;
use crate::span_attributes::SpanAttributes;

/// Maximum number of buffered spans per trace. An exported trace with more is exported in parts; of a pending one, later spans are dropped.
const MAX_BUFFERED_SPANS: usize = 64;

/// Recorded state of a span.
pub(crate) struct SpanRecord<T: ?Sized = dyn SpanAttributes> {
    pub(crate) id: SpanId,
    pub(crate) parent: SpanId,
    /// Whether the span has no parent in this process.
    pub(crate) is_root: bool,
    pub(crate) kind: SpanKind,
    pub(crate) name: Cow<'static, str>,
    pub(crate) start: Instant,
    /// End time, once the span has ended.
    pub(crate) end: Option<Instant>,
    pub(crate) annotations: Vec<SpanAnnotation>,
    pub(crate) attributes: T,
}

impl<T: ?Sized> fmt::Debug for SpanRecord<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpanRecord").field("id", &self.id).field("name", &self.name).finish_non_exhaustive()
    }
}

/// Ended spans; most traces have so few that they need no heap allocation.
pub(crate) type SpanRecords = SmallVec<[Box<SpanRecord>; 4]>;

/// State shared by the spans of a trace.
#[derive(Debug)]
pub(crate) struct BufferedTrace {
    pub(crate) id: TraceId,
    pub(crate) state: TraceState,
    /// Sampling decision, propagated to every callee.
    pub(crate) sampled: bool,
    /// Whether the decision is to export.
    exported: AtomicBool,
    queue: Arc<SpanQueue>,
    buffer: Mutex<SpanBuffer>,
}

#[derive(Debug)]
struct SpanBuffer {
    decision: ExportDecision,
    /// Ended spans, in the order of their ends.
    spans: SpanRecords,
    root_has_ended: bool,
}

#[derive(Debug, Clone, Copy)]
enum ExportDecision {
    Exported,
    /// Not sampled, but an error may still force the export.
    Pending,
    Dropped,
}

impl BufferedTrace {
    /// Creates a trace; it is exported if sampled.
    pub(crate) fn new(id: TraceId, state: TraceState, sampled: bool, queue: Arc<SpanQueue>) -> Arc<Self> {
        let decision = if sampled { ExportDecision::Exported } else { ExportDecision::Pending };
        let buffer = SpanBuffer { decision, spans: SpanRecords::new(), root_has_ended: false };
        Arc::new(Self {
            id,
            state,
            sampled,
            exported: AtomicBool::new(sampled),
            queue,
            buffer: Mutex::new(buffer),
        })
    }

    /// Exports the trace regardless of sampling, up to a limit per second.
    pub(crate) fn force_export(&self) {
        let mut buffer = self.buffer.lock();
        if matches!(buffer.decision, ExportDecision::Pending) && self.queue.try_tail_sample() {
            buffer.decision = ExportDecision::Exported;
            self.exported.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the trace is certain to be exported.
    pub(crate) fn is_exported(&self) -> bool {
        self.exported.load(Ordering::Relaxed)
    }

    /// Records an ended span. After the root has ended, only spans of exported traces are kept.
    pub(crate) fn record_span(self: Arc<Self>, span: Box<SpanRecord>) {
        let mut buffer = self.buffer.lock();
        buffer.root_has_ended |= span.is_root;
        match buffer.decision {
            ExportDecision::Exported => {
                buffer.spans.push(span);
                if buffer.root_has_ended || buffer.spans.len() >= MAX_BUFFERED_SPANS {
                    let spans = std::mem::take(&mut buffer.spans);
                    drop(buffer);
                    self.queue.push(self.clone(), spans);
                }
            }
            ExportDecision::Pending if buffer.root_has_ended => {
                buffer.decision = ExportDecision::Dropped;
                let dropped_spans = std::mem::take(&mut buffer.spans);
                // Attributes may have any destructor, so they are dropped outside the lock.
                drop(buffer);
                drop(dropped_spans);
            }
            ExportDecision::Pending if buffer.spans.len() < MAX_BUFFERED_SPANS => buffer.spans.push(span),
            ExportDecision::Pending | ExportDecision::Dropped => {}
        }
    }
}
