//! Spans as OTLP's protobuf: <https://github.com/open-telemetry/opentelemetry-proto>, `trace/v1/trace.proto`.
//!
//! Written straight from what was recorded. By way of OpenTelemetry's own structures a trace takes five times as long, which of a tenth of all
//! requests would be more than all other work for traces together.

use std::time::SystemTime;

use bytes::Bytes;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, TraceState};
use tokio::time::Instant;

use super::protobuf::{Writer, size_of_bytes, size_of_varint};
use crate::notes::{Note, Value};
use crate::tell::{Notes, Steps};
use crate::trace::{Record, Trace};

/// Longest text, in bytes: clients choose some of them.
const MAX_TEXT: usize = 1024;

/// `SpanFlags`: sampled; whether the parent is of another process is known; it is.
const SAMPLED: u32 = 1;
const KNOWS_PARENT: u32 = 0x100;
const PARENT_IS_REMOTE: u32 = 0x200;
/// `Status.code`
const STATUS_ERROR: u64 = 2;
/// `ScopeSpans.spans`
const SPANS: u32 = 2;
/// `Span.attributes`
const SPAN_ATTRIBUTES: u32 = 9;

/// What is the same in all exports of a process: who exports.
pub(super) struct Exported {
    /// `ResourceSpans.resource`
    resource: Vec<u8>,
    /// `ScopeSpans.scope`
    scope: Vec<u8>,
}

impl Exported {
    /// By a process with these attributes, and by code of this name and version.
    pub(super) fn by<'a>(
        attributes: impl Iterator<Item = (&'a str, Value<'a>)>,
        (name, version): (&str, &str),
    ) -> Self {
        let mut resource = Writer::default();
        let begun = resource.begin(1);
        attributes.for_each(|(key, value)| attribute(&mut resource, 1, key, &value));
        resource.finish(begun);
        let mut scope = Writer::default();
        let begun = scope.begin(1);
        scope.bytes(1, name.as_bytes());
        scope.bytes(2, version.as_bytes());
        scope.finish(begun);
        Self { resource: resource.into_bytes(), scope: scope.into_bytes() }
    }

    /// What of an `ExportTraceServiceRequest` stands before its spans, if those take so many bytes on [`Page`]s.
    pub(super) fn head(&self, spans: usize) -> Vec<u8> {
        let scope_spans = self.scope.len() + spans;
        let resource_spans = self.resource.len() + size_of_bytes(scope_spans);
        let mut out = Writer::default();
        out.length(1, resource_spans);
        out.written(&self.resource);
        out.length(2, scope_spans);
        out.written(&self.scope);
        out.into_bytes()
    }
}

/// What time it was when.
#[derive(Debug, Clone, Copy)]
struct Clock {
    now: Instant,
    /// Nanoseconds since 1970, as OTLP has times.
    unix: u64,
}

impl Clock {
    fn read() -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { now: Instant::now(), unix: since.as_nanos() as u64 }
    }

    fn unix(self, at: Instant) -> [u8; 8] {
        let unix = match self.now.checked_duration_since(at) {
            Some(ago) => self.unix.saturating_sub(ago.as_nanos() as u64),
            None => self.unix + (at - self.now).as_nanos() as u64,
        };
        unix.to_le_bytes()
    }
}

/// Spans as they stand in `ScopeSpans`.
#[derive(Debug)]
pub(crate) struct Page {
    out: Writer,
    clock: Clock,
    spans: usize,
}

/// Which span it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Named<'a> {
    pub(crate) id: SpanId,
    pub(crate) parent: SpanId,
    /// Whether the parent, if there is one, is of another process.
    pub(crate) is_root: bool,
    pub(crate) name: &'a str,
    pub(crate) kind: &'a SpanKind,
    pub(crate) start: Instant,
    pub(crate) end: Instant,
}

impl Page {
    /// An empty page with room for so many bytes.
    pub(super) fn new(room: usize) -> Self {
        Self { out: Writer::with_room(room), clock: Clock::read(), spans: 0 }
    }

    /// Spans on it.
    pub(super) fn spans(&self) -> usize {
        self.spans
    }

    /// All that is on it, for which no more memory is held than twice what it needs.
    pub(super) fn into_bytes(self) -> Bytes {
        let mut bytes = self.out.into_bytes();
        bytes.shrink_to(2 * bytes.len());
        bytes.into()
    }

    /// Writes a span with its steps.
    pub(super) fn record(&mut self, trace: &Trace, record: &Record) {
        let Record { id, parent, is_root, ref name, ref kind, start, end, ref facts, .. } = *record;
        let end = end.unwrap_or(start);
        self.span(trace, &Named { id, parent, is_root, name, kind, start, end }, |page| {
            record.notes.iter().for_each(|note| page.note(note));
            facts.tell(&mut Notes { page });
        });
        facts.steps(&mut Steps { page: self, trace, parent: id, start, end });
    }

