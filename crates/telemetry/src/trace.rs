//! One trace of this process: its ended spans, held until it is known whether anybody will see them.

use std::sync::Arc;

use opentelemetry::trace::{TraceId, TraceState};
use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;

use crate::export::Queue;
use crate::span::{Record, Spans, give_back};

/// Most spans of a trace that are held. A sampled trace with more is exported in parts; of another, the later ones are lost.
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
    Undecided {
        _place: OwnedSemaphorePermit,
    },
    Forgotten,
}

impl Trace {
    /// A trace. One that is not sampled needs a place among those that are held until their end.
    pub(crate) fn new(
        id: TraceId,
        state: TraceState,
        place: Option<OwnedSemaphorePermit>,
        queue: Arc<Queue>,
    ) -> Arc<Self> {
        let sampled = place.is_none();
        let fate = place.map_or(Fate::Exported, |place| Fate::Undecided { _place: place });
        let held = Held { fate, spans: Vec::with_capacity(8), root_has_ended: false };
        Arc::new(Self { id, state, sampled, queue, held: Mutex::new(held) })
    }

    /// Exports the trace whatever the sampler said. Returns whether it will be: only so many are in a second.
    pub(crate) fn keep(&self) -> bool {
        let mut held = self.held.lock();
        if matches!(held.fate, Fate::Undecided { .. }) && self.queue.may_keep() {
            held.fate = Fate::Exported;
        }
        matches!(held.fate, Fate::Exported)
    }

    /// Whether the trace is exported for sure.
    pub(crate) fn is_exported(&self) -> bool {
        matches!(self.held.lock().fate, Fate::Exported)
    }

    /// A span has ended. After the root, only spans of exported traces matter.
    pub(crate) fn ended(self: &Arc<Self>, span: Box<Record>) {
        let mut held = self.held.lock();
        held.root_has_ended |= span.is_root;
        let sampled = matches!(held.fate, Fate::Exported);
        if sampled || (held.spans.len() < MAX_HELD && !matches!(held.fate, Fate::Forgotten)) {
            held.spans.push(span);
        }
        if sampled && (held.root_has_ended || held.spans.len() >= MAX_HELD) {
            let spans = std::mem::take(&mut held.spans);
            drop(held);
            self.queue.push(self.clone(), spans);
        } else if held.root_has_ended {
            held.fate = Fate::Forgotten;
            let forgotten = std::mem::take(&mut held.spans);
            drop(held);
            give_back(forgotten);
        }
    }
}
