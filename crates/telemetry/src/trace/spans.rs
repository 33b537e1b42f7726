//! The spans of a trace, and what is written on them.

use std::borrow::Cow;
use std::fmt;
use std::time::SystemTime;

use opentelemetry::trace::{SpanId, SpanKind};

use crate::notes::Note;

/// A span.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) id: SpanId,
    pub(crate) parent: SpanId,
    /// Whether it has no parent in this process.
    pub(crate) is_root: bool,
    pub(crate) kind: SpanKind,
    pub(crate) name: Cow<'static, str>,
    pub(crate) start: SystemTime,
    /// Its start until it ends.
    pub(crate) end: SystemTime,
}

/// Spans in the order in which they ended. All that is written on them, and on those that are still open, is in one list: of most traces nothing
/// is ever read, and one list is soon forgotten.
#[derive(Default)]
pub(crate) struct Spans {
    pub(crate) records: Vec<Record>,
    pub(crate) notes: Vec<(SpanId, Note)>,
}

impl Spans {
    /// Takes all that have ended. What is written on the others stays.
    pub(crate) fn take(&mut self) -> Self {
        let mut taken = std::mem::take(self);
        let is_open = |id: SpanId| taken.records.iter().all(|record| record.id != id);
        self.notes = taken.notes.extract_if(.., |(id, _)| is_open(*id)).collect();
        taken
    }

    /// Makes it as good as new, but for the memory that it has.
    pub(crate) fn clear(&mut self) {
        self.records.clear();
        self.notes.clear();
    }
}

impl fmt::Debug for Spans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spans").field("records", &self.records).finish_non_exhaustive()
    }
}
