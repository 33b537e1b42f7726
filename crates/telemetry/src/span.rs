//! Handle of an open span.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use http::header::HeaderMap;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, TraceFlags, TraceId};
use tokio::time::Instant;

use crate::annotations::{AttributeValue, SpanAnnotation};
use crate::buffered_trace::BufferedTrace;
use crate::context;
use crate::span_attributes::SpanAttributes;
use crate::span_record::SpanRecord;

/// Maximum number of annotations per span, as in OpenTelemetry's SDK.
const MAX_ANNOTATIONS: usize = 128;

/// A span that ends on drop. It may be stored, for example in a response body, and sent to another thread.
///
/// With tracing off it is empty, and every call returns at once. Otherwise it holds attributes, which are written only if the span is
/// exported.
#[must_use = "dropping a span ends it"]
pub struct SpanHandle<T: SpanAttributes + 'static = ()> {
    /// `None` if tracing is off.
    open: Option<(Arc<BufferedTrace>, Box<SpanRecord<T>>)>,
}

impl<T: SpanAttributes> SpanHandle<T> {
    /// A handle that does nothing.
    pub const fn disabled() -> Self {
        Self { open: None }
    }

    /// Starts a span: the first of its trace in this process (with a remote parent if valid), or a child span.
    pub(crate) fn open(
        trace: Arc<BufferedTrace>,
        (parent, is_root): (SpanId, bool),
        (name, kind, start): (Cow<'static, str>, SpanKind, Instant),
        attributes: T,
    ) -> Self {
        let id = SpanId::from(fastrand::u64(1..));
        let record = SpanRecord {
            id,
            parent,
            is_root,
            kind,
            name,
            start,
            end: None,
            annotations: Vec::new(),
            attributes,
        };
        Self { open: Some((trace, Box::new(record))) }
    }

    /// Starts a child span now.
    pub fn child(&self, name: &'static str, kind: SpanKind) -> SpanHandle {
        match &self.open {
            None => SpanHandle::disabled(),
            Some(_) => self.child_at(name, kind, Instant::now(), || ()),
        }
    }

    /// Starts a child span with start time `start`.
    pub fn child_at<U: SpanAttributes>(
        &self,
        name: &'static str,
        kind: SpanKind,
        start: Instant,
        attributes: impl FnOnce() -> U,
    ) -> SpanHandle<U> {
        match &self.open {
            None => SpanHandle::disabled(),
            Some((trace, record)) => {
                let header = (Cow::Borrowed(name), kind, start);
                SpanHandle::open(trace.clone(), (record.id, false), header, attributes())
            }
        }
    }

    /// The span's attributes, unless tracing is off.
    pub fn attributes(&self) -> Option<&T> {
        self.open.as_ref().map(|(_, record)| &record.attributes)
    }

    /// Updates the span's attributes, unless tracing is off.
    pub fn update_attributes(&mut self, update: impl FnOnce(&mut T)) {
        if let Some(attributes) = self.attributes_mut() {
            update(attributes);
        }
    }

    /// The span's attributes for changes, unless tracing is off.
    pub fn attributes_mut(&mut self) -> Option<&mut T> {
        self.open.as_mut().map(|(_, record)| &mut record.attributes)
    }

    /// Whether annotations may be exported. Check it before computing an expensive value.
    #[must_use]
    pub const fn is_recording(&self) -> bool {
        self.open.is_some()
    }

    /// Id of the trace, for log lines.
    #[must_use]
    pub fn trace_id(&self) -> Option<TraceId> {
        self.open.as_ref().map(|(trace, _)| trace.context.id)
    }

    /// [`SpanHandle::trace_id`], if this trace is certain to be exported: for exemplars in metrics.
    #[must_use]
    pub fn exported_trace_id(&self) -> Option<TraceId> {
        self.open.as_ref().filter(|(trace, _)| trace.is_exported()).map(|(trace, _)| trace.context.id)
    }

    /// Context of the span, for links to it.
    #[must_use]
    pub fn context(&self) -> Option<SpanContext> {
        let (trace, record) = self.open.as_ref()?;
        let flags = if trace.context.sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
        Some(SpanContext::new(trace.context.id, record.id, flags, false, trace.context.state.clone()))
    }

    /// Exports the whole trace regardless of sampling, up to a limit per second, and records the reason.
    pub fn force_export(&mut self, reason: &'static str) {
        self.set(crate::attribute_names::KEEP_REASON, reason);
        if let Some((trace, _)) = &self.open {
            trace.force_export();
        }
    }

    fn annotate(&mut self, annotation: impl FnOnce() -> SpanAnnotation) {
        if let Some((_, record)) = &mut self.open
            && record.annotations.len() < MAX_ANNOTATIONS
        {
            record.annotations.push(annotation());
        }
    }

    /// Sets an attribute; [`crate::attribute_names`] has the standard names. Set each once: a second value does not replace the first.
    pub fn set(&mut self, key: &'static str, value: impl Into<AttributeValue<'static>>) {
        self.annotate(|| SpanAnnotation::Attribute(key, value.into()));
    }

    /// Renames the span, when its final name is known later.
    pub fn rename(&mut self, name: impl Into<Cow<'static, str>>) {
        if let Some((_, record)) = &mut self.open {
            record.name = name.into();
        }
    }

    /// Records an event with the current time.
    pub fn event(&mut self, name: &'static str) {
        self.annotate(|| SpanAnnotation::Event(name, Instant::now()));
    }

    /// Marks the span as failed, with a message.
    pub fn error(&mut self, message: impl Into<Cow<'static, str>>) {
        self.annotate(|| SpanAnnotation::Error(message.into()));
    }

    /// Sampling decision of the trace, propagated to every callee.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.open.as_ref().is_some_and(|(trace, _)| trace.context.sampled)
    }

    /// Makes this span the parent for the receiver of `headers`: replaces `traceparent` and `tracestate`.
    ///
    /// With tracing off, the headers are unchanged, so those of the client pass through.
    pub fn inject(&self, headers: &mut HeaderMap) {
        if let Some((trace, record)) = &self.open {
            context::inject(
                headers,
                (trace.context.id, record.id),
                trace.context.sampled,
                &trace.context.state,
            );
        }
    }

    /// Sets the end time, which is otherwise the time of the drop.
    pub fn set_end(&mut self, end: Instant) {
        if let Some((_, record)) = &mut self.open {
            record.end = Some(end.max(record.start));
        }
    }

    pub fn end(self) {}
}

impl<T: SpanAttributes> Drop for SpanHandle<T> {
    fn drop(&mut self) {
        if let Some((trace, mut record)) = self.open.take() {
            record.end.get_or_insert_with(Instant::now);
            trace.record_span(record);
        }
    }
}

impl<T: SpanAttributes> fmt::Debug for SpanHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpanHandle")
            .field("trace_id", &self.trace_id())
            .field("recording", &self.is_recording())
            .finish()
    }
}
