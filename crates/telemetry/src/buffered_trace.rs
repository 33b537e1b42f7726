//! One trace of this process: its spans, buffered until the export decision.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::context::TraceContext;
use crate::export::SpanQueue;
use crate::span_record::{SpanRecord, SpanRecords};

/// Maximum number of buffered spans per trace. An exported trace with more is exported in parts; of a pending one, later spans are dropped.
const MAX_BUFFERED_SPANS: usize = 64;

/// State shared by the spans of a trace.
#[derive(Debug)]
pub(crate) struct BufferedTrace {
    pub(crate) context: TraceContext,
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
    pub(crate) fn new(context: TraceContext, queue: Arc<SpanQueue>) -> Arc<Self> {
        let sampled = context.sampled;
        let decision = if sampled { ExportDecision::Exported } else { ExportDecision::Pending };
        let buffer = SpanBuffer { decision, spans: SpanRecords::new(), root_has_ended: false };
        Arc::new(Self { context, exported: AtomicBool::new(sampled), queue, buffer: Mutex::new(buffer) })
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
    pub(crate) fn record_span(&self, span: Box<SpanRecord>) {
        let mut buffer = self.buffer.lock();
        buffer.root_has_ended |= span.is_root;
        match buffer.decision {
            ExportDecision::Exported => {
                buffer.spans.push(span);
                if buffer.root_has_ended || buffer.spans.len() >= MAX_BUFFERED_SPANS {
                    let spans = std::mem::take(&mut buffer.spans);
                    drop(buffer);
                    self.queue.push(self.context.clone(), spans);
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
