//! One span of a trace.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use http::header::HeaderMap;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, TraceFlags, TraceId};
use tokio::time::Instant;

use crate::annotations::{AttributeValue, SpanAnnotation};
use crate::buffered_trace::{BufferedTrace, SpanRecord};
use crate::context;
use crate::span_attributes::SpanAttributes;

/// Most that is written on a span, as of OpenTelemetry's own.
const MAX_ANNOTATIONS: usize = 128;

/// A span that ends when it is dropped. It may be stored, in a response body for instance, and sent to
/// another thread.
///
/// Where tracing is off it is empty, and every call returns at once. Otherwise it holds facts, which are told if the span is exported.
#[must_use = "a span that is dropped has ended"]
pub struct SpanHandle<T: SpanAttributes + 'static = ()> {
    /// `None` where tracing is off.
    open: Option<(Arc<BufferedTrace>, Box<SpanRecord<T>>)>,
}

impl<T: SpanAttributes> SpanHandle<T> {
    /// A handle that does nothing.
    pub const fn disabled() -> Self {
        Self { open: None }
    }

    /// Starts a span: the first of its trace in this process, below the parent if that is valid, or one below another.
    pub(crate) fn open(
        trace: Arc<BufferedTrace>,
        (parent, is_root): (SpanId, bool),
        (name, kind, start): (Cow<'static, str>, SpanKind, Instant),
        facts: T,
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
            attributes: facts,
        };
        Self { open: Some((trace, Box::new(record))) }
    }

    /// Starts a span below this one.
    pub fn child(&self, name: &'static str, kind: SpanKind) -> SpanHandle {
        match &self.open {
            None => SpanHandle::disabled(),
            Some(_) => self.child_at(name, kind, Instant::now(), || ()),
        }
    }

    /// Starts a span below this one of something that began at `start`.
    pub fn child_at<U: SpanAttributes>(
        &self,
        name: &'static str,
        kind: SpanKind,
        start: Instant,
        facts: impl FnOnce() -> U,
    ) -> SpanHandle<U> {
        match &self.open {
            None => SpanHandle::disabled(),
            Some((trace, record)) => {
                let what = (Cow::Borrowed(name), kind, start);
                SpanHandle::open(trace.clone(), (record.id, false), what, facts())
            }
        }
    }

    /// What is known of it, unless tracing is off.
    pub fn attributes(&self) -> Option<&T> {
        self.open.as_ref().map(|(_, record)| &record.attributes)
    }

    /// Adds to what is known of it, unless tracing is off.
    pub fn update_attributes(&mut self, know: impl FnOnce(&mut T)) {
        if let Some(facts) = self.attributes_mut() {
            know(facts);
        }
    }

    /// What is known of it, unless tracing is off.
    pub fn attributes_mut(&mut self) -> Option<&mut T> {
        self.open.as_mut().map(|(_, record)| &mut record.attributes)
    }

    /// Whether what is set here may be exported. Worth asking before computing an expensive value.
    #[must_use]
    pub const fn is_recording(&self) -> bool {
        self.open.is_some()
    }

    /// Identity of the trace, to be named in logs.
    #[must_use]
    pub fn trace_id(&self) -> Option<TraceId> {
        self.open.as_ref().map(|(trace, _)| trace.id)
    }

    /// [`SpanHandle::trace_id`], if the collector will get this trace for sure: what metrics may point to, and what is worth telling at once.
    #[must_use]
    pub fn exported_trace_id(&self) -> Option<TraceId> {
        self.open.as_ref().filter(|(trace, _)| trace.is_exported()).map(|(trace, _)| trace.id)
    }

    /// Identity of the span, for links to it.
    #[must_use]
    pub fn context(&self) -> Option<SpanContext> {
        let (trace, record) = self.open.as_ref()?;
        let flags = if trace.sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
        Some(SpanContext::new(trace.id, record.id, flags, false, trace.state.clone()))
    }

    /// Has the whole trace exported, whatever the sampler said, and notes why. That is done for so many traces in a second only.
    pub fn force_export(&mut self, why: &'static str) {
        self.set(crate::attribute_names::KEEP_REASON, why);
        if let Some((trace, _)) = &self.open {
            trace.force_export();
        }
    }

    fn annotate(&mut self, note: impl FnOnce() -> SpanAnnotation) {
        if let Some((_, record)) = &mut self.open
            && record.annotations.len() < MAX_ANNOTATIONS
        {
            record.annotations.push(note());
        }
    }

    /// Sets an attribute; [`crate::names`] has the standard ones. Set each once: the last does not replace.
    pub fn set(&mut self, key: &'static str, value: impl Into<AttributeValue<'static>>) {
        self.annotate(|| SpanAnnotation::Attribute(key, value.into()));
    }

    /// Gives the span another name, when more is known than at its start.
    pub fn rename(&mut self, name: impl Into<Cow<'static, str>>) {
        if let Some((_, record)) = &mut self.open {
            record.name = name.into();
        }
    }

    /// Notes that something happened now.
    pub fn event(&mut self, name: &'static str) {
        self.annotate(|| SpanAnnotation::Event(name, Instant::now()));
    }

    /// Marks the span as failed.
    pub fn error(&mut self, message: impl Into<Cow<'static, str>>) {
        self.annotate(|| SpanAnnotation::Error(message.into()));
    }

    /// Whether the sampler took its trace, which everybody who is called is told.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.open.as_ref().is_some_and(|(trace, _)| trace.sampled)
    }

    /// Makes this span the parent of whoever gets `headers`: replaces `traceparent` and `tracestate`.
    ///
    /// Where tracing is off, the headers stay, so that those of the client pass through.
    pub fn inject(&self, headers: &mut HeaderMap) {
        if let Some((trace, record)) = &self.open {
            context::inject(headers, (trace.id, record.id), trace.sampled, &trace.state);
        }
    }

    /// Says when the span ends, which is otherwise when it is dropped.
    pub fn set_end(&mut self, end: Instant) {
        if let Some((_, record)) = &mut self.open {
            record.end = Some(end.max(record.start));
        }
    }

    /// Ends the span now.
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
