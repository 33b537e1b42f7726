//! What is told of spans once it is known that somebody will see them.

use opentelemetry::trace::{SpanId, SpanKind};
use tokio::time::Instant;

use crate::annotations::AttributeValue;
use crate::buffered_trace::BufferedTrace;
use crate::export::otlp::{SpanEncoder, SpanHeader};

/// What is known of a span. It is asked to tell it if the span is exported, and not before: so it costs nine requests in ten nothing but
/// being kept.
pub trait SpanAttributes: Send + Sync {
    /// Says what is to be known of the span.
    fn write_attributes(&self, notes: &mut AttributeWriter<'_>);

    /// Says which steps it had. Each becomes a span below it.
    fn write_children(&self, _steps: &mut ChildSpans<'_>) {}
}

/// Nothing.
impl SpanAttributes for () {
    fn write_attributes(&self, _notes: &mut AttributeWriter<'_>) {}
}

/// What stands on a span that is being exported.
#[derive(Debug)]
pub struct AttributeWriter<'a> {
    pub(crate) encoder: &'a mut SpanEncoder,
}

impl AttributeWriter<'_> {
    /// Sets an attribute; [`crate::names`] has the standard ones. Set each once: the last does not replace.
    pub fn set<'v>(&mut self, key: &'static str, value: impl Into<AttributeValue<'v>>) {
        self.encoder.encode_attribute(key, &value.into());
    }

    /// Sets an attribute that has several values.
    pub fn list<'v, V: Into<AttributeValue<'v>>>(
        &mut self,
        key: &'static str,
        values: impl IntoIterator<Item = V, IntoIter: Clone>,
    ) {
        self.encoder.encode_array_attribute(key, values.into_iter().map(Into::into));
    }

    /// Says that the span is there because of another one.
    pub fn link(&mut self, to: &crate::SpanContext) {
        self.encoder.encode_link(to);
    }

    /// Says that the span has failed.
    pub fn error(&mut self, message: &str) {
        self.encoder.encode_error(message);
    }
}

/// The steps of a span that is being exported.
#[derive(Debug)]
pub struct ChildSpans<'a> {
    pub(crate) encoder: &'a mut SpanEncoder,
    pub(crate) trace: &'a BufferedTrace,
    pub(crate) parent: SpanId,
    pub(crate) start: Instant,
    pub(crate) end: Instant,
}

impl ChildSpans<'_> {
    /// When the span began whose steps they are.
    #[must_use]
    pub const fn start(&self) -> Instant {
        self.start
    }

    /// When it ended.
    #[must_use]
    pub const fn end(&self) -> Instant {
        self.end
    }

    /// A step from `start` to `end`, and what is to be known of it.
    pub fn add(
        &mut self,
        name: &'static str,
        (start, end): (Instant, Instant),
        tell: impl FnOnce(&mut AttributeWriter<'_>),
    ) {
        let id = SpanId::from(fastrand::u64(1..));
        let (parent, kind) = (self.parent, &SpanKind::Internal);
        let span = SpanHeader { id, parent, is_root: false, name, kind, start, end };
        self.encoder.encode_span(self.trace, &span, |page| tell(&mut AttributeWriter { encoder: page }));
    }
}
