//! Spans as OTLP's protobuf: <https://github.com/open-telemetry/opentelemetry-proto>, `trace/v1/trace.proto`.
//!
//! Written straight from what was recorded. By way of OpenTelemetry's own structures a trace takes five times as long, which of a tenth of all
//! requests would be more than all other work for traces together.

use std::time::SystemTime;

use opentelemetry::trace::{SpanKind, TraceState};
use opentelemetry::{Array, Value};

use crate::notes::{Event, Note, Notes};
use crate::trace::{Record, Spans, Trace};

/// Longest text, in bytes: clients choose some of them.
const MAX_TEXT: usize = 1024;

/// `SpanFlags`: sampled; whether the parent is of another process is known; it is.
const SAMPLED: u32 = 1;
const KNOWS_PARENT: u32 = 0x100;
const PARENT_IS_REMOTE: u32 = 0x200;
/// `Status.code`
const STATUS_ERROR: u64 = 2;

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
        resource: impl Iterator<Item = (&'a str, &'a Value)>,
        (name, version): (&str, &str),
    ) -> Self {
        let mut exported = Self { resource: Vec::new(), scope: Vec::new() };
        message(&mut exported.resource, 1, |out| {
            resource.for_each(|(key, value)| attribute(out, 1, key, value));
        });
        message(&mut exported.scope, 1, |out| {
            text(out, 1, name);
            text(out, 2, version);
        });
        exported
    }

    /// An `ExportTraceServiceRequest` with these spans, each as [`spans`] writes them, after `before`.
    pub(super) fn request(&self, before: &[u8], spans: &[u8]) -> Vec<u8> {
        let mut scope_spans = Vec::with_capacity(self.scope.len() + 16);
        varint(&mut scope_spans, (self.scope.len() + spans.len()) as u64);
        let mut resource_spans = Vec::with_capacity(self.resource.len() + 32);
        let length = self.resource.len() + 1 + scope_spans.len() + self.scope.len() + spans.len();
        key(&mut resource_spans, 1, Wire::Length);
        varint(&mut resource_spans, length as u64);
        resource_spans.extend_from_slice(&self.resource);
        key(&mut resource_spans, 2, Wire::Length);
        [before, &resource_spans, &scope_spans, &self.scope, spans].concat()
    }
}

/// Appends spans as they stand in `ScopeSpans`.
pub(super) fn spans(out: &mut Vec<u8>, trace: &Trace, spans: &Spans) {
    for record in &spans.records {
        let notes = spans.notes.iter().filter(|(id, _)| *id == record.id).map(|(_, note)| note);
        message(out, 2, |out| span(out, trace, record, notes));
    }
}

fn span<'a>(out: &mut Vec<u8>, trace: &Trace, record: &Record, notes: impl Iterator<Item = &'a Note>) {
    bytes(out, 1, &trace.id.to_bytes());
    bytes(out, 2, &record.id.to_bytes());
    if trace.state != TraceState::NONE {
        text(out, 3, &trace.state.header());
    }
    let has_parent = record.parent != opentelemetry::SpanId::INVALID;
    if has_parent {
        bytes(out, 4, &record.parent.to_bytes());
    }
    text(out, 5, &record.name);
    key(out, 6, Wire::Varint);
    varint(out, kind(&record.kind));
    time(out, 7, record.start);
    time(out, 8, record.end);
    notes.for_each(|note| self::note(out, note));
    let of_parent = if has_parent && record.is_root { PARENT_IS_REMOTE } else { 0 };
    key(out, 16, Wire::Fixed32);
    out.extend_from_slice(&(SAMPLED | KNOWS_PARENT | of_parent).to_le_bytes());
}

fn note(out: &mut Vec<u8>, note: &Note) {
    match note {
        Note::Attribute(key, value) => attribute(out, 9, key, value),
        Note::Event(event) => message(out, 11, |out| self::event(out, event)),
        Note::Link(to) => message(out, 13, |out| {
            bytes(out, 1, &to.trace_id().to_bytes());
            bytes(out, 2, &to.span_id().to_bytes());
        }),
        Note::Error(problem) => message(out, 15, |out| {
            text(out, 2, problem);
            key(out, 3, Wire::Varint);
            varint(out, STATUS_ERROR);
        }),
        Note::Later(later) => {
            let mut told = Notes::default();
            later.tell(&mut told);
            told.list.iter().for_each(|note| self::note(out, note));
        }
    }
}

fn event(out: &mut Vec<u8>, event: &Event) {
    time(out, 1, event.time);
    text(out, 2, event.name);
    for pair in &event.attributes {
        attribute(out, 3, pair.key.as_str(), &pair.value);
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

fn attribute(out: &mut Vec<u8>, field: u32, name: &str, value: &Value) {
    message(out, field, |out| {
        text(out, 1, name);
        message(out, 2, |out| any_value(out, value));
    });
}

/// An `AnyValue`.
fn any_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::String(value) => text(out, 1, value.as_str()),
        Value::Bool(value) => {
            key(out, 2, Wire::Varint);
            varint(out, u64::from(*value));
        }
        Value::I64(value) => {
            key(out, 3, Wire::Varint);
            varint(out, value.cast_unsigned());
        }
        Value::F64(value) => {
            key(out, 4, Wire::Fixed64);
            out.extend_from_slice(&value.to_le_bytes());
        }
        Value::Array(array) => message(out, 5, |out| match array {
            Array::Bool(values) => each(out, values, |value| Value::Bool(*value)),
            Array::I64(values) => each(out, values, |value| Value::I64(*value)),
            Array::F64(values) => each(out, values, |value| Value::F64(*value)),
            Array::String(values) => each(out, values, |value| Value::String(value.clone())),
            other => each(out, &[other], |other| Value::String(other.to_string().into())),
        }),
        // There is no other today.
        other => text(out, 1, &other.to_string()),
    }
}

fn each<T>(out: &mut Vec<u8>, values: &[T], value: impl Fn(&T) -> Value) {
    values.iter().for_each(|one| message(out, 1, |out| any_value(out, &value(one))));
}

/// Wire types of protobuf.
#[derive(Clone, Copy)]
enum Wire {
    Varint = 0,
    Fixed64 = 1,
    Length = 2,
    Fixed32 = 5,
}

fn key(out: &mut Vec<u8>, field: u32, wire: Wire) {
    varint(out, u64::from(field << 3 | wire as u32));
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value > 0x7f {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn time(out: &mut Vec<u8>, field: u32, time: SystemTime) {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    key(out, field, Wire::Fixed64);
    out.extend_from_slice(&(since.as_nanos() as u64).to_le_bytes());
}

fn text(out: &mut Vec<u8>, field: u32, text: &str) {
    bytes(out, field, &text.as_bytes()[..text.floor_char_boundary(MAX_TEXT)]);
}

fn bytes(out: &mut Vec<u8>, field: u32, bytes: &[u8]) {
    key(out, field, Wire::Length);
    varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// A message whose length is known once it is written: most have room for it in one byte, and the others are moved.
fn message(out: &mut Vec<u8>, field: u32, write: impl FnOnce(&mut Vec<u8>)) {
    key(out, field, Wire::Length);
    let at = out.len();
    out.push(0);
    write(out);
    let length = out.len() - at - 1;
    if let Ok(length @ ..0x80) = u8::try_from(length) {
        out[at] = length;
        return;
    }
    let mut digits = Vec::with_capacity(10);
    varint(&mut digits, length as u64);
    out.splice(at..=at, digits);
}

#[cfg(test)]
mod tests;
