//! One trace of this process: its spans, held until it is known whether anybody will see them.

mod spans;
mod spare;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use opentelemetry::trace::{SpanId, TraceId, TraceState};
use parking_lot::Mutex;

pub(crate) use spans::{Record, Spans};
pub(crate) use spare::give_back;

use crate::export::{Place, Queue};
use crate::notes::Note;

/// Most spans of a trace that are held. A trace that is exported with more is so in parts; of another, the later ones are lost.
const MAX_HELD: usize = 64;
/// Most that is written on the spans of a trace which may be forgotten.
const MAX_NOTES: usize = 16 * MAX_HELD;

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
    spans: Spans,
    root_has_ended: bool,
}

#[derive(Debug)]
enum Fate {
    Exported,
    /// Not sampled. It takes one of the places for such traces.
    Undecided(#[expect(dead_code, reason = "taken as long as it is there")] Place),
    Forgotten,
}

impl Trace {
    /// A trace. One that is not sampled needs a place among those that are held until their end.
    pub(crate) fn new(id: TraceId, state: TraceState, place: Option<Place>, queue: Arc<Queue>) -> Arc<Self> {
        let sampled = place.is_none();
        let fate = place.map_or(Fate::Exported, Fate::Undecided);
        let held = Held { fate, spans: spare::take(), root_has_ended: false };
        let exported = AtomicBool::new(sampled);
        Arc::new(Self { id, state, sampled, exported, queue, held: Mutex::new(held) })
    }

    /// Exports the trace whatever the sampler said. Returns whether it will be: only so many are in a second.
    pub(crate) fn keep(&self) -> bool {
        let mut held = self.held.lock();
        if matches!(held.fate, Fate::Undecided(_)) && self.queue.may_keep() {
            held.fate = Fate::Exported;
            self.exported.store(true, Ordering::Relaxed);
        }
        matches!(held.fate, Fate::Exported)
    }

    /// Whether the trace is exported for sure.
    pub(crate) fn is_exported(&self) -> bool {
        self.exported.load(Ordering::Relaxed)
    }

    /// Writes something on a span that is open.
    pub(crate) fn note(&self, span: SpanId, note: Note) {
        let mut held = self.held.lock();
        let has_room = match held.fate {
            Fate::Exported => true,
            Fate::Undecided(_) => held.spans.notes.len() < MAX_NOTES,
            Fate::Forgotten => false,
        };
        if has_room {
            held.spans.notes.push((span, note));
        }
    }

    /// A span has ended. After the root, only spans of exported traces matter.
    pub(crate) fn ended(self: &Arc<Self>, span: Record) {
        let mut held = self.held.lock();
        held.root_has_ended |= span.is_root;
        match held.fate {
            Fate::Exported => {
                held.spans.records.push(span);
                if held.root_has_ended || held.spans.records.len() >= MAX_HELD {
                    let spans = held.spans.take();
                    drop(held);
                    self.queue.push(self.clone(), spans);
                }
            }
            Fate::Undecided(_) if held.root_has_ended => {
                held.fate = Fate::Forgotten;
                let forgotten = std::mem::take(&mut held.spans);
                drop(held);
                give_back(forgotten);
            }
            Fate::Undecided(_) if held.spans.records.len() < MAX_HELD => held.spans.records.push(span),
            Fate::Undecided(_) | Fate::Forgotten => {}
        }
    }
}
