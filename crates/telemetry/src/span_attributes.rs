//! Attributes that are written only when a span is exported.

use opentelemetry::trace::{SpanId, SpanKind};
use tokio::time::Instant;

use crate::annotations::AttributeValue;
use crate::context::TraceContext;
use crate::otlp::{SpanEncoder, SpanHeader};

/// Source of a span's attributes. They are written only if the span is exported, so for the nine in ten requests that are not, they only
/// occupy memory.
pub trait SpanAttributes: Send + Sync {
    /// Writes the attributes of the span.
    fn write_attributes(&self, writer: &mut AttributeWriter<'_>);

    /// Writes the child spans of the span.
    fn write_children(&self, _children: &mut ChildSpans<'_>) {}
}

/// Writes no attributes.
impl SpanAttributes for () {
    fn write_attributes(&self, _writer: &mut AttributeWriter<'_>) {}
}

/// Writes attributes, links and errors of an exported span.
#[derive(Debug)]
pub struct AttributeWriter<'a> {
    pub(crate) encoder: &'a mut SpanEncoder,
}

impl AttributeWriter<'_> {
    /// Sets an attribute; [`crate::attribute_names`] has the standard names. Set each once: a second value does not replace the first.
    pub fn set<'v>(&mut self, key: &'static str, value: impl Into<AttributeValue<'v>>) {
        self.encoder.encode_attribute(key, &value.into());
    }

    /// Sets an attribute with an array value.
    pub fn list<'v, V: Into<AttributeValue<'v>>>(
        &mut self,
        key: &'static str,
        values: impl IntoIterator<Item = V, IntoIter: Clone>,
    ) {
        self.encoder.encode_array_attribute(key, values.into_iter().map(Into::into));
    }

    /// Links the span to another span that caused it.
    pub fn link(&mut self, to: &crate::SpanContext) {
        self.encoder.encode_link(to);
    }

    /// Marks the span as failed, with a message.
    pub fn error(&mut self, message: &str) {
        self.encoder.encode_error(message);
    }
}

/// Writes child spans of an exported span.
#[derive(Debug)]
pub struct ChildSpans<'a> {
    pub(crate) encoder: &'a mut SpanEncoder,
    pub(crate) trace: &'a TraceContext,
    pub(crate) parent: SpanId,
    pub(crate) start: Instant,
    pub(crate) end: Instant,
}

impl ChildSpans<'_> {
    /// Start time of the parent span.
    #[must_use]
    pub const fn start(&self) -> Instant {
        self.start
    }

    /// End time of the parent span.
    #[must_use]
    pub const fn end(&self) -> Instant {
        self.end
    }

    /// Adds a child span from `start` to `end` with the attributes that `write` adds.
    pub fn add(
        &mut self,
        name: &'static str,
        (start, end): (Instant, Instant),
        write: impl FnOnce(&mut AttributeWriter<'_>),
    ) {
        let id = SpanId::from(fastrand::u64(1..));
        let (parent, kind) = (self.parent, &SpanKind::Internal);
        let span = SpanHeader { id, parent, is_root: false, name, kind, start, end };
        self.encoder.encode_span(self.trace, &span, |encoder| write(&mut AttributeWriter { encoder }));
    }
}
