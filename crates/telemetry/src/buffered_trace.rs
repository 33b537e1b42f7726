//! One trace of this process: its spans, held until it is known whether anybody will see them.

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

/// Most spans of a trace that are held. A trace that is exported with more is so in parts; of another, the later ones are lost.
const MAX_BUFFERED_SPANS: usize = 64;

/// A span.
pub(crate) struct SpanRecord<T: ?Sized = dyn SpanAttributes> {
    pub(crate) id: SpanId,
    pub(crate) parent: SpanId,
    /// Whether it has no parent in this process.
    pub(crate) is_root: bool,
    pub(crate) kind: SpanKind,
    pub(crate) name: Cow<'static, str>,
    pub(crate) start: Instant,
    /// Of one that has ended.
    pub(crate) end: Option<Instant>,
    pub(crate) annotations: Vec<SpanAnnotation>,
    pub(crate) attributes: T,
}

impl<T: ?Sized> fmt::Debug for SpanRecord<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record").field("id", &self.id).field("name", &self.name).finish_non_exhaustive()
    }
}

/// Spans that have ended: of most traces so few that they need no memory of their own.
pub(crate) type SpanRecords = SmallVec<[Box<SpanRecord>; 4]>;

/// What the spans of a trace share.
#[derive(Debug)]
pub(crate) struct BufferedTrace {
    pub(crate) id: TraceId,
    pub(crate) state: TraceState,
    /// Whether the sampler took it, which everybody who is called is told.
    pub(crate) sampled: bool,
    /// Whether its fate is to be exported.
    exported: AtomicBool,
    queue: Arc<SpanQueue>,
    buffer: Mutex<SpanBuffer>,
}

#[derive(Debug)]
struct SpanBuffer {
    decision: ExportDecision,
    /// In the order in which they ended.
    spans: SpanRecords,
    root_has_ended: bool,
}

#[derive(Debug, Clone, Copy)]
enum ExportDecision {
    Exported,
    /// Not sampled, and it may still end badly.
    Pending,
    Dropped,
}

impl BufferedTrace {
    /// A trace, which is exported if it is sampled.
    pub(crate) fn new(id: TraceId, state: TraceState, sampled: bool, queue: Arc<SpanQueue>) -> Arc<Self> {
        let fate = if sampled { ExportDecision::Exported } else { ExportDecision::Pending };
        let held = SpanBuffer { decision: fate, spans: SpanRecords::new(), root_has_ended: false };
        Arc::new(Self {
            id,
            state,
            sampled,
            exported: AtomicBool::new(sampled),
            queue,
            buffer: Mutex::new(held),
        })
    }

    /// Exports the trace whatever the sampler said, if that was not done too often within this second.
    pub(crate) fn force_export(&self) {
        let mut held = self.buffer.lock();
        if matches!(held.decision, ExportDecision::Pending) && self.queue.try_tail_sample() {
            held.decision = ExportDecision::Exported;
            self.exported.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the trace is exported for sure.
    pub(crate) fn is_exported(&self) -> bool {
        self.exported.load(Ordering::Relaxed)
    }

    /// A span has ended. After the root, only spans of exported traces matter.
    pub(crate) fn record_span(self: Arc<Self>, span: Box<SpanRecord>) {
        let mut held = self.buffer.lock();
        held.root_has_ended |= span.is_root;
        match held.decision {
            ExportDecision::Exported => {
                held.spans.push(span);
                if held.root_has_ended || held.spans.len() >= MAX_BUFFERED_SPANS {
                    let spans = std::mem::take(&mut held.spans);
                    drop(held);
                    self.queue.push(self.clone(), spans);
                }
            }
            ExportDecision::Pending if held.root_has_ended => {
                held.decision = ExportDecision::Dropped;
                let forgotten = std::mem::take(&mut held.spans);
                // What is dropped with them may be anything, and must not find the trace in use.
                drop(held);
                drop(forgotten);
            }
            ExportDecision::Pending if held.spans.len() < MAX_BUFFERED_SPANS => held.spans.push(span),
            ExportDecision::Pending | ExportDecision::Dropped => {}
        }
    }
}
