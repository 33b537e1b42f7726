//! The recorded state of a span, from its start to its export.

use std::borrow::Cow;
use std::fmt;

use opentelemetry::trace::{SpanId, SpanKind};
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::annotations::SpanAnnotation;
use crate::context::TraceContext;
use crate::otlp::{SpanEncoder, SpanHeader};
use crate::span_attributes::{AttributeWriter, ChildSpans, SpanAttributes};

/// Recorded state of a span.
pub(crate) struct SpanRecord<T: ?Sized = dyn SpanAttributes> {
    pub(crate) id: SpanId,
    pub(crate) parent: SpanId,
    /// Whether the span has no parent in this process.
    pub(crate) is_root: bool,
    pub(crate) kind: SpanKind,
    pub(crate) name: Cow<'static, str>,
    pub(crate) start: Instant,
    /// End time, once the span has ended.
    pub(crate) end: Option<Instant>,
    pub(crate) annotations: Vec<SpanAnnotation>,
    pub(crate) attributes: T,
}

impl<T: ?Sized> fmt::Debug for SpanRecord<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpanRecord").field("id", &self.id).field("name", &self.name).finish_non_exhaustive()
    }
}

impl SpanRecord {
    /// Encodes the span and its child spans.
    pub(crate) fn encode(&self, trace: &TraceContext, encoder: &mut SpanEncoder) {
        let Self { id, parent, is_root, ref name, ref kind, start, end, ref attributes, .. } = *self;
        let end = end.unwrap_or(start);
        encoder.encode_span(trace, &SpanHeader { id, parent, is_root, name, kind, start, end }, |encoder| {
            self.annotations.iter().for_each(|annotation| encode_annotation(encoder, annotation));
            attributes.write_attributes(&mut AttributeWriter { encoder });
        });
        attributes.write_children(&mut ChildSpans { encoder, trace, parent: id, start, end });
    }
}

fn encode_annotation(encoder: &mut SpanEncoder, annotation: &SpanAnnotation) {
    match annotation {
        SpanAnnotation::Attribute(key, value) => encoder.encode_attribute(key, value),
        SpanAnnotation::Event(name, time) => encoder.encode_event(name, *time),
        SpanAnnotation::Error(problem) => encoder.encode_error(problem),
    }
}

/// Ended spans; most traces have so few that they need no heap allocation.
pub(crate) type SpanRecords = SmallVec<[Box<SpanRecord>; 4]>;
