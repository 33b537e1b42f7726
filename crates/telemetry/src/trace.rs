//! One trace of this process: its spans, held until it is known whether anybody will see them.

mod spans;
mod spare;

use std::sync::Arc;
use std::time::SystemTime;

use opentelemetry::trace::{SpanId, TraceId, TraceState};
use parking_lot::Mutex;

pub(crate) use spans::{Record, Spans};
pub(crate) use spare::give_back;

use crate::export::{Place, Queue};
use crate::notes::Note;

/// Most spans of a trace that are held. A trace that is exported with more is so in parts; of another, the later ones are lost.
const MAX_HELD: usize = 64;

/// What the spans of a trace share.
#[derive(Debug)]
pub(crate) struct Trace {
    pub(crate) id: TraceId,
    pub(crate) state: TraceState,
    /// Whether the sampler took it, which everybody who is called is told.
    pub(crate) sampled: bool,
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
        Arc::new(Self { id, state, sampled, queue, held: Mutex::new(held) })
    }

    /// Exports the trace whatever the sampler said. Returns whether it will be: only so many are in a second.
    pub(crate) fn keep(&self) -> bool {
        let mut held = self.held.lock();
        if matches!(held.fate, Fate::Undecided(_)) && self.queue.may_keep() {
            held.fate = Fate::Exported;
        }
        matches!(held.fate, Fate::Exported)
    }

    /// Whether the trace is exported for sure.
    pub(crate) fn is_exported(&self) -> bool {
        self.sampled || matches!(self.held.lock().fate, Fate::Exported)
    }

    /// A span begins.
    pub(crate) fn began(&self, span: Record) {
        let mut held = self.held.lock();
        let has_room = match held.fate {
            Fate::Exported => true,
            Fate::Undecided(_) => held.spans.records.len() < MAX_HELD,
            Fate::Forgotten => false,
        };
        if has_room {
            held.spans.records.push(span);
        }
    }

    /// Writes something on a span that is open.
    pub(crate) fn note(&self, span: SpanId, note: Note) {
        let mut held = self.held.lock();
        if held.spans.get(span).is_some() {
            held.spans.notes.push((span, note));
        }
    }

    /// Looks at a span that is open, if it is recorded.
    pub(crate) fn look<T>(&self, span: SpanId, look: impl FnOnce(&mut Record) -> T) -> Option<T> {
        self.held.lock().spans.get(span).map(look)
    }

    /// A span has ended. After the root, only spans of exported traces matter.
    pub(crate) fn ended(&self, span: SpanId) {
        let mut held = self.held.lock();
        let Some(record) = held.spans.get(span) else { return };
        // The clock may have been set back meanwhile.
        record.end = Some(SystemTime::now().max(record.start));
        let is_root = record.is_root;
        held.root_has_ended |= is_root;
        match held.fate {
            Fate::Exported if held.root_has_ended || held.spans.records.len() >= MAX_HELD => {
                let spans = held.spans.take_ended();
                drop(held);
                self.queue.push(self, spans);
            }
            Fate::Undecided(_) if held.root_has_ended => {
                held.fate = Fate::Forgotten;
                let forgotten = std::mem::take(&mut held.spans);
                drop(held);
                give_back(forgotten);
            }
            _ => {}
        }
    }
}