    /// Writes a span with what `notes` writes on it.
    pub(crate) fn span(&mut self, trace: &Trace, span: &Named<'_>, notes: impl FnOnce(&mut Self)) {
        self.spans += 1;
        let begun = self.out.begin(SPANS);
        self.out.bytes(1, &trace.id.to_bytes());
        self.out.bytes(2, &span.id.to_bytes());
        if trace.state != TraceState::NONE {
            self.text(3, &trace.state.header());
        }
        let has_parent = span.parent != SpanId::INVALID;
        if has_parent {
            self.out.bytes(4, &span.parent.to_bytes());
        }
        self.text(5, span.name);
        self.out.varint(6, kind(span.kind));
        self.out.fixed64(7, self.clock.unix(span.start));
        self.out.fixed64(8, self.clock.unix(span.end));
        notes(self);
        let of_parent = if has_parent && span.is_root { PARENT_IS_REMOTE } else { 0 };
        self.out.fixed32(16, (SAMPLED | KNOWS_PARENT | of_parent).to_le_bytes());
        self.out.finish(begun);
    }

    fn note(&mut self, note: &Note) {
        match note {
            Note::Attribute(key, value) => self.attribute(key, value),
            Note::Event(name, time) => self.event(name, *time),
            Note::Error(problem) => self.error(problem),
        }
    }

    fn event(&mut self, name: &str, time: Instant) {
        let begun = self.out.begin(11);
        self.out.fixed64(1, self.clock.unix(time));
        self.text(2, name);
        self.out.finish(begun);
    }

    pub(crate) fn link(&mut self, to: &SpanContext) {
        let begun = self.out.begin(13);
        self.out.bytes(1, &to.trace_id().to_bytes());
        self.out.bytes(2, &to.span_id().to_bytes());
        self.out.finish(begun);
    }

    pub(crate) fn error(&mut self, problem: &str) {
        let begun = self.out.begin(15);
        self.text(2, problem);
        self.out.varint(3, STATUS_ERROR);
        self.out.finish(begun);
    }

    pub(crate) fn attribute(&mut self, key: &str, value: &Value<'_>) {
        attribute(&mut self.out, SPAN_ATTRIBUTES, key, value);
    }

    /// An attribute that is an `ArrayValue`.
    pub(crate) fn list<'v>(&mut self, key: &str, values: impl Iterator<Item = Value<'v>> + Clone) {
        let out = &mut self.out;
        let size = values.clone().map(|value| size_of_bytes(size_of_value(&value))).sum();
        begin_attribute(out, SPAN_ATTRIBUTES, key, size_of_bytes(size));
        out.length(5, size);
        for value in values {
            out.length(1, size_of_value(&value));
            any_value(out, &value);
        }
    }

    fn text(&mut self, field: u32, text: &str) {
        self.out.bytes(field, cut(text).as_bytes());
    }
}

const fn kind(kind: &SpanKind) -> u64 {
    match kind {
        SpanKind::Internal => 1,
        SpanKind::Server => 2,
        SpanKind::Client => 3,
        SpanKind::Producer => 4,
        SpanKind::Consumer => 5,
    }
}

/// A `KeyValue`.
fn attribute(out: &mut Writer, field: u32, key: &str, value: &Value<'_>) {
    begin_attribute(out, field, key, size_of_value(value));
    any_value(out, value);
}

/// The start of a `KeyValue` whose `AnyValue` takes so many bytes.
#[inline]
fn begin_attribute(out: &mut Writer, field: u32, key: &str, size: usize) {
    out.length(field, size_of_bytes(key.len()) + size_of_bytes(size));
    out.bytes(1, key.as_bytes());
    out.length(2, size);
}

/// What is in an `AnyValue`.
#[inline]
fn any_value(out: &mut Writer, value: &Value<'_>) {
    match value {
        Value::Text(text) => out.bytes(1, cut(text).as_bytes()),
        Value::Bool(value) => out.varint(2, u64::from(*value)),
        Value::Integer(value) => out.varint(3, value.cast_unsigned()),
        Value::Float(value) => out.fixed64(4, value.to_le_bytes()),
    }
}

/// Bytes that this takes, which stand before it.
#[inline]
fn size_of_value(value: &Value<'_>) -> usize {
    match value {
        Value::Text(text) => size_of_bytes(cut(text).len()),
        Value::Bool(_) => 2,
        Value::Integer(value) => 1 + size_of_varint(value.cast_unsigned()),
        Value::Float(_) => 9,
    }
}

fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT)]
}

#[cfg(test)]
mod tests;
