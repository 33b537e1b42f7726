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
    /// `None` until it ends.
    pub(crate) end: Option<SystemTime>,
}

/// Spans in the order in which they began. All that is written on them is in one list: of most traces nothing is ever read, and one list is
/// soon forgotten.
#[derive(Default)]
pub(crate) struct Spans {
    pub(crate) records: Vec<Record>,
    pub(crate) notes: Vec<(SpanId, Note)>,
}

impl Spans {
    /// The span, unless it was taken.
    pub(crate) fn get(&mut self, id: SpanId) -> Option<&mut Record> {
        self.records.iter_mut().rfind(|record| record.id == id)
    }

    /// Takes the spans that have ended.
    pub(crate) fn take_ended(&mut self) -> Self {
        if self.records.iter().all(|record| record.end.is_some()) {
            return std::mem::take(self);
        }
        let records: Vec<_> = self.records.extract_if(.., |record| record.end.is_some()).collect();
        let notes =
            self.notes.extract_if(.., |(id, _)| records.iter().any(|record| record.id == *id)).collect();
        Self { records, notes }
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
