//! Spans as the exporter takes them.

use opentelemetry::trace::{SpanContext, SpanId, Status, TraceFlags};
use opentelemetry::{InstrumentationScope, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use crate::span::Record;
use crate::trace::Trace;

/// Longest text of an attribute or status, in bytes: clients choose some of them.
const MAX_TEXT: usize = 1024;

/// A span with all that it has still to tell.
pub(super) fn span_data(scope: &InstrumentationScope, trace: &Trace, mut span: Record) -> SpanData {
    if let Some(later) = span.later.take() {
        later(&mut span.notes);
    }
    let mut events = SpanEvents::default();
    events.events = span.notes.events;
    let mut links = SpanLinks::default();
    links.links = span.links;
    SpanData {
        span_context: SpanContext::new(trace.id, span.id, TraceFlags::SAMPLED, false, trace.state.clone()),
        parent_span_id: span.parent,
        parent_span_is_remote: span.is_root && span.parent != SpanId::INVALID,
        span_kind: span.kind,
        name: span.name,
        start_time: span.start,
        end_time: span.end,
        attributes: span.notes.attributes.into_iter().map(attribute).collect(),
        dropped_attributes_count: 0,
        events,
        links,
        status: status(span.status),
        instrumentation_scope: scope.clone(),
    }
}

fn status(status: Status) -> Status {
    match status {
        Status::Error { description } if description.len() > MAX_TEXT => Status::error(short(&description)),
        status => status,
    }
}

fn attribute(mut attribute: KeyValue) -> KeyValue {
    if let Value::String(text) = &attribute.value
        && text.as_str().len() > MAX_TEXT
    {
        attribute.value = Value::String(StringValue::from(short(text.as_str())));
    }
    attribute
}

fn short(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TEXT)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_cut_between_characters() {
        let long = "é".repeat(MAX_TEXT);
        assert_eq!(short(&long), "é".repeat(MAX_TEXT / 2));
        assert_eq!(short(&long[..10]), &long[..10]);
        let told = attribute(KeyValue::new("path", format!("a{long}"))).value;
        assert_eq!(told.as_str().len(), MAX_TEXT - 1);
    }
}
