//! One trace of this process: its spans, held until it is known whether anybody will see them.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use opentelemetry::trace::{SpanId, SpanKind, TraceId, TraceState};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::export::Queue;
use crate::notes::Note;
use crate::tell::Tell;

/// Most spans of a trace that are held. A trace that is exported with more is so in parts; of another, the later ones are lost.
const MAX_HELD: usize = 64;

/// A span.
pub(crate) struct Record<T: ?Sized = dyn Tell> {
    pub(crate) id: SpanId,
    pub(crate) parent: SpanId,
    /// Whether it has no parent in this process.
    pub(crate) is_root: bool,
    pub(crate) kind: SpanKind,
    pub(crate) name: Cow<'static, str>,
    pub(crate) start: Instant,
    /// Of one that has ended.
    pub(crate) end: Option<Instant>,
    pub(crate) notes: Vec<Note>,
    pub(crate) facts: T,
}

impl<T: ?Sized> fmt::Debug for Record<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record").field("id", &self.id).field("name", &self.name).finish_non_exhaustive()
    }
}

/// Spans that have ended: of most traces so few that they need no memory of their own.
pub(crate) type Spans = SmallVec<[Box<Record>; 4]>;

/// What the spans of a trace share.
#[derive(Debug)]
pub(crate) struct Trace {
    pub(crate) id: TraceId,
    pub(crate) state: TraceState,
    /// Whether the sampler took it, which everybody who is called is told.
    pub(crate) sampled: bool,
    /// Whether its fate is to be exported.
    exported: AtomicBool,
    queue: Arc<Queue>,
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    fate: Fate,
    /// In the order in which they ended.
    spans: Spans,
    root_has_ended: bool,
}

#[derive(Debug, Clone, Copy)]
enum Fate {
    Exported,
    /// Not sampled, and it may still end badly.
    Undecided,
    Forgotten,
}

impl Trace {
    /// A trace, which is exported if it is sampled.
    pub(crate) fn new(id: TraceId, state: TraceState, sampled: bool, queue: Arc<Queue>) -> Arc<Self> {
        let fate = if sampled { Fate::Exported } else { Fate::Undecided };
        let held = Held { fate, spans: Spans::new(), root_has_ended: false };
        Arc::new(Self {
            id,
            state,
            sampled,
            exported: AtomicBool::new(sampled),
            queue,
            held: Mutex::new(held),
        })
    }

    /// Exports the trace whatever the sampler said, if that was not done too often within this second.
    pub(crate) fn keep(&self) {
        let mut held = self.held.lock();
        if matches!(held.fate, Fate::Undecided) && self.queue.may_keep() {
            held.fate = Fate::Exported;
            self.exported.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the trace is exported for sure.
    pub(crate) fn is_exported(&self) -> bool {
        self.exported.load(Ordering::Relaxed)
    }

    /// A span has ended. After the root, only spans of exported traces matter.
    pub(crate) fn ended(self: Arc<Self>, span: Box<Record>) {
        let mut held = self.held.lock();
        held.root_has_ended |= span.is_root;
        match held.fate {
            Fate::Exported => {
                held.spans.push(span);
                if held.root_has_ended || held.spans.len() >= MAX_HELD {
                    let spans = std::mem::take(&mut held.spans);
                    drop(held);
                    self.queue.push(self.clone(), spans);
                }
            }
            Fate::Undecided if held.root_has_ended => {
                held.fate = Fate::Forgotten;
                let forgotten = std::mem::take(&mut held.spans);
                // What is dropped with them may be anything, and must not find the trace in use.
                drop(held);
                drop(forgotten);
            }
            Fate::Undecided if held.spans.len() < MAX_HELD => held.spans.push(span),
            Fate::Undecided | Fate::Forgotten => {}
        }
    }
}
